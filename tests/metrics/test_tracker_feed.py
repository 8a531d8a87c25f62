"""A feed sends each step of a run to its tracker once, whatever the tracker and the process do."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from speedtronic.errors import ConfigError, MissingExtraError
from speedtronic.metrics import MetricLogger
from speedtronic.metrics import tracker_feed as module
from speedtronic.metrics.trackers import Point, TrackedRun
from speedtronic.runtime import build_logger, train_from_config
from tests.support.configs import tiny
from tests.support.models import Silence, config_of
from tests.support.tracking import RUN_ID, TRAIN_LOSS, Tracked

LONG = 60.0  # seconds that nothing here takes


class Fake:
    """A tracker that keeps what was flushed."""

    def __init__(self) -> None:
        self.opened: list[TrackedRun] = []
        self.closed = 0
        self.points: list[Point] = []
        self.failing: Exception | None = None
        self.failed = threading.Semaphore(0)
        self.flushed = threading.Semaphore(0)
        self._waiting: list[Point] = []

    def open(self, run: TrackedRun) -> Fake:
        self.opened.append(run)
        return self

    def log(self, point: Point) -> None:
        self._waiting.append(point)

    def flush(self) -> None:
        waiting, self._waiting = self._waiting, []
        if self.failing is not None:
            self.failed.release()
            raise self.failing
        self.points += waiting
        self.flushed.release()

    def close(self) -> None:
        self.closed += 1

    def curve(self, name: str = "train/loss") -> list[tuple[int, float]]:
        return [(point.step, point.numbers[name]) for point in self.points if name in point.numbers]


def test_a_run_is_opened_fed_and_closed(tmp_path: Path) -> None:
    fake = Fake()
    tracked = Tracked(tmp_path, fake.open)
    tracked.start()
    tracked.steps(1, 8)
    tracked.emit("log", {"level": "INFO", "message": "hello"})
    tracked.emit("eval", {"step": 8, "loss": 2.5, "sets": {"books": {"loss": 3.5}}, "text": "a", "ok": True})
    tracked.emit("train_end", {"step": 8, "final_loss": 2.0})
    tracked.close()
    assert [(run.run_id, run.name, run.folder) for run in fake.opened] == [(RUN_ID, "my run", tmp_path / "trackers")]
    assert fake.curve() == TRAIN_LOSS
    assert fake.points[-1].numbers == {"eval/loss": 2.5, "eval/sets/books/loss": 3.5}
    assert len(fake.points) == 9
    assert fake.closed == 1
    assert tracked.messages == []


def test_a_resumed_run_sends_only_the_steps_that_the_tracker_lacks(tmp_path: Path) -> None:
    """Killed after step 6, resumed from the checkpoint of step 4: steps 5 and 6 are in the file twice."""
    fake = Fake()
    first = Tracked(tmp_path, fake.open)
    first.start()
    first.steps(1, 6)
    assert fake.flushed.acquire(timeout=LONG)
    first.close()
    second = Tracked(tmp_path, fake.open)
    second.start(4)
    second.steps(5, 8)
    second.close()
    assert fake.curve() == TRAIN_LOSS
    assert fake.opened[0].run_id == fake.opened[1].run_id


def test_what_a_killed_process_did_not_send_is_sent_by_the_next(tmp_path: Path) -> None:
    killed = Tracked(tmp_path, Fake().open, pause=LONG)
    killed.emit("train_step", {"step": 1, "loss": 9.0})  # without a start, nothing is sent: as if the feed had hung
    killed.steps(2, 6)
    fake = Fake()
    resumed = Tracked(tmp_path, fake.open)
    resumed.start(6)
    resumed.steps(7, 8)
    resumed.close()
    assert fake.curve() == TRAIN_LOSS


def test_after_an_outage_the_tracker_gets_what_it_missed_and_the_console_hears_of_it_once(tmp_path: Path) -> None:
    fake = Fake()
    fake.failing = ConnectionError("no route to https://me:secret@host/")
    tracked = Tracked(tmp_path, fake.open)
    tracked.start()
    for step in range(1, 5):
        tracked.steps(step, step)
        assert fake.failed.acquire(timeout=LONG)
    fake.failing = None
    assert fake.flushed.acquire(timeout=LONG)
    tracked.steps(5, 8)
    tracked.close()
    assert fake.curve() == TRAIN_LOSS
    assert tracked.messages == [
        "fake fails: ConnectionError: no route to https://host/; training goes on, and fake gets what it misses from "
        "metrics.jsonl when it works again",
        "fake works again, and has all steps",
    ]


def test_a_tracker_that_never_works_costs_two_lines_and_the_next_run_sends_all(tmp_path: Path) -> None:
    def refuse(run: TrackedRun) -> Fake:
        raise RuntimeError("no key")

    tracked = Tracked(tmp_path, refuse)
    tracked.start()
    tracked.steps(1, 8)
    tracked.close()
    assert len(tracked.messages) == 2
    assert "RuntimeError: no key" in tracked.messages[0]
    assert tracked.messages[1] == "fake did not take all of this run; the rest is sent when the run is resumed"
    fake = Fake()
    resumed = Tracked(tmp_path, fake.open)
    resumed.start(8)
    resumed.close()
    assert fake.curve() == TRAIN_LOSS


def test_a_hanging_tracker_is_said_once_and_closing_waits_no_longer_than_the_patience(tmp_path: Path) -> None:
    go, hanging = threading.Event(), threading.Event()
    now = [0.0]

    def hang(run: TrackedRun) -> Fake:
        hanging.set()
        assert go.wait(LONG)
        return fake

    fake = Fake()
    tracked = Tracked(tmp_path, hang, clock=lambda: now[0], patience=0.02)
    tracked.start()
    assert hanging.wait(LONG)
    tracked.steps(1, 3)
    assert tracked.messages == []
    now[0] = 61.0
    tracked.steps(4, 8)
    tracked.close()
    assert tracked.messages == [
        "fake does not answer; training goes on, and fake gets what it misses when it does",
        "fake did not take all of this run; the rest is sent when the run is resumed",
    ]
    go.set()


def test_a_second_fit_of_one_process_continues_the_curve(tmp_path: Path) -> None:
    fake = Fake()
    tracked = Tracked(tmp_path, fake.open)
    for first, last in ((1, 4), (5, 8)):
        tracked.start(first - 1)
        tracked.steps(first, last)
        tracked.emit("train_end", {"step": last})
    tracked.close()
    tracked.close()
    assert fake.curve() == TRAIN_LOSS
    assert fake.closed == 2


def test_lines_of_other_runs_and_broken_ones_are_passed_over(tmp_path: Path) -> None:
    fake = Fake()
    tracked = Tracked(tmp_path, fake.open)
    tracked.emit("train_step", {"step": 7, "loss": 0.5}, run_id="another")
    with (tmp_path / "metrics.jsonl").open("ab") as lines:
        lines.write(b'{"event": "train_st\n[1, 2]\n{}\n')
    tracked.start()
    tracked.steps(1, 8)
    with (tmp_path / "metrics.jsonl").open("ab") as lines:
        lines.write(b'{"event": "train_step", "step": 9')  # is being written
    tracked.close()
    assert fake.curve() == TRAIN_LOSS


def test_the_position_may_be_lost_or_of_another_file(tmp_path: Path) -> None:
    """Steps are compared, so a wrong offset costs time only; without any position, all is sent again."""
    fake = Fake()
    first = Tracked(tmp_path, fake.open)
    first.start()
    first.steps(1, 6)
    first.close()
    position = tmp_path / "trackers/fake.json"
    saved = json.loads(position.read_bytes())
    assert saved["steps"] == {"train_step": 6}
    for wrong in ({**saved, "offset": saved["offset"] - 3}, {**saved, "offset": 10**9}, {**saved, "lines": "other"}):
        position.write_text(json.dumps(wrong))
        again = Tracked(tmp_path, fake.open)
        again.start(6)
        again.close()
        assert fake.curve() == TRAIN_LOSS[:6]
    position.write_text("{")
    again = Tracked(tmp_path, fake.open)
    again.start(6)
    again.close()
    assert fake.curve() == TRAIN_LOSS[:6] * 2


def test_a_long_backlog_is_sent_in_batches(tmp_path: Path) -> None:
    fake = Fake()
    tracked = Tracked(tmp_path, fake.open)
    tracked.steps(1, 1200)
    tracked.start(1200)
    tracked.close()
    assert [step for step, _ in fake.curve()] == list(range(1, 1201))
    flushes = 0
    while fake.flushed.acquire(blocking=False):
        flushes += 1
    assert flushes == 3


def test_a_feed_may_log_while_its_logger_closes_it(tmp_path: Path) -> None:
    """The logger's lock is free by then: else each of the two would wait for the other."""

    def refuse(run: TrackedRun) -> Fake:
        raise RuntimeError("no key")

    logger = MetricLogger(stream=Silence(), json_file=tmp_path / "m.jsonl")
    feed = Tracked(tmp_path, refuse, patience=LONG).feed
    feed._warn = logger.warning
    logger.add_feed(feed)
    logger.emit("train_start", {"step": 0, "target_steps": 1})
    logger.close()
    assert "did not take all" in (tmp_path / "m.jsonl").read_text().splitlines()[-1]


