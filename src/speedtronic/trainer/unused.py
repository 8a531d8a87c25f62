"""What a configuration asks of a trainer that was not given the part for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from weakref import WeakSet

from speedtronic.config import SpeedtronicConfig
from speedtronic.config.base import Section
from speedtronic.config.checks import BUILT_IN_MODELS, asked_and_not_built
from speedtronic.data.loading.iterable_loader import StreamLoader
from speedtronic.data.loading.loader import TokenLoader
from speedtronic.model.wrappers import innermost
from speedtronic.registry import BUILT_BY_NAME

# The trainer itself acts on these keys of `data`, whatever the loader is.
_OF_ANY_LOADER = ("micro_batch_size", "target_batch_size", "block_size", "max_steps", "loss_normalization", "labels")

BUILT_FROM_CONFIG: WeakSet[Any] = WeakSet()
"""The optimizers and schedulers that `build_optimizer` and `build_scheduler` have made: they follow their sections."""


def unused_keys(config: SpeedtronicConfig, parts: Mapping[str, Any]) -> Iterator[str]:
    """Say which keys nothing acts on, and what to pass to the trainer.

    What a precision plan was made from cannot be seen, so its section is not looked at. Of a model its name is.

    Args:
        config: a resolved configuration.
        parts: the arguments of the trainer, by name; None where there is none.
    """
    not_built = asked_and_not_built(config)
    for key in not_built:
        yield f"{key}: not part of this version yet, so nothing acts on it; remove it"
    if config.loss is not None and parts["loss_fn"] is not None:
        yield "loss: nothing acts on it, since the loss_fn that was passed goes before it; remove one of them"
    if config.tune != "off" and "tuning" not in (parts["metadata"] or {}):
        yield (
            "tune: nothing acts on it, since the parts of this run were made by hand; let speedtronic.runtime."
            "build_runtime make them, or remove it"
        )
    for part, keys, remedy in (
        # The trainer itself clips and averages. All else was decided when the optimizer was made.
        (
            "optimizer",
            _given(config.optimizer, but=("grad_clip", "grad_clip_value", "ema")),
            "speedtronic.runtime.build_optimizer(model, config, device)",
        ),
        ("scheduler", _given(config.scheduler), "speedtronic.runtime.build_scheduler(optimizer, config)"),
        (
            "checkpoint_manager",
            _given(config.checkpoint) if config.checkpoint.enabled else [],
            "speedtronic.checkpoint.CheckpointManager(folder)",
        ),
        ("evaluator", _changed(config.eval), "speedtronic.evaluation.HeldOutLoss(…)"),
        ("logger", _changed(config.logging, but=("level", "every_steps")), "speedtronic.runtime.build_logger(config)"),
        (
            "coordinator",
            ["distributed"] if config.distributed.enabled else [],
            "speedtronic.DumbDiLoCoCoordinator(config.distributed, model)",
        ),
        ("callbacks", ["callbacks"] if config.callbacks else [], "[…]"),
        (
            "dataloader",
            _changed(config.data, but=_OF_ANY_LOADER),
            "speedtronic.data.build_data(config, pin_memory=False).train",
        ),
        (
            "model",
            ["model.name"] * (config.model.name not in BUILT_IN_MODELS) + ["plugins"] * bool(config.plugins),
            "speedtronic.build_model(config), after speedtronic.runtime.import_plugins(config.plugins)",
        ),
    ):
        follows = parts[part] is not None
        if part in ("optimizer", "scheduler"):
            follows = follows_config(parts[part])
        elif part == "dataloader":
            follows = isinstance(parts[part], TokenLoader | StreamLoader)
        elif part == "model":
            follows = parts[part] in BUILT_BY_NAME or innermost(parts[part]) in BUILT_BY_NAME
        idle = [key for key in keys if key not in not_built]
        if idle and not follows:
            why = f"no {part} was passed" if parts[part] is None else f"the {part} that was passed was not made by it"
            yield f"{', '.join(idle)}: nothing acts on it, since {why}; pass {part}={remedy}, or remove it"


def with_known_sizes(config: SpeedtronicConfig) -> SpeedtronicConfig:
    """The configuration, without checks of batch shapes where nobody gave the sizes of the batches.

    The defaults say nothing about those of a user's own loader.
    """
    if "micro_batch_size" in config.data.model_fields_set:
        return config
    checks = config.shape_validation.model_copy(update={"check_batch": False, "check_sequence": False})
    return config.model_copy(update={"shape_validation": checks})


def _given(section: Section, but: tuple[str, ...] = ()) -> list[str]:
    """The keys of a section that were given."""
    given = section.model_fields_set.difference(but)
    return [f"{section.section_name}.{key}" for key in type(section).model_fields if key in given]


def _changed(section: Section, but: tuple[str, ...] = ()) -> list[str]:
    """Those that were given another value than their default. A resolved configuration gives all."""
    defaults, values = section.defaults(), section.plain()
    return [key for key in _given(section, but) if values[name := key.partition(".")[2]] != defaults[name]]


def follows_config(part: Any) -> bool:
    """Whether an optimizer or a scheduler was built from a configuration, or is around such a one."""
    inner = [getattr(part, "base", None), *getattr(part, "_schedulers", ())]
    return part in BUILT_FROM_CONFIG or any(follows_config(one) for one in inner if one is not None)
