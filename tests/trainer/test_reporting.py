"""What is reported of a step: its own numbers, those of the whole run, and those of the interval since the last log."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from speedtronic.checkpoint import CheckpointManager
from speedtronic.metrics import MetricLogger
from speedtronic.trainer import Callback, RunView, throughput
from tests.support.cases import case
from tests.support.models import (
    Endless,
    Events,
    Regression,
    Silence,
    config_of,
    make_trainer,
    poisoned,
    regression_batches,
)


class Clock:
    """`time.perf_counter` for a test, which decides how long everything takes."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", clock)
    return clock


class Timed(Regression):
    """Takes the given seconds for each step; the last of them for all that follow."""

    def __init__(self, clock: Clock, seconds: Sequence[float]) -> None:
        super().__init__()
        self.clock = clock
        self.seconds = list(seconds)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        self.clock.now += self.seconds.pop(0) if len(self.seconds) > 1 else self.seconds[0]
        return super().forward(x.float(), y)


def takes(clock: Clock, seconds: float) -> Callable[[nn.Module, Callable[[], bool]], dict[str, Any]]:
    def evaluate(model: nn.Module, should_stop: Callable[[], bool]) -> dict[str, Any]:
        clock.now += seconds
        return {"loss": 0.5}

    return evaluate


def test_a_first_step_that_compiles_is_in_no_rate_of_its_interval_but_alone(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", lambda model, **options: model)
    batches = [(torch.ones(4, 3, dtype=torch.long), torch.zeros(4, 1))]
    for compiled, rates in (
        (True, [1 / 60, 2.0, 2.0, 2.0, 2.0, 2.0]),
        (False, [1 / 60, 2 / 60.5, 3 / 61, 2.0, 2.0, 2.0]),
    ):
        with case(compiled):
            logger = MetricLogger(stream=Silence(), every_steps=3)
            model = Timed(clock, [60.0] + [0.5] * 5)
            ours = make_trainer(model, batches, logger=logger, config=config_of(compile=compiled))
            records = ours.fit(6).metrics
            assert [record["interval_steps_per_sec"] for record in records] == pytest.approx(rates)
            assert [record["interval_tokens_per_sec"] for record in records] == pytest.approx([12 * r for r in rates])
            assert records[2]["interval_loss"] == pytest.approx(sum(record["loss"] for record in records[:3]) / 3)


def test_the_device_is_asked_for_its_figures_once_a_log(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def peak(device: torch.device) -> int:
        asked.append(len(asked))
        return len(asked)

    monkeypatch.setattr(throughput, "peak_memory_bytes", peak)
    records = make_trainer(logger=MetricLogger(stream=Silence(), every_steps=5)).fit(10).metrics
    assert len(asked) == 3, "at the start, and for each of two logs"
    assert [record["peak_memory_bytes"] for record in records] == [2] * 5 + [3] * 5


def test_the_rate_of_an_interval_is_not_the_mean_since_the_start(clock: Clock) -> None:
    """A run that became slower: 15.4 steps per second since the start, and 10.2 now."""
    fast, slow = 2 / 15.4 - 1 / 10.2, 1 / 10.2
    logger = MetricLogger(stream=Silence(), every_steps=10)
    batches = [(torch.ones(4, 3, dtype=torch.long), torch.zeros(4, 1))]
    records = make_trainer(Timed(clock, [fast] * 10 + [slow] * 10), batches, logger=logger).fit(20).metrics
    assert records[19]["steps_per_sec"] == pytest.approx(15.4)
    assert records[19]["interval_steps_per_sec"] == pytest.approx(10.2)
    assert records[19]["interval_samples_per_sec"] == pytest.approx(4 * 10.2)
    assert records[19]["interval_tokens_per_sec"] == pytest.approx(12 * 10.2)
    assert records[9]["interval_steps_per_sec"] == pytest.approx(1 / fast)


def test_an_evaluation_takes_no_time_of_the_interval(clock: Clock) -> None:
    ours = make_trainer(
        Timed(clock, [0.1]),
        config=config_of(eval={"every_steps": 3}),
        evaluator=takes(clock, 7.0),
        logger=MetricLogger(stream=Silence(), every_steps=5),
    )
    records = ours.fit(10).metrics
    assert [record["interval_steps_per_sec"] for record in records] == pytest.approx([10.0] * 10)
    # The seed's rate is that of the whole invocation.
    assert records[9]["steps_per_sec"] == pytest.approx(10 / (10 * 0.1 + 3 * 7.0))


def test_what_comes_before_the_first_step_takes_no_time_of_the_interval(clock: Clock) -> None:
    class Slow(Events):
        def on_event(self, event: str, payload: dict[str, Any]) -> None:
            clock.now += 30.0 if event == "shape_profile" else 0.0

    record = make_trainer(Timed(clock, [0.5]), events=Slow()).fit(1).metrics[0]
    assert record["interval_steps_per_sec"] == pytest.approx(2.0)


def test_the_loss_of_an_interval_is_the_mean_of_its_steps() -> None:
    for every in (1, 4):
        events = Events()
        logger = MetricLogger(stream=Silence(), every_steps=every, hooks=[events])
        records = make_trainer(logger=logger).fit(10).metrics
        losses = [record["loss"] for record in records]
        for number, record in enumerate(records):
            own = losses[number // every * every : number + 1]
            assert record["interval_loss"] == pytest.approx(sum(own) / len(own), rel=1e-12)
        assert [payload["interval_loss"] for payload in events.of("train_step")] == [
            record["interval_loss"] for record in records
        ]


def test_a_refused_update_does_not_hide_the_other_losses_of_its_interval() -> None:
    config = config_of(run={"on_nonfinite": "skip"})
    logger = MetricLogger(stream=Silence(), every_steps=4)
    records = make_trainer(batches=poisoned(2), config=config, logger=logger).fit(4).metrics
    losses = [record["loss"] for record in records]
    assert records[3]["interval_loss"] == pytest.approx((losses[0] + losses[2] + losses[3]) / 3)


def test_the_time_left_follows_the_pace_of_now_with_its_evaluations(clock: Clock) -> None:
    # The first step compiles, so to speak.
    model = Timed(clock, [60.0, 0.5])
    ours = make_trainer(model, config=config_of(eval={"every_steps": 50}), evaluator=takes(clock, 10.0))
    records = ours.fit(100).metrics
    assert records[0]["eta_s"] == pytest.approx(99 * 60.0)
    assert records[1]["eta_s"] == pytest.approx(98 * 60.0)
    assert records[2]["eta_s"] == pytest.approx(97 * 0.5)
    assert records[49]["eta_s"] == pytest.approx(50 * 0.5)
    assert records[50]["eta_s"] == pytest.approx(49 * (0.5 + 10.0 / 51))
    assert records[99]["eta_s"] == 0.0


def test_the_last_step_is_logged_whatever_the_cadence(tmp_path: Path) -> None:
    with MetricLogger(stream=Silence(), json_file=tmp_path / "l.jsonl", every_steps=4) as logger:
        make_trainer(
            logger=logger,
            checkpoint_manager=CheckpointManager(tmp_path / "checkpoints"),
            evaluator=lambda model, should_stop: {"loss": 0.5},
            config=config_of(shape_validation={"enabled": False}),
        ).fit(6)
    lines = [json.loads(line) for line in (tmp_path / "l.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [(line["event"], line["step"]) for line in lines if "step" in line] == [
        ("train_start", 0),
        ("train_step", 4),
        ("train_step", 6),
        ("eval", 6),
        ("checkpoint", 6),
        ("train_end", 6),
    ]


def steps_and_events(folder: Path, train: Callable[[MetricLogger], object]) -> list[tuple[str, int]]:
    with MetricLogger(stream=Silence(), json_file=folder / "l.jsonl", every_steps=100) as logger:
        train(logger)
    lines = [json.loads(line) for line in (folder / "l.jsonl").read_text(encoding="utf-8").splitlines()]
    return [(line["event"], line["step"]) for line in lines if line["event"] in ("train_step", "eval", "train_end")]


def test_a_run_that_ends_early_logs_its_last_step_before_its_evaluation(tmp_path: Path) -> None:
    class Ending(Callback):
        def __init__(self, end: Callable[[RunView], object]) -> None:
            self.end = end

        def on_step_end(self, run: RunView) -> None:
            if run.step == 3:
                self.end(run)

    def train(logger: MetricLogger, end: Callable[[RunView], object]) -> None:
        config = config_of(eval={"every_steps": 3})
        ours = make_trainer(
            logger=logger, config=config, evaluator=lambda model, stop: {"loss": 1.0}, callbacks=[Ending(end)]
        )
        ours.fit(50)

    stopped = steps_and_events(tmp_path, lambda logger: train(logger, RunView.stop))
    assert stopped == [("train_step", 3), ("eval", 3), ("train_end", 3)]
    (tmp_path / "l.jsonl").unlink()
    by_signal = steps_and_events(
        tmp_path, lambda logger: train(logger, lambda run: signal.raise_signal(signal.SIGTERM))
    )
    assert [event for event in by_signal if event[0] != "eval"] == [("train_step", 3), ("train_end", 3)]


def test_a_run_that_its_evaluation_stops_logs_its_last_step_before_its_checkpoint(tmp_path: Path) -> None:
    class Stopping(Callback):
        def on_eval_end(self, run: RunView) -> None:
            run.stop()

    with MetricLogger(stream=Silence(), json_file=tmp_path / "l.jsonl", every_steps=100) as logger:
        make_trainer(
            logger=logger,
            config=config_of(eval={"every_steps": 3}),
            evaluator=lambda model, should_stop: {"loss": 1.0},
            checkpoint_manager=CheckpointManager(tmp_path / "checkpoints"),
            callbacks=[Stopping()],
        ).fit(50)
    events = [json.loads(line)["event"] for line in (tmp_path / "l.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [event for event in events if event != "log"][-4:] == ["eval", "train_step", "checkpoint", "train_end"]


def test_a_run_that_fails_has_reported_the_steps_before(tmp_path: Path) -> None:
    def batch(number: int) -> tuple[Tensor, Tensor]:
        if number == 5:
            raise OSError("the disk with the data is gone")
        return regression_batches()[number]

    def train(logger: MetricLogger) -> None:
        logger.add_hook(events)
        with pytest.raises(OSError, match="is gone"):
            make_trainer(batches=Endless(batch), logger=logger).fit(50)

    events = Events()
    assert steps_and_events(tmp_path, train) == [("train_step", 5)]
    assert [payload["step"] for payload in events.of("train_step")] == [1, 2, 3, 4, 5]


def test_the_progress_line_hears_of_each_step_at_once() -> None:
    shown: list[int] = []
    logger = MetricLogger(stream=Silence(), every_steps=10)
    logger.show_step = shown.append  # type: ignore[method-assign]
    make_trainer(logger=logger).fit(3)
    assert shown == [1, 2, 3]
