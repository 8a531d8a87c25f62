from __future__ import annotations

import errno
import threading
from io import FileIO
from pathlib import Path
from typing import Any

import pytest
import torch

from speedtronic.checkpoint import CheckpointManager
from speedtronic.durable.files import FileSystem
from speedtronic.metrics import MetricLogger
from speedtronic.trainer.saving import CheckpointSaver
from tests.support.models import Endless, Events, Silence, make_trainer, regression_batches

BACKGROUND = pytest.mark.parametrize("background", [False, True], ids=["foreground", "background"])


class Disk(FileSystem):
    """Fails every write while `full`, and flushes only while `flushing`."""

    def __init__(self) -> None:
        self.full = False
        self.flushing = threading.Event()
        self.flushing.set()

    def write(self, file: FileIO, data: memoryview) -> None:
        if self.full:
            raise OSError(errno.ENOSPC, "No space left on device")
        super().write(file, data)

    def sync(self, file: FileIO) -> None:
        assert self.flushing.wait(10)
        super().sync(file)


class Bench:
    """A saver on a disk that obeys, and what it said."""

    def __init__(self, folder: Path, *, background: bool, every_steps: int = 1) -> None:
        self.disk = Disk()
        self.events = Events()
        self.text = Text()
        self.manager = CheckpointManager(folder, every_steps=every_steps, fs=self.disk)
        logger = MetricLogger(stream=self.text, hooks=[self.events])
        self.saver = CheckpointSaver(self.manager, logger, background=background)

    def save(self, step: int) -> None:
        self.saver.save(step, {"model": {"x": torch.full((3,), float(step))}, "step": step})

    def reported(self) -> list[tuple[int, bool]]:
        """The step of each event, and whether it was saved."""
        return [(payload["step"], payload["path"] is not None) for payload in self.events.of("checkpoint")]


class Text(Silence):
    def __init__(self) -> None:
        self.written = ""

    def write(self, text: str) -> int:
        self.written += text
        return len(text)


@BACKGROUND
def test_a_failed_save_is_an_event_and_a_warning_and_the_next_one_is_tried(tmp_path: Path, background: bool) -> None:
    bench = Bench(tmp_path, background=background)
    bench.save(1)
    bench.saver.wait()
    bench.disk.full = True
    bench.save(2)
    bench.saver.wait()
    assert bench.saver.error == "[Errno 28] No space left on device"
    assert "the checkpoint of step 2 could not be written" in bench.text.written
    assert bench.events.of("checkpoint")[-1] == {"step": 2, "path": None, "error": bench.saver.error}
    bench.disk.full = False
    bench.save(3)
    bench.saver.wait()
    assert bench.reported() == [(1, True), (2, False), (3, True)]
    assert bench.saver.error is None


@BACKGROUND
def test_a_save_is_held_until_another_is_due_or_it_has_failed(tmp_path: Path, background: bool) -> None:
    bench = Bench(tmp_path, background=background)
    assert not bench.saver.holds(1)
    bench.save(1)
    assert bench.saver.holds(1)
    assert not bench.saver.holds(2)
    bench.disk.full = True
    bench.save(2)
    bench.saver.wait()
    assert not bench.saver.holds(2)


def test_a_save_is_held_while_it_is_written_also_after_a_failed_one(tmp_path: Path) -> None:
    bench = Bench(tmp_path, background=True)
    bench.disk.full = True
    bench.save(1)
    bench.saver.wait()
    bench.disk.full = False
    bench.disk.flushing.clear()
    bench.save(2)
    assert bench.saver.holds(2)
    bench.disk.flushing.set()
    bench.saver.wait()


def test_nothing_is_reported_before_it_is_on_the_disk(tmp_path: Path) -> None:
    bench = Bench(tmp_path, background=True)
    bench.disk.flushing.clear()
    bench.save(1)
    bench.saver.poll()
    assert bench.reported() == []
    bench.disk.flushing.set()
    bench.saver.wait()
    assert bench.reported() == [(1, True)]
    bench.saver.poll()
    bench.saver.wait()
    assert bench.reported() == [(1, True)]


def test_polling_reports_a_save_that_has_ended(tmp_path: Path) -> None:
    bench = Bench(tmp_path, background=True)
    bench.save(1)
    pending = bench.saver._writing
    assert pending is not None
    pending.result(10)
    bench.saver.poll()
    assert bench.reported() == [(1, True)]


def test_a_save_that_comes_while_one_is_written_waits_for_it(tmp_path: Path) -> None:
    bench = Bench(tmp_path, background=True)
    bench.disk.flushing.clear()
    bench.save(1)
    threading.Timer(0.05, bench.disk.flushing.set).start()
    bench.save(2)
    assert bench.reported() == [(1, True)]
    bench.saver.close()
    assert bench.reported() == [(1, True), (2, True)]


def test_what_cannot_be_saved_in_the_middle_of_a_run_does_not_end_it(tmp_path: Path) -> None:
    bench = Bench(tmp_path, background=True)
    bench.saver.save(1, {"model": {"x": object()}})
    assert bench.saver.error is not None
    assert bench.saver.error.startswith("model.x: a object cannot be saved")
    assert bench.reported() == [(1, False)]


