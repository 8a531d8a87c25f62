"""Callbacks act on the training thread between two steps, in order and on time, and their state is saved."""

from __future__ import annotations

import gc
import signal
import threading
import traceback
import weakref
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from speedtronic.checkpoint import CheckpointManager
from speedtronic.errors import CheckpointError, ConfigError, NonFiniteError
from speedtronic.metrics import MetricLogger
from speedtronic.trainer import Callback, RunView, Trainer
from tests.support.models import (
    SCALED,
    Events,
    Overflowing,
    Regression,
    Silence,
    config_of,
    make_trainer,
    poisoned,
)


class Noting(Callback):
    """Writes down every call, as `moment step`."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.threads: set[threading.Thread] = set()

    def _note(self, moment: str, run: RunView) -> None:
        self.seen.append(f"{moment} {run.step}")
        self.threads.add(threading.current_thread())

    def on_train_start(self, run: RunView) -> None:
        self._note("start", run)

    def on_step_end(self, run: RunView) -> None:
        self._note("step", run)

    def on_eval_end(self, run: RunView) -> None:
        self._note("eval", run)

    def on_checkpoint(self, run: RunView) -> None:
        assert run.checkpoint is not None
        self._note(f"checkpoint {run.checkpoint.name[-1]}", run)

    def on_train_end(self, run: RunView) -> None:
        self._note("end", run)


class Doing(Callback):
    """Does something after one step."""

    def __init__(self, step: int, act: Callable[[RunView], object]) -> None:
        self.step = step
        self.act = act

    def on_step_end(self, run: RunView) -> None:
        if run.step == self.step:
            self.act(run)


def evaluator(model: nn.Module, should_stop: Callable[[], bool]) -> dict[str, float] | None:
    return None if should_stop() else {"loss": float(next(model.parameters()).detach().abs().sum())}


def weights_after_each_step(**options: Any) -> list[Tensor]:
    """The weights of a `Regression` after steps 1 to 8."""
    weights: list[Tensor] = []

    class Keeping(Callback):
        def on_step_end(self, run: RunView) -> None:
            weights.append(next(run.model.parameters()).detach().clone())

    make_trainer(callbacks=[*options.pop("callbacks", ()), Keeping()], **options).fit(8)
    return weights


# ---------------------------------------------------------------- when


def test_callbacks_are_called_in_order_on_the_thread_that_trains(tmp_path: Path) -> None:
    noting = Noting()
    make_trainer(
        callbacks=[noting],
        evaluator=evaluator,
        config=config_of(eval={"every_steps": 2}, checkpoint={"background": False}),
        checkpoint_manager=CheckpointManager(tmp_path, every_steps=2),
    ).fit(3)
    assert noting.seen == [
        "start 0",
        "step 1",
        "step 2",
        "eval 2",
        "checkpoint 2 2",
        "step 3",
        "eval 3",
        "checkpoint 3 3",
        "end 3",
    ]
    assert noting.threads == {threading.current_thread()}


@pytest.mark.parametrize("every", [1, 10])
def test_a_freeze_after_step_5_acts_on_step_6(every: int) -> None:
    """A hook of a logger with `every_steps: 10` hears of step 5 when step 10 is logged."""

    def freeze(run: RunView) -> None:
        run.model.requires_grad_(False)
        run.model.linear.bias.requires_grad_(True)  # type: ignore[union-attr]

    logger = MetricLogger(stream=Silence(), every_steps=every)
    weights = weights_after_each_step(logger=logger, callbacks=[Doing(5, freeze)])
    free = weights_after_each_step()
    for number in range(5):
        assert torch.equal(weights[number], free[number])
    for number in range(5, 8):
        assert torch.equal(weights[number], weights[4])
        assert not torch.equal(weights[number], free[number])


def test_a_learning_rate_that_is_set_after_a_step_is_that_of_the_next_one() -> None:
    def lower(run: RunView) -> None:
        run.optimizer.param_groups[0]["lr"] = 0.001

    records = make_trainer(callbacks=[Doing(2, lower)]).fit(4).metrics
    assert [record["lr_applied"] for record in records] == [0.05, 0.05, 0.001, 0.001]


def test_background_checkpoints_are_told_of_when_they_are_durable(tmp_path: Path) -> None:
    class Loading(Callback):
        steps: list[int] = []

        def on_checkpoint(self, run: RunView) -> None:
            assert run.checkpoint is not None
            state = CheckpointManager(tmp_path).load_latest()
            assert state is not None
            self.steps.append(state["step"])

    loading = Loading()
    manager = CheckpointManager(tmp_path, every_steps=2)
    make_trainer(callbacks=[loading], checkpoint_manager=manager).fit(5)
    assert sorted(set(loading.steps)) == loading.steps
    assert loading.steps[-1] == 5
    assert len(loading.steps) == 3


def test_a_step_that_the_scaler_skipped_is_no_step() -> None:
    noting = Noting()
    make_trainer(Overflowing(2), precision=SCALED, callbacks=[noting]).fit(2)
    assert noting.seen == ["start 0", "step 1", "step 2", "end 2"]


def test_a_signal_ends_the_run_with_on_train_end() -> None:
    noting = Noting()
    ours = make_trainer(callbacks=[noting, Doing(2, lambda run: signal.raise_signal(signal.SIGTERM))])
    assert ours.fit(9).interrupted_by == signal.SIGTERM
    assert noting.seen[-2:] == ["step 2", "end 2"]


# ---------------------------------------------------------------- what a callback sees and does


def test_a_view_shows_the_run() -> None:
    seen: list[tuple[Any, ...]] = []

    class Looking(Callback):
        def on_train_start(self, run: RunView) -> None:
            assert (run.loss, run.grad_norm, run.eval_loss, run.checkpoint) == (None, None, None, None)
            assert (run.step, run.target) == (0, 3)

        def on_step_end(self, run: RunView) -> None:
            assert (run.model, run.optimizer, run.scheduler) == (ours.model, ours.optimizer, None)
            assert (run.config, run.logger, run.averaged_model) == (ours.config, ours.logger, None)
            assert all(parameter.grad is None for parameter in run.model.parameters())
            seen.append((run.step, run.loss, run.grad_norm))

    ours = make_trainer(callbacks=[Looking()])
    records = ours.fit(3).metrics
    assert seen == [(r["step"], pytest.approx(r["loss"]), pytest.approx(r["grad_norm"])) for r in records]


def test_a_callback_that_asks_for_nothing_reads_nothing_from_the_device() -> None:
    def reads(act: Callable[[RunView], object]) -> int:
        class Acting(Callback):
            def on_step_end(self, run: RunView) -> None:
                act(run)

        ours = make_trainer(callbacks=[Acting()])
        ours.fit(1)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            ours.fit(5)
        return sum(event.name == "aten::_local_scalar_dense" for event in profile.events())

    without = reads(lambda run: (run.step, run.model, run.optimizer))
    assert reads(lambda run: run.loss) == without + 4


def test_stop_ends_the_run_as_if_the_step_were_the_last(tmp_path: Path) -> None:
    events, noting = Events(), Noting()
    result = make_trainer(
        events=events,
        evaluator=evaluator,
        callbacks=[Doing(4, RunView.stop), noting],
        checkpoint_manager=CheckpointManager(tmp_path),
    ).fit(100)
    assert (result.steps, result.interrupted_by, len(result.metrics)) == (4, None, 4)
    assert noting.seen[-4:] == ["step 4", "eval 4", "checkpoint 4 4", "end 4"]
    assert events.names()[-1] == "train_end"


def test_who_stopped_the_run_is_logged(capsys: pytest.CaptureFixture[str]) -> None:
    make_trainer(callbacks=[Doing(4, RunView.stop)], logger=MetricLogger()).fit(100)
    assert "the callback Doing has stopped the run at step 4 of 100" in capsys.readouterr().out
    make_trainer(callbacks=[Doing(4, RunView.stop)], logger=MetricLogger()).fit(4)
    assert "stopped" not in capsys.readouterr().out


def test_a_run_that_is_stopped_at_its_start_trains_nothing(tmp_path: Path) -> None:
    class Stopping(Callback):
        def on_train_start(self, run: RunView) -> None:
            run.stop()

    result = make_trainer(callbacks=[Stopping()], checkpoint_manager=CheckpointManager(tmp_path)).fit(3)
    assert (result.steps, result.final_loss) == (0, None)
    assert CheckpointManager(tmp_path).entries() == []


def test_a_later_fit_goes_on_after_a_stop() -> None:
    ours = make_trainer(callbacks=[Doing(2, RunView.stop)])
    assert ours.fit(5).steps == 2
    assert ours.fit(5).steps == 5


def test_evaluate_measures_the_weights_of_now_and_is_not_repeated() -> None:
    measured: list[tuple[int, Any, Any]] = []
    events, noting = Events(), Noting()

    def evaluate(run: RunView) -> None:
        numbers = run.evaluate()
        assert numbers is not None
        assert numbers["loss"] == float(next(run.model.parameters()).detach().abs().sum())
        measured.append((run.step, numbers["loss"], run.eval_loss))

    make_trainer(
        events=events,
        evaluator=evaluator,
        callbacks=[Doing(1, evaluate), Doing(2, evaluate), noting],
        config=config_of(eval={"every_steps": 2}),
    ).fit(3)
    assert [payload["step"] for payload in events.of("eval")] == [1, 2, 3]
    assert [payload["loss"] for payload in events.of("eval")][:2] == [loss for _, loss, _ in measured]
    assert all(numbers == eval_loss for _, numbers, eval_loss in measured)
    assert noting.seen == ["start 0", "eval 1", "step 1", "eval 2", "step 2", "step 3", "eval 3", "end 3"]


def test_on_eval_end_may_evaluate_again_and_is_not_called_for_it() -> None:
    class Halving(Callback):
        losses: list[Any] = []

        @torch.no_grad()
        def on_eval_end(self, run: RunView) -> None:
            self.losses.append(run.eval_loss)
            for parameter in run.model.parameters():
                parameter.mul_(0.5)
            run.evaluate()
            self.losses.append(run.eval_loss)

    make_trainer(evaluator=evaluator, callbacks=[Halving()]).fit(1)
    assert Halving.losses[1] == pytest.approx(Halving.losses[0] / 2)
    assert len(Halving.losses) == 2


def test_an_evaluation_before_the_first_step_can_be_asked_for() -> None:
    class Before(Callback):
        def on_train_start(self, run: RunView) -> None:
            run.evaluate()

    events = Events()
    make_trainer(events=events, evaluator=evaluator, callbacks=[Before()]).fit(2)
    assert [payload["step"] for payload in events.of("eval")] == [0, 2]


def test_a_view_that_is_kept_evaluates_nothing_after_its_fit() -> None:
    kept: list[RunView] = []
    make_trainer(evaluator=evaluator, callbacks=[Doing(1, kept.append)]).fit(2)
    with pytest.raises(RuntimeError, match="a fit that has ended"):
        kept[0].evaluate()


def test_a_model_leaves_memory_with_its_trainer() -> None:
    make_trainer(evaluator=evaluator).fit(1)  # what is imported at the first one may hold on to it
    trainer = make_trainer(evaluator=evaluator)
    trainer.fit(1)
    model = weakref.ref(trainer.model)
    gc.disable()
    try:
        del trainer
        assert model() is None
    finally:
        gc.enable()


def test_save_writes_what_all_callbacks_of_the_step_left(tmp_path: Path) -> None:
    @torch.no_grad()
    def clear(run: RunView) -> None:
        next(run.model.parameters()).zero_()

    events = Events()
    manager = CheckpointManager(tmp_path, keep_last=None)
    make_trainer(events=events, callbacks=[Doing(2, RunView.save), Doing(2, clear)], checkpoint_manager=manager).fit(4)
    assert [payload["step"] for payload in events.of("checkpoint")] == [2, 4]
    weights = load_file(tmp_path / "step_000000000002" / "model.safetensors")
    assert not weights["linear.weight"].any()


def test_save_at_the_start_and_at_the_end_are_obeyed(tmp_path: Path) -> None:
    class Saving(Callback):
        def on_train_start(self, run: RunView) -> None:
            run.save()

        @torch.no_grad()
        def on_train_end(self, run: RunView) -> None:
            next(run.model.parameters()).zero_()
            run.save()

    events = Events()
    manager = CheckpointManager(tmp_path)
    make_trainer(events=events, callbacks=[Saving()], checkpoint_manager=manager).fit(2)
    assert [payload["step"] for payload in events.of("checkpoint")] == [0, 2, 2]
    state = manager.load_latest()
    assert state is not None
    assert not state["model"]["linear.weight"].any()


def test_a_callback_that_saves_at_each_checkpoint_does_not_save_for_ever(tmp_path: Path) -> None:
    class Again(Callback):
        def on_checkpoint(self, run: RunView) -> None:
            run.save()

    events = Events()
    config = config_of(checkpoint={"background": False})
    manager = CheckpointManager(tmp_path, every_steps=2)
    make_trainer(events=events, config=config, callbacks=[Again()], checkpoint_manager=manager).fit(4)
    assert [payload["step"] for payload in events.of("checkpoint")][:2] == [2, 3]
    assert len(events.of("checkpoint")) < 8


def test_what_a_run_cannot_do_is_one_clear_error() -> None:
    for ask, why in ((RunView.evaluate, "nothing is held out"), (RunView.save, "writes no checkpoints")):
        with pytest.raises(ConfigError, match=why):
            make_trainer(callbacks=[Doing(1, ask)]).fit(1)


# ---------------------------------------------------------------- failures


def fail(run: RunView) -> None:
    raise KeyError("my own mistake")


def test_what_a_callback_raises_ends_the_run_with_its_own_traceback_after_the_checkpoint(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, every_steps=3)
    ours = make_trainer(callbacks=[Doing(3, fail)], checkpoint_manager=manager)
    with pytest.raises(KeyError, match="my own mistake") as caught:
        ours.fit(9)
    assert traceback.extract_tb(caught.tb)[-1].name == "fail"
    assert caught.value.__notes__ == ["raised by the callback Doing in on_step_end, after step 3"]
    assert [entry.step for entry in manager.entries()] == [3]
    assert ours.fit(4).steps == 4


def test_a_failure_between_two_checkpoints_writes_none(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, every_steps=2)
    with pytest.raises(KeyError):
        make_trainer(callbacks=[Doing(3, fail)], checkpoint_manager=manager).fit(9)
    assert [entry.step for entry in manager.entries()] == [2]


def test_a_failure_after_the_last_checkpoint_keeps_it(tmp_path: Path) -> None:
    class Failing(Callback):
        def on_train_end(self, run: RunView) -> None:
            fail(run)

    manager = CheckpointManager(tmp_path)
    with pytest.raises(KeyError):
        make_trainer(callbacks=[Failing()], checkpoint_manager=manager).fit(3)
    assert [entry.step for entry in manager.entries()] == [3]


def test_a_step_that_is_not_finite_is_not_saved_because_a_callback_looked(tmp_path: Path) -> None:
    """A fused optimizer's run learns of a bad step only when its numbers are read, which an evaluation does."""
    torch.manual_seed(0)
    model = Regression()
    manager = CheckpointManager(tmp_path, every_steps=1)
    ours = make_trainer(
        model,
        poisoned(2),
        optimizer=torch.optim.AdamW(model.parameters(), fused=True),
        evaluator=evaluator,
        callbacks=[Doing(2, RunView.evaluate)],
        checkpoint_manager=manager,
        logger=MetricLogger(stream=Silence(), every_steps=100),
    )
    with pytest.raises(NonFiniteError, match="step 2"):
        ours.fit(5)
    assert [entry.step for entry in manager.entries()] == [1]


