"""Callbacks: code of a user's own that acts on the training thread, between two steps.

A hook (`MetricLogger.add_hook`) is told of events on a thread of its own, perhaps late. A callback acts on time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from speedtronic.config import SpeedtronicConfig
from speedtronic.errors import ConfigError
from speedtronic.metrics import MetricLogger
from speedtronic.trainer.readback import Update
from speedtronic.trainer.schedule import Schedule
from speedtronic.trainer.state import Run

Moment = Literal["on_train_start", "on_step_end", "on_eval_end", "on_checkpoint", "on_train_end"]
MOMENTS: tuple[Moment, ...] = ("on_train_start", "on_step_end", "on_eval_end", "on_checkpoint", "on_train_end")


class RunView:
    """A run as its callbacks see it, between two steps of the `fit` that calls them.

    Attributes:
        target: the global step at which `fit` ends.
        evaluation: the numbers of the last `eval` event of this `fit`, or None.
        checkpoint: the last checkpoint of this `fit` that is durable, or None.
        stopping: whether a callback has asked the run to stop.
        saving: whether a callback has asked for a checkpoint that is not written yet.
    """

    def __init__(
        self,
        run: Run,
        *,
        target: int,
        evaluate: Callable[[], Mapping[str, Any] | None] | None,
        can_save: bool,
    ) -> None:
        self.target = target
        self.evaluation: Mapping[str, Any] | None = None
        self.checkpoint: Path | None = None
        self.stopping = False
        self.saving = False
        self._run = run
        self._evaluate = evaluate
        self._can_save = can_save
        self._update: Update | None = None

    @property
    def step(self) -> int:
        """The global step that was done last."""
        return self._run.step

    @property
    def model(self) -> nn.Module:
        """The model that is trained, as it was given to the trainer. Its gradients are cleared by now."""
        return self._run.model

    @property
    def averaged_model(self) -> nn.Module | None:
        """The copy with the averaged weights of `optimizer.ema`, to read from; None without an average."""
        return self._run.averaged_model

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer. What is changed in its parameter groups acts on the next step."""
        return self._run.optimizer

    @property
    def scheduler(self) -> Schedule | None:
        """The schedule of the learning rate. It sets the rates again after the next step."""
        return self._run.scheduler

    @property
    def config(self) -> SpeedtronicConfig:
        """The configuration of the run."""
        return self._run.config

    @property
    def logger(self) -> MetricLogger:
        """The logger, for messages."""
        return self._run.logger

    @property
    def loss(self) -> float | None:
        """The loss of the last step, or None before the first. On an accelerator, reading it waits for the step."""
        return None if self._update is None else float(self._update.loss)

    @property
    def losses(self) -> Mapping[str, float]:
        """The losses of the last step by the names of several optimizers; empty with one, and before the first step."""
        return {} if self._update is None else self._update.losses

    @property
    def grad_norm(self) -> float | None:
        """The 2-norm of the last step's gradients before clipping, or None before the first. Reading it waits too."""
        return None if self._update is None else float(self._update.grad_norm)

    @property
    def eval_loss(self) -> float | None:
        """The loss of the last evaluation of this `fit`, or None."""
        return None if self.evaluation is None else float(self.evaluation["loss"])

    def stop(self) -> None:
        """End the run after this step, as if it were the last: evaluated, saved, and without an error."""
        self.stopping = True

    def evaluate(self) -> Mapping[str, Any] | None:
        """Evaluate on the held-out data now.

        Every `on_eval_end` is called, unless this is called from one. An evaluation that is due at this step is not
        repeated. With several ranks, all share it: the callbacks of all must call this at the same moment.

        Returns:
            The numbers of the `eval` event, `loss` among them; None if a signal ended it.

        Raises:
            ConfigError: there is nothing to evaluate on.
        """
        if self._evaluate is None:
            raise ConfigError(
                "a callback has called evaluate(), and nothing is held out: set data.validation_fraction, let "
                "data.dataset return a pair (training, validation), or pass an evaluator to the Trainer"
            )
        return self._evaluate()

    def save(self) -> None:
        """Ask for a checkpoint of this step. It is written when the callbacks that are called now have returned.

        Raises:
            ConfigError: this run writes no checkpoints.
        """
        if not self._can_save:
            raise ConfigError(
                "a callback has called save(), and this run writes no checkpoints: set checkpoint.enabled, or pass a "
                "checkpoint_manager to the Trainer"
            )
        self.saving = True

    def note_update(self, update: Update) -> None:
        """The trainer's: the numbers of the step that was done last, which may still be on the device."""
        self._update = update