def test_an_error_that_is_no_fault_of_the_disk_is_not_hidden(tmp_path: Path) -> None:
    class Broken(FileSystem):
        def write(self, file: FileIO, data: memoryview) -> None:
            raise ZeroDivisionError

    saver = CheckpointSaver(CheckpointManager(tmp_path, fs=Broken()), MetricLogger(stream=Silence()), background=True)
    saver.save(1, {"step": 1})
    with pytest.raises(ZeroDivisionError):
        saver.wait()


# --- in a run ---


def trainer_on(
    folder: Path, disk: FileSystem, events: Events, before: Any, every_steps: int = 2, background: bool = True
) -> Any:
    """Trains on eight batches again and again; `before(number)` is called before each."""

    def batch(number: int) -> Any:
        before(number)
        return regression_batches()[number % 8]

    manager = CheckpointManager(folder, every_steps=every_steps, fs=disk)
    config = {"checkpoint": {"background": background}}
    return make_trainer(batches=Endless(batch), events=events, checkpoint_manager=manager, config=config)


def test_training_goes_on_while_a_checkpoint_is_flushed_and_its_end_waits(tmp_path: Path) -> None:
    disk, events = Disk(), Events()
    disk.flushing.clear()
    steps_before_the_flush: list[int] = []

    def before(number: int) -> None:
        if number == 7:
            steps_before_the_flush.append(len(events.of("train_step")))
            disk.flushing.set()

    result = trainer_on(tmp_path, disk, events, before, every_steps=5).fit(8)
    assert steps_before_the_flush[0] >= 6
    assert [payload["step"] for payload in events.of("checkpoint")] == [5, 8]
    assert (result.steps, result.save_error) == (8, None)
    state = CheckpointManager(tmp_path).load_latest()
    assert state is not None
    assert state["step"] == 8


def test_a_disk_that_is_full_for_a_while_costs_the_saves_of_that_while(tmp_path: Path) -> None:
    disk, events = Disk(), Events()

    def before(number: int) -> None:
        disk.full = 1 <= number <= 4

    result = trainer_on(tmp_path, disk, events, before, every_steps=3, background=False).fit(10)
    assert [(p["step"], p["path"] is not None) for p in events.of("checkpoint")] == [
        (3, False),
        (6, True),
        (9, True),
        (10, True),
    ]
    assert result.save_error is None


def test_only_the_last_failed_save_is_an_error_of_the_run(tmp_path: Path) -> None:
    disk, events = Disk(), Events()

    def before(number: int) -> None:
        disk.full = number == 4

    result = trainer_on(tmp_path, disk, events, before).fit(5)
    assert result.steps == 5
    assert result.save_error == "[Errno 28] No space left on device"
    state = CheckpointManager(tmp_path).load_latest()
    assert state is not None
    assert state["step"] in (2, 4)


def test_an_error_in_training_leaves_no_write_behind(tmp_path: Path) -> None:
    disk, events = Disk(), Events()
    disk.flushing.clear()

    def before(number: int) -> None:
        if number == 2:
            threading.Timer(0.05, disk.flushing.set).start()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        trainer_on(tmp_path, disk, events, before).fit(5)
    assert [payload["step"] for payload in events.of("checkpoint")] == [2]


# --- what a checkpoint knows of its weights ---


def evaluated_trainer(folder: Path, evaluate: Any, **sections: Any) -> Any:
    config = {"checkpoint": {"background": False}, **sections}
    manager = CheckpointManager(folder, every_steps=3, keep_last=None)
    return make_trainer(checkpoint_manager=manager, evaluator=evaluate, config=config)


def eval_losses(folder: Path) -> dict[int, float | None]:
    return {entry.step: entry.eval_loss for entry in CheckpointManager(folder).entries()}


def test_a_checkpoint_knows_the_evaluation_of_its_own_step_and_no_other(tmp_path: Path) -> None:
    losses = iter([4.0, 3.0, 2.0, 1.0])
    trainer = evaluated_trainer(tmp_path, lambda model, should_stop: {"loss": next(losses)}, eval={"every_steps": 2})
    assert trainer.fit(7).eval_loss == 1.0
    assert eval_losses(tmp_path) == {3: None, 6: 2.0, 7: 1.0}
    state = CheckpointManager(tmp_path).load_latest()
    assert state is not None
    assert state["metrics"]["eval_loss"] == 1.0


def test_without_an_evaluation_a_checkpoint_knows_no_loss_of_one(tmp_path: Path) -> None:
    evaluated_trainer(tmp_path, None).fit(4)
    assert eval_losses(tmp_path) == {3: None, 4: None}


@pytest.mark.parametrize(("sections", "saved"), [({"eval": {"every_steps": 3}}, 3), ({}, 4)], ids=["middle", "end"])
def test_an_evaluation_that_fails_costs_no_checkpoint(tmp_path: Path, sections: dict[str, Any], saved: int) -> None:
    def evaluate(model: torch.nn.Module, should_stop: Any) -> Any:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        evaluated_trainer(tmp_path, evaluate, **sections).fit(4)
    state = CheckpointManager(tmp_path).load_latest()
    assert state is not None
    assert (state["step"], state["metrics"]["eval_loss"]) == (saved, None)


def test_a_run_that_has_ended_holds_no_memory_for_snapshots(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, every_steps=1)
    before = set(threading.enumerate())  # of managers that other tests left to the garbage collector
    make_trainer(checkpoint_manager=manager).fit(2)
    assert manager._buffers.model._blocks == []
    assert not any(thread.name.startswith("checkpoint-writer") for thread in set(threading.enumerate()) - before)
