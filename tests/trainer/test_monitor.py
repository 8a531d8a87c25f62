"""The monitored number: which evaluation was the best, and when a run stops early."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from speedtronic.checkpoint import CheckpointManager
from speedtronic.config import EvalConfig
from speedtronic.errors import ConfigError
from speedtronic.trainer.monitor import Monitor
from tests.support.models import Events, config_of, make_trainer


def told(section: dict[str, Any], values: list[float], name: str = "loss") -> list[bool]:
    """Whether the run should stop after each evaluation; one is due at each step."""
    monitor = Monitor(EvalConfig(every_steps=1, **section))
    stops = []
    for step, value in enumerate(values, 1):
        monitor.note(step, {"loss": 0.0, name: value})
        stops.append(monitor.exhausted is not None)
    return stops


def test_a_run_stops_after_so_many_evaluations_without_improvement() -> None:
    falling = [5.0, 4.0, 4.0, 4.1, 3.9, 3.95, 4.0]
    assert told({"patience": 2}, falling) == [False, False, False, True, False, False, True]
    assert told({"patience": 2, "min_delta": 0.2}, falling) == [False, False, False, True, True, True, True]
    assert told({}, falling) == [False] * 7
    rising = {"monitor": "accuracy", "mode": "max", "patience": 1}
    assert told(rising, [0.5, 0.6, 0.6, 0.7], "accuracy") == [False, False, True, False]
    nan = math.nan
    assert told({"patience": 2}, [nan, 3.0, nan, nan]) == [False, False, False, True]
    assert told({"patience": 1}, [nan]) == [True]


def test_only_the_evaluations_of_the_cadence_count_and_each_once() -> None:
    monitor = Monitor(EvalConfig(every_steps=10, patience=1))
    for step, loss in ((10, 2.0), (13, 3.0), (15, 1.0), (20, 1.5), (20, 9.0), (20, 9.0)):
        monitor.note(step, {"loss": loss})
    assert monitor.exhausted is None
    assert monitor.state_dict()["best"] == 1.5


def test_the_number_of_another_set_is_found_and_one_that_is_missing_is_named() -> None:
    numbers = {"set": "held_out", "loss": 1.0, "sets": {"books": {"loss": 2.0, "perplexity": 7.0}}}
    for name, value in (("loss", 1.0), ("held_out/loss", 1.0), ("books/loss", 2.0), ("books/perplexity", 7.0)):
        assert Monitor(EvalConfig(monitor=name, mode="min")).value(numbers) == value
    with pytest.raises(ConfigError, match=r"no number 'perplexity'; it has loss, books/loss, books/perplexity"):
        Monitor(EvalConfig(monitor="perplexity", mode="min")).value(numbers)


def test_another_monitored_number_starts_anew_and_says_so() -> None:
    said: list[str] = []
    before = Monitor(EvalConfig(every_steps=1, patience=1))
    before.note(1, {"loss": 1.0})
    before.note(2, {"loss": 2.0})
    after = Monitor(EvalConfig(every_steps=1, patience=1, monitor="accuracy", mode="max"))
    after.load_state_dict(before.state_dict(), inform=said.append)
    assert (before.exhausted is None, after.exhausted) == (False, None)
    assert said == ["eval.monitor was loss (min): the best accuracy is looked for from here on"]
    same = Monitor(EvalConfig(every_steps=1, patience=1))
    same.load_state_dict(before.state_dict(), inform=said.append)
    assert same.exhausted == before.exhausted
    assert len(said) == 1


def by_step(values: Mapping[int, float]) -> Callable[..., Any]:
    """An evaluator of a model whose number of steps is its weight `count`."""

    def evaluate(model: nn.Module, should_stop: Callable[[], bool]) -> dict[str, float]:
        return {"loss": 1.0, "accuracy": values[int(model.get_buffer("count"))]}

    return evaluate


class Counting(nn.Module):
    """Counts its steps, and has a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 1)
        self.register_buffer("count", nn.Parameter(self.linear.bias.new_zeros(()), requires_grad=False).data)

    def forward(self, x: Any, y: Any) -> Any:
        if self.training:
            self.get_buffer("count").add_(1)
        return {"loss": ((self.linear(x) - y) ** 2).mean()}


VALUES = {2: 0.1, 4: 0.5, 6: 0.3, 8: 0.4, 10: 0.45, 12: 0.2, 14: 0.9, 16: 0.9}
EARLY = {"monitor": "accuracy", "mode": "max", "every_steps": 2, "patience": 3}


def run(folder: Path, steps: int, *, resume: bool, patience: int = 3, events: Events | None = None) -> Any:
    manager = CheckpointManager(folder, every_steps=1, keep_last=1)
    manager.keep_best = 1
    trainer = make_trainer(
        Counting(),
        config=config_of(eval={**EARLY, "patience": patience}),
        evaluator=by_step({step: VALUES.get(step, 0.0) for step in range(20)}),
        checkpoint_manager=manager,
        events=events,
    )
    if resume:
        state = manager.load_latest()
        assert state is not None
        trainer.resume(state)
    return trainer.fit(steps).steps, [entry.step for entry in manager.entries()], manager.best_path().name


def test_early_stopping_and_the_best_checkpoint_are_the_same_across_any_resume(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", 16, resume=False)
    assert whole == (10, [4, 10], "step_000000000004")
    for cut in range(1, 10):
        folder = tmp_path / str(cut)
        run(folder, cut, resume=False)
        assert run(folder, 16, resume=True) == whole, cut


def test_a_run_that_was_stopped_early_trains_on_with_more_patience_only(tmp_path: Path) -> None:
    run(tmp_path, 16, resume=False)
    assert run(tmp_path, 16, resume=True)[0] == 10
    assert run(tmp_path, 16, resume=True, patience=5) == (16, [16], "step_000000000016")
