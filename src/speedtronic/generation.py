"""Text generation with a trained model: sampling, the token loop, and loading a checkpoint.

Legend: `B` batch, `T` sequence, `V` vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from speedtronic.checkpoint import CheckpointManager
from speedtronic.checkpoint.initial_weights import load_initial_weights
from speedtronic.checkpoint.manifest import MANIFEST, read_manifest
from speedtronic.checkpoint.snapshot import read_state
from speedtronic.config import SpeedtronicConfig, load_config
from speedtronic.data.build import open_tokenizer
from speedtronic.data.tokenizers.base import StreamDecoder, Tokenizer
from speedtronic.data.tokenizers.from_file import tokenizer_from_spec
from speedtronic.durable.files import FileSystem
from speedtronic.errors import CheckpointError, ConfigError, InputError, warn
from speedtronic.model import evaluation_mode
from speedtronic.model.hugging_face import check_base
from speedtronic.model.wrappers import unwrapped
from speedtronic.registry import build_model, registry
from speedtronic.trainer.state import load_model

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
    cache: bool = True,
) -> Iterator[int]:
    """Continue a prompt, one token each time the iterator is asked for one.

    The model is called as `model(input_ids)` with int64 `(1, T)` on its own device and may return a mapping with
    "logits", a tuple with them, or the logits `(1, T, V)` themselves. A model with `make_cache(batch_size, length)` is
    called as `model(input_ids, cache=…)`, with the new tokens alone. Between two tokens it is in the train or
    evaluation mode it had before. Sampling uses a random generator of its own on the CPU, and leaves the global ones
    alone.

    Args:
        prompt_ids: at least one token.
        max_new_tokens: how many tokens to make at most.
        context_length: the model sees at most this many of the newest tokens. A model with a cache forgets the oldest
            quarter at a time, when it is full.
        temperature, top_k, top_p: as in `sample_next`.
        seed: from 0 to 2⁶³ - 1; equal seeds give equal tokens; `None` gives another text every time.
        vocab_limit: only ids below it are chosen, for a vocabulary that was padded.
        stop_id: the text ends before this token.
        cache: false computes everything again for each token, which gives the same tokens and takes longer.

    Raises:
        ConfigError: an argument is out of range. Raised at the call, before the first token.
        InputError: the model returns no logits.
    """
    columns = generate_columns(
        model,
        [prompt_ids],
        max_new_tokens=max_new_tokens,
        context_length=context_length,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        vocab_limit=vocab_limit,
        stop_id=stop_id,
        cache=cache,
    )
    return (column[0] for column in columns if column[0] is not None)


def generate_batch(model: nn.Module, prompts: Sequence[Sequence[int]], **options: Any) -> list[list[int]]:
    """Continue several prompts at once, which takes little longer than one.

    Args:
        prompts: of any lengths.
        options: as for `generate_tokens`. Row i is made with `seed + i`, so it is what `generate_tokens` makes of it
            with that seed, up to rounding, and as long as all fit the context.

    Returns:
        The new tokens of each.

    Raises:
        As `generate_tokens`.
    """
    rows: list[list[int]] = [[] for _ in prompts]
    for column in generate_columns(model, prompts, **options):
        for row, token in zip(rows, column, strict=True):
            if token is not None:
                row.append(token)
    return rows


def generate_columns(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    context_length: int,
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | None = None,
    vocab_limit: int | None = None,
    stop_id: int | None = None,
    cache: bool = True,
) -> Iterator[list[int | None]]:
    """The next token of each text, again and again; None of a text that has ended.

    Arguments and errors as for `generate_batch`, which gathers the tokens of each text.
    """
    _check_sampling(temperature, top_k, top_p)
    if not all(prompts):
        raise ConfigError("the prompt must have at least one token")
    for name, value in (("max_new_tokens", max_new_tokens), ("context_length", context_length)):
        if value < 1:
            raise ConfigError(f"{name} must be at least 1, not {value}")
    generators = []
    for number in range(len(prompts)):
        generators.append(torch.Generator())
        if seed is None:
            generators[-1].seed()
        else:
            check_seed(seed + number)
            generators[-1].manual_seed(seed + number)

    def columns() -> Iterator[list[int | None]]:
        texts = [list(prompt) for prompt in prompts]
        longest = max(map(len, texts)) + max_new_tokens
        window = _Window(model, texts, context_length, min(context_length, longest) if cache else None)
        ended = [False] * len(texts)
        for _ in range(max_new_tokens):
            logits = window.next_logits()[:, :vocab_limit]
            column: list[int | None] = []
            for row, (text, generator) in enumerate(zip(texts, generators, strict=True)):
                scores = logits[row : row + 1]
                token = int(sample_next(scores, temperature=temperature, top_k=top_k, top_p=top_p, generator=generator))
                ended[row] = ended[row] or token == stop_id
                text.append(token)
                column.append(None if ended[row] else token)
            if all(ended):
                return
            yield column

    return columns() if prompts else iter(())


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
        step: the global step of the weights; None if their file does not say.
    """

    model: nn.Module
    tokenizer: Tokenizer
    context_length: int
    step: int | None

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
        best: take the checkpoint that is the best by `eval.monitor`, not the newest.
        device: where the model goes.

    Raises:
        CheckpointError: there is no checkpoint, none was evaluated, none is sound, or its weights do not fit its model.
        ConfigError: the model cannot be built.
        InputError: the model was not trained on text.
    """
    state = load_state(Path(source), best=best)
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
    check_base(model, state.get("base"))
    try:
        load_model(model, {**state["model"], **(state.get("ema") or {})})
    except CheckpointError as error:
        first, *more = str(error).split("\n  ")[1:] or [str(error)]
        others = f", and {len(more)} more" if more else ""
        given = [one for one in overrides if one.startswith("model.")]
        remedy = f"; leave out {', '.join(given)}" if given else ""
        raise CheckpointError(
            f"{source}: the weights do not fit the model of the configuration: {first}{others}{remedy}"
        ) from error
    return _generator(model, tokenizer, config, state["step"], device)


def generator_from_weights(
    config: SpeedtronicConfig,
    weights: str | Path,
    *,
    device: str | torch.device = "cpu",
    warn: Callable[[str], None] = warn,
) -> TextGenerator:
    """Put weights that have nothing else with them into the model of a configuration, ready to generate.

    Args:
        config: names the model, which must be registered already, and the data, whose tokenizer is opened.
        weights: a safetensors file, as `speedtronic diloco pull` and `checkpoints export` write one.
        device: where the model goes.
        warn: told what did not fit if `run.init_strict` is false.

    Raises:
        CheckpointError: there is no such file, or its weights do not fit the model.
        ConfigError: the model cannot be built.
        DataError: the tokenizer cannot be read from the data.
        InputError: the data has no text.
    """
    tokenizer = open_tokenizer(config.data)
    if tokenizer is None:
        raise InputError(
            "weights alone do not say which text their token ids mean, and the configuration does not either; set "
            "data.shards or data.text_path, with data.tokenizer, to what they were trained on"
        )
    model = build_model(config)
    load_initial_weights(
        model,
        weights,
        strict=config.run.init_strict,
        warn=warn,
        advice="Name the YAML, or the folder of the run, that they were trained with, or give its model.… keys too",
    )
    return _generator(model, tokenizer, config, None, device)


def sample_writer(
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    *,
    samples: int,
    max_new_tokens: int,
    context_length: int,
    seed: int,
) -> Callable[[nn.Module], list[dict[str, str]]]:
    """What lets a model write at each evaluation: a function of the model that returns `prompt` and `text` of each.

    Every call uses the same random numbers, so that texts of different steps can be compared. The temperature is 0.8.

    Args:
        tokenizer: of the training data.
        prompts: texts to continue; without any, the model begins a document.
        samples: texts for each prompt.
        max_new_tokens: of a text, which ends sooner where the model ends its document.
        context_length: the model sees at most this many of the newest tokens.
        seed: of the first text; text i has `seed + i`.

    Raises:
        DataError: the tokenizer cannot encode a prompt.
    """
    asked = [prompt for prompt in prompts or [""] for _ in range(samples)]
    encoded = [tokenizer.encode(prompt) or [tokenizer.separator_id] for prompt in asked]

    def write(model: nn.Module) -> list[dict[str, str]]:
        rows = generate_batch(
            model,
            encoded,
            max_new_tokens=max_new_tokens,
            context_length=context_length,
            seed=seed,
            vocab_limit=tokenizer.vocab_size,
            stop_id=tokenizer.separator_id,
        )
        return [{"prompt": prompt, "text": tokenizer.decode(row)} for prompt, row in zip(asked, rows, strict=True)]

    return write


def _generator(
    model: nn.Module, tokenizer: Tokenizer, config: SpeedtronicConfig, step: int | None, device: str | torch.device
) -> TextGenerator:
    return TextGenerator(
        model=model.to(device).eval(),
        tokenizer=tokenizer,
        context_length=context_length_of(config),
        step=step,
    )


def context_length_of(config: SpeedtronicConfig) -> int:
    """The longest sequence that a model is trained on, in tokens."""
    longest = config.model.max_seq_len
    return min(longest, config.data.block_size or longest)


def load_state(source: Path, *, best: bool) -> dict[str, Any]:
    """The state in the newest sound checkpoint of a folder, or in the best one, or in the checkpoint that is named.

    Raises:
        CheckpointError: there is none, none is sound, or none was evaluated.
        ConfigError: the best is asked of one checkpoint.
    """
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


class _Window:
    """The newest tokens of some texts, as the model sees them.

    A model with a cache sees only the tokens that it has not seen yet. When its window is full it starts a new one,
    with three quarters of the context, so that this is rare.
    """

    def __init__(self, model: nn.Module, texts: list[list[int]], context_length: int, cache_length: int | None) -> None:
        self._model = unwrapped(model)
        self._texts = texts
        self._context_length = context_length
        self._make_cache = getattr(self._model, "make_cache", None)
        self._cache_length = cache_length
        self._cache: Any = None
        self._lengths: list[int] = []
        parameter = next(model.parameters(), None)
        self._device = torch.device("cpu") if parameter is None else parameter.device

    def next_logits(self) -> Tensor:
        """Float32 `(B, V)` on the CPU: the scores of the tokens that follow the texts."""
        with evaluation_mode(self._model), torch.inference_mode():
            if self._make_cache is None:
                return torch.cat([self._whole(text[-self._context_length :]) for text in self._texts])
            # How long each text is in this window, one more than at the last call; none is longer than the context.
            self._lengths = [length + 1 for length in self._lengths]
            if not self._lengths or max(self._lengths) > self._context_length:
                kept = self._context_length - self._context_length // 4 if self._lengths else self._context_length
                self._lengths = [min(kept, len(text)) for text in self._texts]
                self._cache = None
            if self._cache_length is None:
                texts = zip(self._texts, self._lengths, strict=True)
                return torch.cat([self._whole(text[-length:]) for text, length in texts])
            return self._with_cache(self._cache_length)

    def _with_cache(self, cache_length: int) -> Tensor:
        mask = None
        if self._cache is None:
            # Padding on the left, so that the newest tokens stand in one column.
            assert self._make_cache is not None
            self._cache = self._make_cache(len(self._texts), cache_length)
            width = max(self._lengths)
            ids = torch.zeros((len(self._texts), width), dtype=torch.int64)
            for row, (text, length) in enumerate(zip(self._texts, self._lengths, strict=True)):
                ids[row, width - length :] = torch.tensor(text[-length:])
            if min(self._lengths) < width:
                mask = (torch.arange(width) >= width - torch.tensor(self._lengths)[:, None]).to(self._device)
        else:
            ids = torch.tensor([[text[-1]] for text in self._texts])
        return _last_logits(self._model(ids.to(self._device), attention_mask=mask, cache=self._cache))

    def _whole(self, ids: list[int]) -> Tensor:
        return _last_logits(self._model(torch.tensor([ids], device=self._device)))


def _last_logits(output: Any) -> Tensor:
    """Float32 `(B, V)` on the CPU, of the last position."""
    return logits_of(output)[:, -1].float().cpu()


def logits_of(output: Any) -> Tensor:
    """The logits `(B, T, V)` in what a language model returned.

    Raises:
        InputError: there are none.
    """
    # The first tensor of three dimensions: of a mapping's "logits", of a tuple's fields, or the output itself.
    candidates = [output]
    if isinstance(output, Mapping):
        candidates = [output.get("logits")]
    elif isinstance(output, tuple | list):
        candidates = list(output)
    for candidate in candidates:
        if isinstance(candidate, Tensor) and candidate.ndim == 3:
            return candidate
    raise InputError(
        f"the model returned {type(output).__name__} without logits of shape (B, T, V); to generate, "
        "model(input_ids) must return them alone, in a tuple, or as 'logits' of a mapping"
    )
