"""What the loop cannot drive: refused before it changes a weight."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau

from speedtronic.config import SpeedtronicConfig
from speedtronic.errors import ConfigError
from speedtronic.optimizers.optimizer_set import OptimizerSet
from speedtronic.precision import PrecisionPlan
from speedtronic.trainer.schedule import SchedulerSet

_ONE_FOR_ALL = (
    "without a training_step one optimizer trains all parameters: give them as groups of one optimizer, each with its "
    "own options, or combine Muon and AdamW with speedtronic.HybridOptimizer; with a training_step, pass a dict of "
    "optimizers by name"
)


def refuse_wrong_parts(parts: Mapping[str, Any]) -> None:
    """Raise ConfigError for a part of another kind than it should be, with what is needed.

    Args:
        parts: `model`, `loss_fn`, `evaluator`, `training_step`, `logger`, `precision`, `checkpoint_manager` and
            `callbacks` of a trainer; None where there is none.
    """
    callbacks = parts["callbacks"]
    checks = (
        ("model", isinstance(parts["model"], nn.Module), "a torch.nn.Module"),
        ("loss_fn", _takes(parts["loss_fn"], 2), "a function of the model's output and the batch"),
        (
            "evaluator",
            _takes(parts["evaluator"], 2),
            "called with a model and a function that says whether to stop; speedtronic.evaluation.HeldOutLoss(lambda: "
            "batches, …) makes one of batches",
        ),
        ("training_step", _takes(parts["training_step"], 3), "a function of the model, a batch and the step"),
        ("logger", _has(parts["logger"], "emit", "info", "warning"), "a speedtronic.MetricLogger, or act as one"),
        ("precision", isinstance(parts["precision"], PrecisionPlan), "a plan of speedtronic.resolve_precision(…)"),
        (
            "checkpoint_manager",
            _has(parts["checkpoint_manager"], "enabled", "save", "should_save"),
            "a speedtronic.CheckpointManager(folder)",
        ),
        ("callbacks", isinstance(callbacks, Iterable) and not isinstance(callbacks, Mapping), "a list of callbacks"),
    )
    for name, fits, needed in checks:
        if not fits and (parts[name] is not None or name == "model"):
            raise ConfigError(f"{name}: must be {needed}, not {_named(parts[name])}")


def _has(part: Any, *names: str) -> bool:
    return not isinstance(part, type) and all(hasattr(part, name) for name in names)


def drivable(
    config: SpeedtronicConfig, optimizer: Any, scheduler: Any, training_step: Any, evaluator: Any, merged: int
) -> tuple[Any, Any]:
    """The optimizer and the scheduler of a trainer as the loop drives them: several as one.

    Args:
        optimizer, scheduler, training_step, evaluator: those that the trainer was given.
        merged: how many micro batches are to run as one.

    Raises:
        ConfigError: the loop cannot drive them, with what to do instead.
    """
    if training_step is not None:
        optimizer, scheduler = _as_one(optimizer, scheduler)
    _refuse_unsupported(optimizer, scheduler)
    _refuse_plateau_without_evaluations(scheduler, config, evaluates=evaluator is not None)
    if training_step is not None:
        _refuse_beside_training_step(config, optimizer, merged)
    return optimizer, scheduler


def _as_one(optimizer: Any, scheduler: Any) -> tuple[Any, Any]:
    """The optimizers and the schedulers that were given for a `training_step`, each as one; single ones as they are."""
    if not isinstance(optimizer, dict) or not optimizer:
        return optimizer, scheduler
    for one in optimizer.values():
        _refuse_no_optimizer(one)
    if scheduler is not None:
        if not isinstance(scheduler, dict):
            raise ConfigError(
                f"scheduler: must be a dict beside several optimizers, with the names of those that it is for "
                f"({', '.join(optimizer)}), not {_named(scheduler)}"
            )
        if unknown := [str(name) for name in scheduler if name not in optimizer]:
            raise ConfigError(
                f"scheduler: there is no optimizer {', '.join(unknown)}; the optimizers are {', '.join(optimizer)}"
            )
        for one in scheduler.values():
            _refuse_no_scheduler(one)
        scheduler = SchedulerSet(scheduler)
    return OptimizerSet(optimizer), scheduler


def _refuse_unsupported(optimizer: Any, scheduler: Any) -> None:
    """Raise ConfigError, with what to do instead, if the loop does not know how to move one of the two."""
    if isinstance(optimizer, list | tuple | dict | set):
        raise ConfigError(f"optimizer: a {type(optimizer).__name__} of {len(optimizer)} cannot be used; {_ONE_FOR_ALL}")
    _refuse_no_optimizer(optimizer)
    if scheduler is None:
        return
    if isinstance(scheduler, list | tuple | dict | set):
        raise ConfigError(
            f"scheduler: a {type(scheduler).__name__} of {len(scheduler)} cannot be used; combine them in one with "
            "torch.optim.lr_scheduler.ChainedScheduler or SequentialLR"
        )
    _refuse_no_scheduler(scheduler)
    for part in (scheduler, *getattr(scheduler, "_schedulers", ())):
        if (drives := getattr(part, "optimizer", None)) is not None and not _shares_groups(drives, optimizer):
            raise ConfigError(
                f"scheduler: the {type(part).__name__} was made for another optimizer than the one that was passed, so "
                "it would not change this one's learning rates; make it for the optimizer that the trainer gets"
            )
        # Beside the schedules of other optimizers, one that follows the evaluations stands for itself; in a chain it
        # would be moved with the others.
        alone = part is scheduler or isinstance(scheduler, SchedulerSet)
        if (needed := _required(part.step)) and not (alone and isinstance(part, ReduceLROnPlateau)):
            raise ConfigError(
                f"scheduler: {type(part).__name__} needs {' and '.join(needed)} at each step, and the loop advances a "
                "scheduler with step() alone, since losses stay on the device; use one that needs the step only, such "
                "as LambdaLR or CosineAnnealingLR, ReduceLROnPlateau by itself, or none"
            )


def _refuse_no_optimizer(optimizer: Any) -> None:
    if not callable(getattr(optimizer, "step", None)) or not hasattr(optimizer, "param_groups"):
        raise ConfigError(f"optimizer: must be a torch.optim.Optimizer, not {_named(optimizer)}")


def _refuse_no_scheduler(scheduler: Any) -> None:
    if isinstance(scheduler, type) or not callable(getattr(scheduler, "step", None)):
        raise ConfigError(f"scheduler: must be a torch.optim.lr_scheduler.LRScheduler, not {_named(scheduler)}")


def needs_closure(optimizer: Any) -> bool:
    """Whether an optimizer, such as LBFGS, calls the model several times in one step."""
    # A wrapper of an optimizer passes the closure on, or its absence.
    inner = optimizer
    while isinstance(getattr(inner, "base", None), torch.optim.Optimizer):
        inner = inner.base
    return "closure" in _required(inner.step)


def _refuse_plateau_without_evaluations(scheduler: Any, config: SpeedtronicConfig, *, evaluates: bool) -> None:
    """Raise ConfigError if a schedule follows evaluations, and there are none, or it takes the worst for the best."""
    for part in scheduler.schedulers.values() if isinstance(scheduler, SchedulerSet) else (scheduler,):
        if not isinstance(part, ReduceLROnPlateau):
            continue
        if not evaluates or config.eval.every_steps is None:
            raise ConfigError(
                "scheduler: ReduceLROnPlateau lowers the learning rate where the evaluations of eval.every_steps have "
                "not improved, and this run has none: set eval.every_steps, and pass an evaluator to the Trainer"
            )
        if part.mode != config.eval.better:
            raise ConfigError(
                f"scheduler: ReduceLROnPlateau has mode {part.mode}, and of eval.monitor: {config.eval.monitor} the "
                f"{config.eval.better} is the best; give both the same mode"
            )


def _refuse_beside_training_step(config: SpeedtronicConfig, optimizer: Any, merged: int) -> None:
    """Raise ConfigError for what only works where the loop itself calls the model."""
    for one in optimizer.optimizers.values() if isinstance(optimizer, OptimizerSet) else (optimizer,):
        if needs_closure(one):
            raise ConfigError(
                f"optimizer: {type(one).__name__} calls the model several times in one step, and a training_step is "
                "called once; train with it alone and a loss_fn, or use an optimizer such as AdamW"
            )
    for asked, key, remedy in (
        (config.compile, "compile", "compile the parts that it calls, with their method compile()"),
        (config.ooo_backprop, "ooo_backprop", "leave it out"),
        (merged > 1, "merged_micro_batches", "leave it out"),
        (
            config.data.loss_normalization == "tokens",
            "data.loss_normalization: tokens",
            "weigh the losses yourself, since each micro batch counts alike",
        ),
    ):
        if asked:
            raise ConfigError(f"{key}: a training_step calls the model in its own way, so this has no effect; {remedy}")


def _shares_groups(one: Any, other: Any) -> bool:
    """Whether two optimizers are the same, or one has groups of the other, as a wrapper has."""
    groups = {id(group) for group in other.param_groups}
    return one is other or any(id(group) in groups for group in getattr(one, "param_groups", ()))


def weights_elsewhere(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[str]:
    """Say it where an optimizer trains what is not in the model, as a loss function with weights of its own."""
    own = {id(parameter) for parameter in model.parameters()}
    trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    elsewhere = sum(id(parameter) not in own for parameter in trained)
    if elsewhere == len(trained) and own:
        yield (
            "the optimizer has no weight of this model, so nothing of it is trained; make the optimizer from the "
            "model's parameters()"
        )
    elif elsewhere:
        yield (
            f"the optimizer trains {elsewhere} tensors that are not in the model: no checkpoint, average or export "
            "holds them, and a resumed run starts them anew; make them part of the model, as a submodule or a Parameter"
        )


def refuse_autocast(device: torch.device) -> None:
    """Raise ConfigError if the caller has switched autocast on: it keeps casts of the weights that updates replace."""
    if torch.is_autocast_enabled(device.type) and torch.is_autocast_cache_enabled():
        raise ConfigError(
            "fit() was called inside torch.autocast, which would cast the weights once and compute with those casts "
            "after each update; call it outside, and set precision.mode: bf16 or fp16"
        )


def refuse_exhausted(scheduler: Any, steps: int) -> None:
    """Raise ConfigError if a scheduler that ends with an error is to advance by more steps than it has left."""
    for part in (scheduler, *getattr(scheduler, "_schedulers", ())):
        if isinstance(part, OneCycleLR) and steps > (left := part.total_steps - part.last_epoch):
            raise ConfigError(
                f"scheduler: {type(part).__name__} has {left} of its {part.total_steps} steps left, and {steps} "
                "updates are to be trained; give it as many total_steps as the run has, or train for fewer"
            )


def _takes(function: Any, positional: int) -> bool:
    if not callable(function) or isinstance(function, type):
        return False
    try:
        inspect.signature(function).bind(*range(positional))
    except TypeError:
        return False
    except ValueError:  # built in C: nothing is known
        pass
    return True


def _required(function: Callable[..., Any]) -> list[str]:
    """The parameters that a call must give."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # built in C: nothing is known
        return []
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is inspect.Parameter.empty and p.kind not in variable]


def _named(value: object) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"
