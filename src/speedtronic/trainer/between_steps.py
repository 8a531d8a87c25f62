"""What happens between two steps of a run, besides its training: callbacks, evaluations and checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import nn

from speedtronic.checkpoint import capture_rng_state, restore_rng_state
from speedtronic.errors import ConfigError
from speedtronic.model import evaluation_mode
from speedtronic.ranks import Group
from speedtronic.trainer.callbacks import Callbacks, RunView
from speedtronic.trainer.monitor import Monitor, emit_evaluation
from speedtronic.trainer.reporting import StepReporter
from speedtronic.trainer.saving import CheckpointSaver
from speedtronic.trainer.schedule import advance_by_evaluation
from speedtronic.trainer.signals import SignalWatch
from speedtronic.trainer.state import Run


class Evaluator(Protocol):
    """Measures a model on held-out data.

    The model is in evaluation mode. Afterwards its modules have their own modes again, and the random numbers go on as
    if nothing had been measured.
    """

    def __call__(self, model: nn.Module, should_stop: Callable[[], bool]) -> Mapping[str, Any] | None:
        """Return the numbers of the `eval` event, `loss` among them; None when it gave up because it should stop.

        `sets` among them are the numbers of further sets, by name, which have an event each. `samples` are texts that
        the model wrote, mappings with `prompt` and `text`, each an event of its own too.
        """


class BetweenSteps:
    """The callbacks, the evaluations and the checkpoints of one `fit`. `Trainer._act_between_steps` orders them.

    With several ranks each has its own, and all call the same methods. What a callback of any rank asks for, all do. An
    evaluation is shared, and rank 0's numbers count. Only rank 0 hears of checkpoints that have become durable.

    Attributes:
        view: the run as its callbacks see it.
        evaluated_at: the step of the last evaluation, or None.
        eval_loss: the loss of the last evaluation, or None.

    Args:
        run: the trainer.
        target: the global step at which `fit` ends.
        callbacks: they are called with the view.
        evaluator: measures the model, or its average where one is kept; None where nothing is held out.
        monitor: is told of each evaluation, and says when the run should stop early.
        saver: writes the checkpoints; None where the run writes none.
        group: the ranks of the run.
        signals: one that has arrived ends an evaluation.
        reporter: an evaluation takes no time of its intervals.
        settle: waits for the numbers of all updates so far, and raises for one that is not finite.
        state_dict: what a checkpoint of now holds.
    """

    def __init__(
        self,
        run: Run,
        *,
        target: int,
        callbacks: Callbacks,
        evaluator: Evaluator | None,
        monitor: Monitor,
        saver: CheckpointSaver | None,
        group: Group,
        signals: SignalWatch,
        reporter: StepReporter,
        settle: Callable[[], None],
        state_dict: Callable[[], dict[str, Any]],
    ) -> None:
        self.view = RunView(
            run,
            target=target,
            evaluate=None if evaluator is None else self._evaluate_now,
            can_save=saver is not None,
        )
        self.evaluated_at: int | None = None
        self.eval_loss: float | None = None
        self._ended = False
        self._weights: set[nn.Parameter] = set()  # by identity
        self._run = run
        self._callbacks = callbacks
        self._evaluator = evaluator
        self._monitor = monitor
        self._saver = saver
        self._group = group
        self._asks_alone = False  # whether any rank has callbacks, each of which may ask for something on its own
        self._asked_alone = (False, False)  # what only this rank knows of: whether to stop, and to save
        self._signals = signals
        self._reporter = reporter
        self._settle = settle
        self._state_dict = state_dict

    def begin(self) -> None:
        """Give the callbacks their saved states, and tell them that training starts."""
        self._callbacks.restore(self._run.logger)
        self._asks_alone = self._group.size > 1 and bool(self._group.reduce(int(bool(self._callbacks)), "max"))
        self._stop_early("before: ")
        self._callbacks.call("on_train_start", self.view)
        self._weights = set(self._run.model.parameters())
        self._agree()
        if self.view.saving:
            self._save()

    def tell_of_step(self) -> None:
        """Tell the callbacks that a step has ended."""
        self._callbacks.call("on_step_end", self.view)
        self._agree()

    def evaluate_if_due(self, *, last: bool) -> None:
        """Evaluate, if the cadence asks for it.

        After the last step the evaluation of `eval.at_end` is due here too, if a checkpoint of that step is: it comes
        after, so that it has the loss.
        """
        section = self._run.config.eval
        due = section.every_steps is not None and self._run.step % section.every_steps == 0
        at_end = last and section.at_end and self._signals.received is None
        if due or (at_end and self._save_is_due()):
            self._evaluate()

    def save_if_due(self) -> None:
        """Save, if the cadence or a callback asks for it, and tell of saves that have become durable."""
        if self._saver is None:
            return
        self._saver.poll()
        self._tell_of_checkpoints()
        if self._save_is_due():
            self._save()

    def _save_is_due(self) -> bool:
        return self._saver is not None and (self._saver.due(self._run.step) or self.view.saving)

    def finish(self, *, made_progress: bool) -> None:
        """Evaluate and save a last time, if there was a step at all, and tell the callbacks that training ends."""
        try:
            if self._run.config.eval.at_end and made_progress and self._signals.received is None:
                self._evaluate()
        finally:
            self._save_the_last(made_progress=made_progress)
        # After the last checkpoint: a longer run that resumes from it is to continue as if this one had not ended.
        self._callbacks.call("on_train_end", self.view)
        self._agree()
        self._save_the_last(made_progress=False)

    def close(self) -> None:
        """The `fit` has ended, and a view that a callback has kept evaluates nothing any more."""
        self._ended = True
        # View and evaluation refer to each other. Without this, the model would stay in memory until Python looks for
        # such circles, and a GPU's memory with it.
        del self.view

    def _evaluate(self) -> None:
        """Evaluate this step, unless that has been done."""
        if self._evaluator is not None and self.evaluated_at != self._run.step:
            self._evaluate_now()

    def _evaluate_now(self) -> Mapping[str, Any] | None:
        if self._ended:
            raise RuntimeError("this view of a run is of a fit that has ended: nothing can be evaluated")
        assert self._evaluator is not None
        # A step that is not finite raises here.
        self._settle()
        self._look_for_new_weights()
        averaged = self._run.averaged_model
        model = self._run.model if averaged is None else averaged
        rng = capture_rng_state()
        try:
            with self._reporter.evaluating(), evaluation_mode(model):
                numbers = self._evaluator(model, lambda: self._signals.noted is not None)
        finally:
            restore_rng_state(rng)
        numbers = self._group.broadcast(None if numbers is None else _with_loss(numbers))
        if numbers is not None:
            self.evaluated_at, self.eval_loss = self._run.step, numbers["loss"]
            emit_evaluation(self._run.logger, self._run.step, numbers)
            self.view.evaluation = numbers
            if self._monitor.note(self._run.step, numbers):
                advance_by_evaluation(self._run.scheduler, self._monitor.value(numbers))
            self._stop_early("")
            self._callbacks.call("on_eval_end", self.view)
            self._agree()
        return numbers

    def _agree(self) -> None:
        """Let what a callback of any rank has asked for be asked for on all ranks."""
        if self._asks_alone:
            stop, save = self._asked_alone
            own = torch.tensor([self.view.stopping or stop, self.view.saving or save], dtype=torch.int32)
            self.view.stopping, self.view.saving = map(bool, self._group.reduce(own, "max").tolist())
            self._asked_alone = (False, False)

    def _stop_early(self, when: str) -> None:
        """End the run where the evaluations have not improved for too long."""
        if (reason := self._monitor.exhausted) is None or self.view.stopping:
            return
        self.view.stop()
        if self.view.step < self.view.target:
            self._run.logger.info(f"stopped early {when}{reason}")

    def _look_for_new_weights(self) -> None:
        """Say which weights a callback has put into the model since `fit` began, and what does not have them."""
        new = {name: p for name, p in self._run.model.named_parameters() if p not in self._weights}
        if not new:
            return
        self._weights.update(new.values())
        trained = {id(p) for group in self._run.optimizer.param_groups for p in group["params"]}
        problems = ["a resumed run has to make the model with them"]
        if self._run.averaged_model is not None:
            problems.insert(0, "they are not in the average (optimizer.ema), which has the model as it was")
        if any(id(p) not in trained for p in new.values()):
            problems.insert(0, "the optimizer does not have all of them: add them with optimizer.add_param_group")
        more = f" and {len(new) - 4} more" if len(new) > 4 else ""
        self._run.logger.warning(
            f"the model has weights that it did not have when fit began: {', '.join(list(new)[:4])}{more}; "
            f"{'; '.join(problems)}"
        )

    def _save(self) -> None:
        """Save this step, unless that has been done and no callback asks for it again."""
        assert self._saver is not None
        if self.view.saving or not self._saver.holds(self._run.step):
            # A step that is not finite raises here, so that it never becomes a checkpoint.
            self._settle()
            self._look_for_new_weights()
            self.view.saving = False
            self._saver.save(self._run.step, self._state_dict())
            self._tell_of_checkpoints()

    def _save_the_last(self, *, made_progress: bool) -> None:
        """Save, if there is something new or a callback has asked for it, and wait until it is durable."""
        if self._saver is not None and (made_progress or self.view.saving):
            self._save()
            self._saver.wait()
            self._tell_of_checkpoints()

    def _tell_of_checkpoints(self) -> None:
        """Tell the callbacks of the checkpoints that have become durable."""
        agreed = self.view.stopping, self.view.saving
        while self._saver is not None and self._saver.finished:
            self.view.checkpoint = self._saver.finished.pop(0)
            self._callbacks.call("on_checkpoint", self.view)
        if self._asks_alone:
            # Only this rank was told. What it asks for now waits until the ranks agree after the next step.
            self._asked_alone = self.view.stopping, self.view.saving
            self.view.stopping, self.view.saving = agreed


def _with_loss(numbers: Any) -> Mapping[str, Any]:
    """What an evaluator has returned, with a loss that is a number."""
    try:
        return {**numbers, "loss": float(numbers["loss"])}
    except (TypeError, KeyError, ValueError, RuntimeError):  # the last from a tensor of several elements
        keys = f" of {', '.join(map(str, numbers))}" if isinstance(numbers, Mapping) else ""
        raise ConfigError(
            f"evaluator: must return a mapping with a number under 'loss', or None where it gave up, not a "
            f"{type(numbers).__name__}{keys}"
        ) from None
