"""Text generation with a trained model: sampling, the token loop, and loading a checkpoint.

Legend: `B` batch, `T` sequence, `V` vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from speedtronic.checkpoint import CheckpointManager
from speedtronic.checkpoint.manifest import MANIFEST, read_manifest
from speedtronic.checkpoint.snapshot import read_state
from speedtronic.config import load_config
from speedtronic.data.tokenizers.base import StreamDecoder, Tokenizer
from speedtronic.data.tokenizers.from_file import tokenizer_from_spec
from speedtronic.durable.files import FileSystem
from speedtronic.errors import CheckpointError, ConfigError, InputError
from speedtronic.model import evaluation_mode
from speedtronic.registry import build_model, registry

LARGEST_SEED = 2**63 - 1


def sample_next(
    logits: Tensor,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Choose one token per row.

    Args:
        logits: `(B, V)` floating.
        temperature: divides the logits. 0, or a value that is 0 in float32, takes the most likely token and uses no
            random number.
        top_k: keep the k most likely tokens; a k beyond V keeps all.
        top_p: of those, keep the smallest number of most likely tokens whose probabilities sum to at least p (nucleus
            sampling, Holtzman et al. 2020).
        generator: makes the random numbers, on the device of the logits; torch's global one by default.

    Returns:
        int64 `(B,)`.

    Raises:
        ConfigError: an argument is out of range.
    """
    _check_sampling(temperature, top_k, top_p)
    if temperature < torch.finfo(torch.float32).tiny:
        return logits.argmax(-1)
    # The score of the most likely token becomes 0 before the division, so that a tiny temperature cannot overflow.
    scores = (logits.float() - logits.amax(-1, keepdim=True).float()) / temperature
    if top_k is not None:
        best = scores.topk(min(top_k, scores.size(-1)), dim=-1)
        scores = torch.full_like(scores, -math.inf).scatter(-1, best.indices, best.values)
    if top_p is not None:
        ordered, order = scores.sort(dim=-1, descending=True)
        probabilities = ordered.softmax(-1)
        # A token goes where the ones before it reach p already. The first one always stays.
        goes = probabilities.cumsum(-1) - probabilities >= top_p
        goes[..., 0] = False
        scores = torch.full_like(scores, -math.inf).scatter(-1, order, ordered.masked_fill(goes, -math.inf))
    return torch.multinomial(scores.softmax(-1), 1, generator=generator).squeeze(-1)


def generate_tokens(
    model: nn.Module,
    prompt_ids: Sequence[int],
    *,
    max_new_tokens: int,
    context_length: int,
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | None = None,
    vocab_limit: int | None = None,
    stop_id: int | None = None,
) -> Iterator[int]:
    """Continue a prompt, one token each time the iterator is asked for one.

    The model is called as `model(input_ids)` with int64 `(1, T)` on its own device and may return a mapping with
    "logits", a tuple with them, or the logits `(1, T, V)` themselves. Between two tokens it is in the train or
    evaluation mode it had before. Sampling uses a random generator of its own on the CPU, and leaves the global ones
    alone.

    Args:
        prompt_ids: at least one token.
        max_new_tokens: how many tokens to make at most.
        context_length: the model sees at most this many of the newest tokens.
        temperature, top_k, top_p: as in `sample_next`.
        seed: from 0 to 2⁶³ - 1; equal seeds give equal tokens; `None` gives another text every time.
        vocab_limit: only ids below it are chosen, for a vocabulary that was padded.
        stop_id: the text ends before this token.

    Raises:
        ConfigError: an argument is out of range. Raised at the call, before the first token.
        InputError: the model returns no logits.
    """
    _check_sampling(temperature, top_k, top_p)
    if not prompt_ids:
        raise ConfigError("the prompt must have at least one token")
    for name, value in (("max_new_tokens", max_new_tokens), ("context_length", context_length)):
        if value < 1:
            raise ConfigError(f"{name} must be at least 1, not {value}")
    if seed is not None:
        check_seed(seed)
    generator = torch.Generator()
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(seed)

    def tokens() -> Iterator[int]:
        ids = list(prompt_ids)
        for _ in range(max_new_tokens):
            logits = _next_logits(model, ids[-context_length:])[:, :vocab_limit]
            token = sample_next(logits, temperature=temperature, top_k=top_k, top_p=top_p, generator=generator).item()
            if token == stop_id:
                return
            ids.append(int(token))
            yield ids[-1]

    return tokens()


def check_seed(seed: int) -> None:
    """Raise `ConfigError` for a seed that a random generator does not take."""
    if not 0 <= seed <= LARGEST_SEED:
        raise ConfigError(f"the seed must be from 0 to 2**63-1, not {seed}")


@dataclass(frozen=True)
class TextGenerator:
    """A trained model with what it needs to read and write text.

    Attributes:
        model: in evaluation mode, on its device.
        tokenizer: the tokenizer that the model was trained with.
        context_length: longest sequence that it was trained on, in tokens.
        step: the global step of the weights.
    """

    model: nn.Module
    tokenizer: Tokenizer
    context_length: int
    step: int

    def stream(
        self,
        prompt: str,
        *,
        max_new_tokens: int = 200,
        temperature: float = 0.8,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | None = None,
    ) -> Iterator[str]:
        """Continue a prompt in pieces of text, until the model ends its document or `max_new_tokens` are made.

        The prompt itself is not repeated. After an empty prompt the text is the start of a document. Arguments and
        errors as in `generate_tokens`; `DataError` for a prompt that the tokenizer cannot encode.
        """
        decoder = StreamDecoder(self.tokenizer)
        separator = self.tokenizer.separator_id
        tokens = generate_tokens(
            self.model,
            self.tokenizer.encode(prompt) or [separator],
            max_new_tokens=max_new_tokens,
            context_length=self.context_length,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
            vocab_limit=self.tokenizer.vocab_size,
            stop_id=separator,
        )

        # A generator of its own, so that a wrong argument raises at the call and not at the first piece.
        def pieces() -> Iterator[str]:
            for token in tokens:
                yield decoder.push(token)
            yield decoder.flush()

        return pieces()