def test_training_feeds_the_trackers_of_the_configuration_without_its_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = Fake()
    monkeypatch.setattr(module, "opener_of", lambda name: fake.open)
    monkeypatch.setattr("speedtronic.runtime.opener_of", lambda name: fake.open)
    config: dict[str, Any] = tiny(tmp_path, logging={"trackers": ["wandb"]}, distributed={"token": "hf_secret"})
    train_from_config(config)
    assert [step for step, _ in fake.curve()] == [1, 2, 3, 4]
    assert fake.opened[0].config["distributed"]["token"] == "<redacted>"
    assert fake.opened[0].folder == tmp_path / "trackers"
    config["checkpoint"] = {"resume": True}
    config["run"]["max_steps"] = 6
    train_from_config(config)
    assert [step for step, _ in fake.curve()] == [1, 2, 3, 4, 5, 6]
    assert fake.opened[0].run_id == fake.opened[1].run_id


def test_a_tracker_that_is_not_installed_is_refused_with_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("speedtronic.metrics.trackers.find_spec", lambda package: None)
    with pytest.raises(MissingExtraError, match=r"the tracker mlflow is not installed; install speedtronic\[mlflow\]"):
        build_logger(config_of(run={"output_dir": str(tmp_path)}, logging={"trackers": ["mlflow"]}))
    assert list(tmp_path.iterdir()) == []


def test_trackers_need_json_lines_that_can_be_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("speedtronic.runtime.opener_of", lambda name: Fake().open)
    with pytest.raises(ConfigError, match="/dev/null is not a plain file"):
        build_logger(
            config_of(run={"output_dir": str(tmp_path)}, logging={"trackers": ["mlflow"], "json_file": "/dev/null"})
        )
