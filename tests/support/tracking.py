"""What the tests of trackers share: a run's JSON lines, a feed, and a run that is killed and resumed."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from speedtronic.metrics.jsonl import JsonlSink
from speedtronic.metrics.records import Record
from speedtronic.metrics.tracker_feed import TrackerFeed, opener_of
from speedtronic.metrics.trackers import TrackedRun, Tracker

RUN_ID = "0123456789abcdef" * 2
BEGAN = datetime(2026, 1, 31, 12, 0, tzinfo=UTC)


class Tracked:
    """A run that logs to JSON lines, and the feed of one tracker."""

    def __init__(self, folder: Path, open_tracker: Callable[[TrackedRun], Tracker], **options: Any) -> None:
        self.folder = folder
        self.messages: list[str] = []
        self._lines = JsonlSink(folder / "metrics.jsonl")
        self.feed = TrackerFeed(
            "fake",
            open_tracker,
            folder / "metrics.jsonl",
            folder / "trackers",
            run_name="my run",
            config={"run": {"name": "my run", "max_steps": 8}, "distributed": {"token": "<redacted>"}},
            warn=self.messages.append,
            inform=self.messages.append,
            **{"pause": 0.01, **options},
        )

    def emit(self, event: str, payload: dict[str, Any], *, run_id: str = RUN_ID, at: datetime = BEGAN) -> None:
        record = Record(event, 20, payload, 0.0, at, run_id)
        self._lines.write(record)
        self.feed.write(record)

    def start(self, step: int = 0) -> None:
        self.emit("train_start", {"step": step, "target_steps": 8})

    def steps(self, first: int, last: int) -> None:
        for step in range(first, last + 1):
            self.emit("train_step", {"step": step, "loss": 10.0 - step})

    def close(self) -> None:
        self.feed.close()
        self._lines.close()


def track_and_resume(folder: Path, name: str) -> None:
    """Take six steps, die, and resume from step 4 to step 8 in another feed, with the tracker of this name."""
    pytest.importorskip(name, reason=f"speedtronic[{name}] is not installed")
    first = Tracked(folder, opener_of(name), patience=120.0)
    first.start()
    first.steps(1, 6)
    first.emit("eval", {"step": 6, "loss": 3.5})
    first.close()
    second = Tracked(folder, opener_of(name), patience=120.0)
    second.start(4)
    second.steps(5, 8)
    second.emit("eval", {"step": 8, "loss": 1.5})
    second.emit("train_end", {"step": 8})
    second.close()
    assert first.messages == second.messages == []


TRAIN_LOSS = [(step, 10.0 - step) for step in range(1, 9)]
"""The curve `train/loss` of `track_and_resume`: each step once."""
EVAL_LOSS = [(6, 3.5), (8, 1.5)]
