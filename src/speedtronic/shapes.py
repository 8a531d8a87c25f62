"""Startup shape validation: find sizes that are as slow as the next larger aligned size.

Tensor cores multiply half-precision matrices in tiles. A side that is a multiple of 16 bytes (8 elements of bfloat16 or
float16) fills the tiles. Any other side is padded, or the product does not use the tensor cores at all (NVIDIA, "Matrix
Multiplication Background User's Guide", Tensor Core Requirements). Nothing here stops a run.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from numbers import Integral
from typing import Any, Literal, Protocol, TypeAlias

import torch
from torch import nn

from speedtronic.config import SpeedtronicConfig
from speedtronic.errors import ConfigError
from speedtronic.precision import Mode, PrecisionPlan

Alignment: TypeAlias = int | Literal["auto", "none"] | None
WarningCode = Literal[
    "batch_alignment",
    "sequence_alignment",
    "token_alignment",
    "model_alignment",
    "vocab_alignment",
    "model_metadata",
]

TENSOR_CORE_ALIGNMENT = 8  # elements of 2 bytes in 16 bytes

METADATA_HOOK = "speedtronic_shape_metadata"
"""The method with which a model can name its own dimensions: it returns a mapping from names to sizes."""

_LAYER_SIZES: tuple[tuple[tuple[type[nn.Module], ...], tuple[str, ...]], ...] = (
    ((nn.Linear,), ("in_features", "out_features")),
    ((nn.Embedding,), ("embedding_dim",)),
    (
        (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
        ("in_channels", "out_channels"),
    ),
)


@dataclass(frozen=True)
class ShapeProfile:
    """The alignment that sizes should have.

    Attributes:
        device_type: "cuda", "mps" or "cpu".
        precision: "bf16", "fp16" or "fp32".
        alignment: sizes should be a multiple of this number; None if any size is as good.
        source: "auto" if device and precision decide, "explicit" if the alignment was given.
    """

    device_type: str
    precision: Mode
    alignment: int | None
    source: Literal["auto", "explicit"]


@dataclass(frozen=True)
class ShapeWarning:
    """A size that is not a multiple of the alignment.

    Attributes:
        code: the check that found it; "model_metadata" if the model's `speedtronic_shape_metadata` failed.
        field: the configuration's key, or the dimension in the model.
        value: its size; None for "model_metadata".
        suggested: an aligned size; None if none fits.
        alignment: sizes should be a multiple of this number.
        reason: what an aligned size would gain.
    """

    code: WarningCode
    field: str
    value: int | None
    suggested: int | None
    alignment: int
    reason: str

    def __str__(self) -> str:
        if self.value is None:
            return f"{self.field}: {self.reason}"
        remedy = f", such as {self.suggested}" if self.suggested is not None else ""
        return f"{self.field} is {self.value}, not a multiple of {self.alignment}{remedy}: {self.reason}"


@dataclass(frozen=True)
class ShapeReport:
    """The warnings of the validation, in the order of the checks."""

    profile: ShapeProfile
    warnings: tuple[ShapeWarning, ...] = ()

    @property
    def warning_count(self) -> int:
        return len(self.warnings)

    def as_dict(self) -> dict[str, Any]:
        """The report as dicts, lists, strings, numbers and None."""
        return {
            "profile": asdict(self.profile),
            "warnings": [asdict(warning) for warning in self.warnings],
            "warning_count": self.warning_count,
        }


class EventLogger(Protocol):
    """The part of `MetricLogger` that is used here."""

    def emit(self, event: str, payload: dict[str, Any]) -> object: ...


ShapeLogger: TypeAlias = EventLogger | logging.Logger | logging.LoggerAdapter[Any]


def resolve_shape_profile(
    device: str | torch.device, precision: PrecisionPlan | Mode, requested_alignment: Alignment = "auto"
) -> ShapeProfile:
    """Find the alignment that is best for a device in a precision.

    Args:
        device: the device of the run; it need not exist on this machine.
        precision: the resolved plan, or its mode.
        requested_alignment: "auto" is 8 for bf16 and fp16 on CUDA, and no alignment elsewhere; a number is used
            everywhere; "none" or None is no alignment anywhere.

    Raises:
        ConfigError: the alignment has another value.
    """
    kind = torch.device(device).type
    mode = precision.mode if isinstance(precision, PrecisionPlan) else precision
    if requested_alignment == "auto":
        tensor_cores = kind == "cuda" and mode in ("bf16", "fp16")
        alignment = TENSOR_CORE_ALIGNMENT if tensor_cores else None
        return ShapeProfile(device_type=kind, precision=mode, alignment=alignment, source="auto")
    if requested_alignment is None or requested_alignment == "none":
        return ShapeProfile(device_type=kind, precision=mode, alignment=None, source="explicit")
    if not _is_size(requested_alignment):
        raise ConfigError(
            "shape_validation.alignment: must be 'auto', 'none' or a whole number of at least 1, "
            f"not {requested_alignment!r}"
        )
    return ShapeProfile(device_type=kind, precision=mode, alignment=int(requested_alignment), source="explicit")


def validate_startup_shapes(
    config: SpeedtronicConfig,
    model: nn.Module,
    device: str | torch.device,
    plan: PrecisionPlan,
    logger: ShapeLogger | None = None,
) -> ShapeReport:
    """Compare the sizes of a run with the alignment that is best for its device. It never stops a run.

    `config.shape_validation` decides what is checked. CPU and MPS have no alignment of their own: they are checked only
    with `warn_on_cpu` and an explicit alignment.

    Args:
        config: the checks read `shape_validation`, the sizes in `data`, and `model.vocab_size`.
        model: the checks read its linear, embedding and convolution layers. If it has a method
            `speedtronic_shape_metadata()`, they read instead the mapping from names to sizes that the method returns. A
            `vocab_size` in it replaces that of the configuration.
        device: the device of the run; it need not exist on this machine.
        plan: the resolved precision.
        logger: a `MetricLogger` gets a `shape_warning` for each warning and a `shape_profile`; a logger of the standard
            library, or an adapter of one, gets a line for each warning.

    Returns:
        The report. It names a width that many layers share only once.
    """
    section = config.shape_validation
    profile = resolve_shape_profile(device, plan, section.alignment)  # type: ignore[arg-type]  # checked by the section
    if not section.enabled:
        return ShapeReport(profile)
    checked = profile.device_type == "cuda" or section.warn_on_cpu
    warnings = _warnings(config, model, profile.alignment) if checked and profile.alignment is not None else ()
    report = ShapeReport(profile, tuple(warnings))
    if logger is not None:
        _log_report(logger, report)
    return report


def _log_report(logger: ShapeLogger, report: ShapeReport) -> None:
    if isinstance(logger, logging.Logger | logging.LoggerAdapter):
        for warning in report.warnings:
            logger.warning("%s", warning)
        return
    for warning in report.warnings:
        logger.emit("shape_warning", asdict(warning))
    profile = report.profile
    logger.emit(
        "shape_profile",
        {
            "device_type": profile.device_type,
            "precision": profile.precision,
            "alignment": profile.alignment,
            "warning_count": report.warning_count,
        },
    )


def _warnings(config: SpeedtronicConfig, model: nn.Module, alignment: int) -> Iterator[ShapeWarning]:
    section = config.shape_validation
    if section.check_batch:
        yield from _check_batch(config, alignment)
    if section.check_sequence:
        yield from _check_sequence(config, alignment)
        yield from _check_tokens(config, alignment)
    # The model names its sizes itself, or its layers are read.
    named, failure = _named_sizes(model) if section.check_model or section.check_vocab else (None, None)
    if failure is not None:
        yield ShapeWarning(
            code="model_metadata",
            field=METADATA_HOOK,
            value=None,
            suggested=None,
            alignment=alignment,
            reason=f"{failure}; the layers of the model are checked instead",
        )
    vocabulary = config.model.vocab_size if named is None else named.pop("vocab_size", config.model.vocab_size)
    if section.check_model:
        yield from _check_model(_layer_sizes(model, vocabulary) if named is None else named, alignment)
    if section.check_vocab and vocabulary % alignment:
        yield ShapeWarning(
            code="vocab_alignment",
            field="model.vocab_size",
            value=vocabulary,
            suggested=_next_multiple(vocabulary, alignment),
            alignment=alignment,
            reason="full tiles in the output head, often the largest product; the model learns that ids without a "
            "token are unlikely",
        )


def _check_batch(config: SpeedtronicConfig, alignment: int) -> Iterator[ShapeWarning]:
    micro, target = config.data.micro_batch_size, config.data.target_batch_size
    if micro % alignment == 0:
        return
    suggested = _smallest_dividing(target, alignment, micro)
    reason = "full tiles in the products that have the batch as a side"
    if suggested is None:
        reason += f"; no multiple of {alignment} from {micro} up divides data.target_batch_size, {target}"
    else:
        reason += ", and fewer micro batches in an update, if the memory allows"
    yield ShapeWarning(
        code="batch_alignment",
        field="data.micro_batch_size",
        value=micro,
        suggested=suggested,
        alignment=alignment,
        reason=reason,
    )


def _smallest_dividing(target: int, alignment: int, least: int) -> int | None:
    """The smallest multiple of `alignment` that is at least `least` and divides `target`."""
    if target % alignment:
        return None
    # The multiples of `alignment` that divide `target` are `alignment` times the divisors of `parts`.
    parts = target // alignment
    small = [number for number in range(1, math.isqrt(parts) + 1) if parts % number == 0]
    divisors = [*small, *(parts // number for number in small)]
    return min((alignment * number for number in divisors if alignment * number >= least), default=None)


def _check_sequence(config: SpeedtronicConfig, alignment: int) -> Iterator[ShapeWarning]:
    length = _block_size(config)
    if length % alignment == 0:
        return
    suggested = _next_multiple(length, alignment)
    reason = "full tiles in the attention's products"
    if suggested > config.model.max_seq_len:
        reason += "; model.max_seq_len must be at least as large"
    yield ShapeWarning(
        code="sequence_alignment",
        field="data.block_size",
        value=length,
        suggested=suggested,
        alignment=alignment,
        reason=reason,
    )


def _check_tokens(config: SpeedtronicConfig, alignment: int) -> Iterator[ShapeWarning]:
    tokens = config.data.micro_batch_size * _block_size(config)
    if tokens % alignment:
        yield ShapeWarning(
            code="token_alignment",
            field="data.micro_batch_size * data.block_size",
            value=tokens,
            suggested=_next_multiple(tokens, alignment),
            alignment=alignment,
            reason="full tiles in every linear layer, where the tokens of a micro batch are one side of the product; "
            "it is enough if one of the two factors is aligned",
        )


def _check_model(sizes: Mapping[str, int], alignment: int) -> Iterator[ShapeWarning]:
    """One warning per size: a model has few widths, most of its dimensions share one, and few settings change them."""
    names_by_size: dict[int, list[str]] = {}
    for name, size in sizes.items():
        if size % alignment:
            names_by_size.setdefault(size, []).append(name)
    for size, (first, *others) in names_by_size.items():
        reason = "full tiles in the products with these weights"
        if others:
            reason += f"; same size: {others[0]}" + (f" and {len(others) - 1} more" if others[1:] else "")
        yield ShapeWarning(
            code="model_alignment",
            field=first,
            value=size,
            suggested=_next_multiple(size, alignment),
            alignment=alignment,
            reason=reason,
        )


def _named_sizes(model: nn.Module) -> tuple[dict[str, int] | None, str | None]:
    """The sizes from the model's own hook, and why it failed. Both are None if there is no hook."""
    try:
        hook = getattr(model, METADATA_HOOK, None)
        if hook is None:
            return None, None
        named = dict(hook())
    except Exception as error:  # noqa: BLE001 - the hook is the model's own code, and only advice depends on it
        return None, f"failed with {type(error).__name__}: {error}"
    wrong = [name for name, size in named.items() if not (isinstance(name, str) and _is_size(size))]
    if wrong:
        return None, f"must return names with whole numbers of at least 1, not {wrong[0]!r}: {named[wrong[0]]!r}"
    return {name: int(size) for name, size in named.items()}, None


def _layer_sizes(model: nn.Module, vocabulary: int) -> dict[str, int]:
    """The sizes of the layers by name. The output sizes of heads are left out: they are the vocabulary's."""
    modules = list(model.named_modules())
    vocabularies = {vocabulary, *(module.num_embeddings for _, module in modules if isinstance(module, nn.Embedding))}
    sizes = (
        (f"{name}.{attribute}".removeprefix("."), getattr(module, attribute))
        for name, module in modules
        for kinds, attributes in _LAYER_SIZES
        if isinstance(module, kinds)
        for attribute in attributes
    )
    return {name: size for name, size in sizes if not (name.endswith("out_features") and size in vocabularies)}


def _block_size(config: SpeedtronicConfig) -> int:
    # A loaded configuration has set `block_size`, but a caller may have changed it since.
    return config.data.block_size or config.model.max_seq_len


def _next_multiple(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment


def _is_size(value: object) -> bool:
    return not isinstance(value, bool) and isinstance(value, Integral) and int(value) > 0
