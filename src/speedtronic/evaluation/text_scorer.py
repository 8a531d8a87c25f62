"""Scores and continues texts with a language model, many at a time: what standard tasks ask of one."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from speedtronic.data.tokenizers.base import StreamDecoder
from speedtronic.errors import ConfigError
from speedtronic.generation import TextGenerator, generate_columns, logits_of
from speedtronic.model import evaluation_mode

_DEFAULT_NEW_TOKENS = 256
_OPTIONS = {"until", "do_sample", "temperature", "top_k", "top_p", "max_gen_toks"}


class _Window(NamedTuple):
    """Tokens that the model sees, and the last tokens that it is to predict, one for each of the last positions."""

    request: int
    inputs: Sequence[int]
    targets: Sequence[int]


class TextScorer:
    """A language model that tells how likely texts are, and continues them.

    The model is called as `model(input_ids)` with int64 `(B, T)`, padded with zeros on the right, which no position of
    a causal model sees. A text that is longer than the context is scored in parts: each token once, with as much before
    it as fits.

    Args:
        generator: the model with its tokenizer. What has no context comes after the token that ends documents.
        batch_size: texts in one forward pass.
    """

    def __init__(self, generator: TextGenerator, *, batch_size: int = 8) -> None:
        if batch_size < 1:
            raise ConfigError(f"the batch size must be at least 1, not {batch_size}")
        self._generator = generator
        self._tokenizer = generator.tokenizer
        self._batch_size = batch_size

    def loglikelihood(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[float, bool]]:
        """Of each context and continuation: the log-probability of the continuation in nats, and whether each of its
        tokens is the likeliest one.

        White space between the two belongs to the continuation, as the tokens of most tokenizers begin with a space.
        """
        requests = []
        for context, continuation in pairs:
            stripped = context.rstrip()
            before = self._tokenizer.encode(stripped)
            whole = self._tokenizer.encode(context + continuation)
            # A tokenizer may join the last characters of the context with those that follow. Then these are scored too.
            requests.append((whole, len(before)) if before else self._begun(whole))
        return self._score(requests)

    def loglikelihood_rolling(self, texts: Sequence[str]) -> list[float]:
        """The log-probability of each whole text, in nats."""
        return [total for total, _ in self._score([self._begun(self._tokenizer.encode(text)) for text in texts])]

    def generate_until(self, requests: Sequence[tuple[str, Mapping[str, Any]]]) -> list[str]:
        """What the model writes after each context, up to the first of some texts that end it.

        The options are those of lm-eval's tasks: `until`, a text or several; `max_gen_toks`, 256 without; and with
        `do_sample`, `temperature`, `top_k` and `top_p`. Without `do_sample` each token is the likeliest one.

        Raises:
            ConfigError: an option is none of these.
        """
        written = [""] * len(requests)
        groups: dict[str, list[int]] = {}
        for number, (_, options) in enumerate(requests):
            groups.setdefault(json.dumps(dict(options), sort_keys=True), []).append(number)
        for numbers in groups.values():
            options = requests[numbers[0]][1]
            if unknown := sorted(set(options) - _OPTIONS):
                raise ConfigError(
                    f"the task asks to generate with {', '.join(unknown)}; known are {', '.join(sorted(_OPTIONS))}"
                )
            prompts = {number: self._tokenizer.encode(requests[number][0]) for number in numbers}
            # Prompts of like lengths together, so that little is padded.
            ordered = sorted(numbers, key=lambda number: len(prompts[number]))
            for start in range(0, len(ordered), self._batch_size):
                batch = ordered[start : start + self._batch_size]
                texts = self._continue([prompts[number] for number in batch], options)
                for number, text in zip(batch, texts, strict=True):
                    written[number] = text
        return written

    def _begun(self, tokens: list[int]) -> tuple[list[int], int]:
        """A whole text after the token that ends documents, and the place of its first token."""
        return [self._tokenizer.separator_id, *tokens], 1

    def _score(self, requests: Sequence[tuple[list[int], int]]) -> list[tuple[float, bool]]:
        windows = [window for number, request in enumerate(requests) for window in self._windows(number, *request)]
        # The longest first: if memory is short, that shows at once.
        windows.sort(key=lambda window: -len(window.inputs))
        totals, greedy = [0.0] * len(requests), [True] * len(requests)
        model = self._generator.model
        device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        for start in range(0, len(windows), self._batch_size):
            batch = windows[start : start + self._batch_size]
            ids = torch.zeros((len(batch), len(batch[0].inputs)), dtype=torch.int64)
            for row, window in enumerate(batch):
                ids[row, : len(window.inputs)] = torch.tensor(window.inputs)
            with evaluation_mode(model), torch.inference_mode():
                logits = logits_of(model(ids.to(device)))
                for row, window in enumerate(batch):
                    scores = logits[row, len(window.inputs) - len(window.targets) : len(window.inputs)].float()
                    targets = torch.tensor(window.targets, device=device)
                    found = scores.log_softmax(-1).gather(1, targets[:, None])
                    totals[window.request] += (
                        found.double().sum().item() if device.type != "mps" else found.sum().item()
                    )
                    greedy[window.request] &= bool((scores.argmax(-1) == targets).all())
        return list(zip(totals, greedy, strict=True))

    def _windows(self, number: int, tokens: list[int], first: int) -> Iterator[_Window]:
        context = self._generator.context_length
        while first < len(tokens):
            end = min(first + context, len(tokens))
            yield _Window(number, tokens[max(0, end - 1 - context) : end - 1], tokens[first:end])
            first = end

    def _continue(self, prompts: list[list[int]], options: Mapping[str, Any]) -> list[str]:
        until = options.get("until") or []
        stops = [until] if isinstance(until, str) else list(until)
        samples = bool(options.get("do_sample", False))
        columns = generate_columns(
            self._generator.model,
            [prompt or [self._tokenizer.separator_id] for prompt in prompts],
            max_new_tokens=int(options.get("max_gen_toks", _DEFAULT_NEW_TOKENS)),
            context_length=self._generator.context_length,
            temperature=float(options.get("temperature", 1.0)) if samples else 0.0,
            top_k=options.get("top_k") if samples else None,
            top_p=options.get("top_p") if samples else None,
            seed=0,
            vocab_limit=self._tokenizer.vocab_size,
            stop_id=self._tokenizer.separator_id,
        )
        texts = [""] * len(prompts)
        decoders = [StreamDecoder(self._tokenizer) for _ in prompts]
        ended = [False] * len(prompts)
        for column in columns:
            for row, token in enumerate(column):
                if token is not None and not ended[row]:
                    texts[row] += decoders[row].push(token)
                ended[row] = ended[row] or token is None or any(stop in texts[row] for stop in stops)
            if all(ended):
                break
        texts = [text + decoder.flush() for text, decoder in zip(texts, decoders, strict=True)]
        return [text[: min((at for stop in stops if (at := text.find(stop)) >= 0), default=None)] for text in texts]