def load_generator(
    source: str | Path,
    *,
    extra: Mapping[str, Any] | None = None,
    overrides: Sequence[str] = (),
    best: bool = False,
    device: str | torch.device = "cpu",
) -> TextGenerator:
    """Load the newest sound checkpoint below a folder, or the best one, ready to generate.

    Where the run kept an average of the weights (`optimizer.ema`), the averaged weights are loaded, as they were
    evaluated.

    The checkpoint's own configuration describes the model. Its name must be registered already, since nothing that a
    checkpoint names is ever imported.

    Args:
        source: a run's output folder, its checkpoints folder, or one checkpoint.
        extra: `model.extra` of the run, for values that a checkpoint leaves out because their keys look secret.
        overrides: `section.key=value` strings that replace values of the checkpoint's configuration.
        best: take the checkpoint with the lowest evaluation loss, not the newest.
        device: where the model goes.

    Raises:
        CheckpointError: there is no checkpoint, none was evaluated, none is sound, or its weights do not fit its model.
        ConfigError: the model cannot be built.
        InputError: the model was not trained on text.
    """
    state = _load_state(Path(source), best=best)
    if state.get("tokenizer") is None:
        raise InputError(f"{source}: this model cannot write, because its run had no tokenizer{_whose_data(state)}")
    tokenizer = tokenizer_from_spec(state["tokenizer"])
    if not state.get("config"):
        raise CheckpointError(f"{source}: this checkpoint has no configuration; name the YAML it was trained with")
    config = load_config(state["config"], overrides)
    if config.model.name not in registry:
        raise ConfigError(
            f"{source}: this checkpoint is of the custom model {config.model.name!r}, and no code that a checkpoint "
            "names is ever imported; name the YAML it was trained with, since its plugins define the model"
        )
    for key, value in (extra or {}).items():
        if config.model.extra.get(key) is None:
            config.model.extra[key] = value
    model = build_model(config)
    try:
        model.load_state_dict({**state["model"], **(state.get("ema") or {})})
    except RuntimeError as error:
        raise CheckpointError(f"the checkpoint's weights do not fit its model: {error}") from error
    longest = config.model.max_seq_len
    return TextGenerator(
        model=model.to(device).eval(),
        tokenizer=tokenizer,
        context_length=min(longest, config.data.block_size or longest),
        step=state["step"],
    )


def _load_state(source: Path, *, best: bool) -> dict[str, Any]:
    if (source / MANIFEST).is_file():
        if best:
            raise ConfigError(f"{source}: is one checkpoint; to take the best, name the folder of its run")
        return _state_of(source)
    below = source / "checkpoints"
    manager = CheckpointManager(below if below.is_dir() else source)
    state = manager.use_newest(_state_of, best=True) if best else manager.load_latest()
    if state is None:
        raise CheckpointError(f"{source}: there is no checkpoint here; train first, or name the folder of a run")
    return state


def _whose_data(state: Mapping[str, Any]) -> str:
    """What a run without a tokenizer was trained on, as far as its checkpoint says."""
    data = (state.get("config") or {}).get("data") or {}
    if data.get("dataset") is not None:
        return (
            f": its data is that of data.dataset: {data['dataset']}; if this is text as token ids, train with "
            "data.tokenizer, which the checkpoints then keep"
        )
    return ": synthetic data is random token ids, no text" if data.get("synthetic") else ""


def _state_of(checkpoint: Path) -> dict[str, Any]:
    files = FileSystem()
    try:
        return read_state(files, checkpoint, read_manifest(files, checkpoint))
    except CheckpointError as error:
        raise CheckpointError(f"{checkpoint}: {error}") from error


def _check_sampling(temperature: float, top_k: int | None, top_p: float | None) -> None:
    if not (math.isfinite(temperature) and temperature >= 0.0):
        raise ConfigError(f"temperature must be 0 (always the likeliest token) or more, not {temperature}")
    if top_k is not None and top_k < 1:
        raise ConfigError(f"top_k must be at least 1, not {top_k}")
    if top_p is not None and not 0.0 < top_p <= 1.0:
        raise ConfigError(f"top_p must be greater than 0 and at most 1, not {top_p}")


def _next_logits(model: nn.Module, ids: list[int]) -> Tensor:
    """Float32 `(1, V)` on the CPU: the scores of the token that follows `ids`."""
    parameter = next(model.parameters(), None)
    device = torch.device("cpu") if parameter is None else parameter.device
    with evaluation_mode(model), torch.inference_mode():
        output = model(torch.tensor([ids], device=device))
        # The first tensor of three dimensions: of a mapping's "logits", of a tuple's fields, or the output itself.
        candidates = [output]
        if isinstance(output, Mapping):
            candidates = [output.get("logits")]
        elif isinstance(output, tuple | list):
            candidates = list(output)
        for candidate in candidates:
            if isinstance(candidate, Tensor) and candidate.ndim == 3:
                return candidate[:, -1].float().cpu()
    raise InputError(
        f"the model returned {type(output).__name__} without logits of shape (B, T, V); to generate, "
        "model(input_ids) must return them alone, in a tuple, or as 'logits' of a mapping"
    )