# ---------------------------------------------------------------- state


class Freezing(Callback):
    """Freezes the weight for the steps after 3, and remembers it; counts and keeps the mean of the losses."""

    def __init__(self) -> None:
        self.frozen = False
        self.losses: list[float] = []

    def on_train_start(self, run: RunView) -> None:
        self._apply(run)

    def on_step_end(self, run: RunView) -> None:
        assert run.loss is not None
        self.losses.append(run.loss)
        if len(self.losses) == 3:
            self.frozen = True
            self._apply(run)

    def _apply(self, run: RunView) -> None:
        if self.frozen:
            next(run.model.parameters()).requires_grad_(False)

    def state_dict(self) -> dict[str, Any]:
        return {"frozen": self.frozen, "losses": torch.tensor(self.losses, dtype=torch.float64)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.frozen, self.losses = state["frozen"], state["losses"].tolist()


@pytest.mark.parametrize("ema", [None, 0.5])
@pytest.mark.parametrize("stop_at", [2, 5])
def test_a_resumed_run_equals_one_that_never_stopped(stop_at: int, ema: float | None, tmp_path: Path) -> None:
    config = config_of(optimizer={"ema": ema})
    whole = make_trainer(config=config, callbacks=[Freezing(), Noting()])
    losses = [record["loss"] for record in whole.fit(8).metrics]
    manager = CheckpointManager(tmp_path)
    make_trainer(config=config, callbacks=[Freezing()], checkpoint_manager=manager).fit(stop_at)
    state = manager.load_latest()
    assert state is not None
    assert state["callbacks"].keys() == {"Freezing"}
    freezing = Freezing()
    rest = make_trainer(config=config, callbacks=[freezing])
    rest.resume(state)
    assert [record["loss"] for record in rest.fit(8).metrics] == losses[stop_at:]
    assert freezing.losses == losses
    for name, parameter in whole.model.named_parameters():
        assert torch.equal(parameter, rest.model.get_parameter(name))
    if ema is not None:
        assert whole.averaged_model is not None
        assert rest.averaged_model is not None
        for ours, theirs in zip(rest.averaged_model.parameters(), whole.averaged_model.parameters(), strict=True):
            assert torch.equal(ours, theirs)


def test_two_callbacks_of_one_class_keep_their_states_apart() -> None:
    class Counting:
        def __init__(self, by: int) -> None:
            self.by, self.count = by, 0

        def on_step_end(self, run: RunView) -> None:
            self.count += self.by

        def state_dict(self) -> dict[str, int]:
            return {"count": self.count}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.count = state["count"]

    first = make_trainer(callbacks=[Counting(1), Counting(10)])
    first.fit(3)
    state = first.state_dict()
    assert state["callbacks"] == {"Counting": {"count": 3}, "Counting 2": {"count": 30}}
    callbacks = [Counting(1), Counting(10)]
    second = make_trainer(callbacks=callbacks)
    second.resume(state)
    assert second.state_dict()["callbacks"] == state["callbacks"]
    second.fit(5)
    assert [callback.count for callback in callbacks] == [5, 50]


def resumed_with(callbacks: list[object], state: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> str:
    ours = make_trainer(callbacks=callbacks, logger=MetricLogger())
    ours.resume(state)
    ours.fit(3)
    return capsys.readouterr().out


def test_other_callbacks_than_those_of_the_checkpoint_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    with_one, without = make_trainer(callbacks=[Freezing()]), make_trainer()
    for trainer in (with_one, without):
        trainer.fit(1)
    assert without.state_dict()["callbacks"] is None
    assert "has no state of the callback Freezing" in resumed_with([Freezing()], without.state_dict(), capsys)
    assert "this run has no callback Freezing" in resumed_with([], with_one.state_dict(), capsys)
    older = {key: value for key, value in without.state_dict().items() if key != "callbacks"}
    assert "has no state of the callback Freezing" in resumed_with([Freezing()], older, capsys)
    assert "callback" not in resumed_with([Freezing()], with_one.state_dict(), capsys)


def test_a_state_that_cannot_be_saved_is_refused_before_training(tmp_path: Path) -> None:
    class Odd(Freezing):
        def state_dict(self) -> dict[str, Any]:
            return {"file": object()}

    ours = make_trainer(callbacks=[Odd()], checkpoint_manager=CheckpointManager(tmp_path))
    with pytest.raises(CheckpointError, match=r"callbacks\.Odd\.file"):
        ours.fit(1)


# ---------------------------------------------------------------- what is no callback


def test_any_object_with_one_of_the_methods_is_a_callback() -> None:
    class Plain:
        calls = 0

        def on_step_end(self, run: RunView) -> None:
            self.calls += 1

    plain = Plain()
    make_trainer(callbacks=iter([plain])).fit(3)
    assert plain.calls == 3


def test_what_is_no_callback_is_refused_at_construction() -> None:
    class Half(Callback):
        def state_dict(self) -> dict[str, Any]:
            return {}

    for wrong, why in (
        (Noting, r"Noting is a class; pass an object of it"),
        (lambda event, payload: None, r"is no callback.*logger\.add_hook"),
        (Half(), r"Half has one of state_dict and load_state_dict"),
    ):
        with pytest.raises(ConfigError, match=why):
            make_trainer(callbacks=[wrong])


def test_methods_that_nothing_calls_are_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    class Foreign(Callback):
        def on_event(self, event: str, payload: dict[str, Any]) -> None: ...

        def on_train_batch_end(self, trainer: Trainer) -> None: ...

    make_trainer(callbacks=[Foreign()], logger=MetricLogger()).fit(2)
    assert capsys.readouterr().out.count("the callback Foreign has on_train_batch_end, which nothing calls") == 1


def test_weights_that_a_callback_puts_into_the_model_are_said() -> None:
    class Replaces:
        def on_step_end(self, run: Any) -> None:
            if run.step == 2:
                run.model.linear = torch.nn.Linear(3, 1)

    stream = StringIO()
    trainer = make_trainer(
        callbacks=[Replaces()],
        evaluator=lambda model, should_stop: {"loss": 1.0},
        config={"optimizer": {"ema": 0.9}, "eval": {"every_steps": 1}},
        logger=MetricLogger(stream=stream),
    )
    trainer.fit(4)
    said = [line for line in stream.getvalue().splitlines() if "did not have when fit began" in line]
    assert len(said) == 1
    assert "linear.weight, linear.bias; the optimizer does not have all of them" in said[0]
    assert "not in the average" in said[0]