class Callback:
    """A base class for callbacks, which does nothing. Any object with one of these methods is a callback too.

    With several ranks each has its own callbacks, and what one asks for, all do. Only rank 0 logs, is told of
    checkpoints, and has its callbacks' states saved.

    A callback that has `state_dict` and `load_state_dict` is saved in checkpoints and restored by a resumed run, before
    `on_train_start`. Its state consists of what a checkpoint can hold: dicts, lists, text, numbers, tensors. It is
    asked for before `on_train_start` too.
    """

    def on_train_start(self, run: RunView) -> None:
        """Before the first step of a `fit`, with restored weights where the run was resumed."""

    def on_step_end(self, run: RunView) -> None:
        """After each step: optimizer, schedule, coordinator and average have done theirs, and nothing follows yet."""

    def on_eval_end(self, run: RunView) -> None:
        """After each evaluation, whose numbers are in `run.evaluation`. A checkpoint of this step comes later."""

    def on_checkpoint(self, run: RunView) -> None:
        """When a checkpoint, `run.checkpoint`, has become durable. That may be some steps after the one it holds."""

    def on_train_end(self, run: RunView) -> None:
        """When `fit` ends without an error, after its last checkpoint; also when a signal or `stop` ended it."""


class Callbacks:
    """The callbacks of a trainer, which are called in their order.

    Args:
        callbacks: objects with some of the methods of `Callback`.
        warn: called with what looks wrong with one of them.

    Raises:
        ConfigError: something else than such an object, or one with half of `state_dict` and `load_state_dict`.
    """

    def __init__(self, callbacks: Iterable[object], *, warn: Callable[[str], None]) -> None:
        self._by_name = _named(list(callbacks))
        self._calls: dict[Moment, list[tuple[str, Callable[[RunView], object]]]] = {name: [] for name in MOMENTS}
        for name, callback in self._by_name.items():
            _check(name, callback, warn)
            for moment in MOMENTS:
                method = getattr(callback, moment, None)
                if getattr(method, "__func__", None) is not getattr(Callback, moment) and callable(method):
                    self._calls[moment].append((name, method))
        self._stateful = {name: cb for name, cb in self._by_name.items() if hasattr(cb, "state_dict")}
        self._restored: dict[str, Any] | None = None
        self._calling: Moment | None = None

    def __bool__(self) -> bool:
        return bool(self._by_name)

    def call(self, moment: Moment, run: RunView) -> None:
        """Call this method of each callback that has it. What one raises is raised here, with a note of its name."""
        if not self._calls[moment] or self._calling == moment:
            return  # nobody asks, or `on_eval_end` has asked for an evaluation itself
        before, self._calling = self._calling, moment
        try:
            for name, method in self._calls[moment]:
                was_stopping = run.stopping
                try:
                    method(run)
                except Exception as error:  # the callback is the user's code; the error is raised on, and names it
                    error.add_note(f"raised by the callback {name} in {moment}, after step {run.step}")
                    raise
                if run.stopping and not was_stopping and run.step < run.target:
                    run.logger.info(f"the callback {name} has stopped the run at step {run.step} of {run.target}")
        finally:
            self._calling = before

    def state_dict(self) -> dict[str, Any] | None:
        """The state of each callback that has one, by the name of its class; None without any.

        A state that was loaded, and not restored yet, is returned as it is.
        """
        if self._restored is not None:
            return self._restored or None
        return {name: callback.state_dict() for name, callback in self._stateful.items()} or None

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Keep what `state_dict` returned, until `restore`."""
        self._restored = dict(state or {})

    def restore(self, logger: MetricLogger) -> None:
        """Give the callbacks the states that were loaded, if any were since the last call."""
        states, self._restored = self._restored, None
        if states is None:
            return
        for name, callback in self._stateful.items():
            if name in states:
                callback.load_state_dict(states.pop(name))
            else:
                logger.info(f"the checkpoint has no state of the callback {name}, which starts anew")
        if states:
            logger.warning(f"this run has no callback {', '.join(states)}: the state in the checkpoint is dropped")


def _named(callbacks: list[Any]) -> dict[str, Any]:
    """The callbacks by the names of their classes; the second of a class is `Name 2`."""
    seen: Counter[str] = Counter()
    named: dict[str, Any] = {}
    for callback in callbacks:
        kind = type(callback).__name__
        seen[kind] += 1
        named[kind if seen[kind] == 1 else f"{kind} {seen[kind]}"] = callback
    return named


def _check(name: str, callback: Any, warn: Callable[[str], None]) -> None:
    known = ", ".join(MOMENTS)
    if isinstance(callback, type):
        raise ConfigError(f"callbacks: {callback.__name__} is a class; pass an object of it: {callback.__name__}(…)")
    if not any(callable(getattr(callback, moment, None)) for moment in MOMENTS):
        raise ConfigError(
            f"callbacks: {name} is no callback, since it has none of {known}. A function that is to be told of events "
            "is a hook: logger.add_hook takes it"
        )
    if hasattr(callback, "state_dict") != hasattr(callback, "load_state_dict"):
        raise ConfigError(f"callbacks: {name} has one of state_dict and load_state_dict, and needs both or neither")
    # Other libraries have callbacks too, and more moments. A hook's own method is no mistake.
    strange = [key for key in dir(callback) if key.startswith("on_") and key not in (*MOMENTS, "on_event")]
    if strange:
        warn(f"the callback {name} has {', '.join(strange)}, which nothing calls; what is called is {known}")
