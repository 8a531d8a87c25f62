"""The thread that feeds a tracker from the run's JSON lines.

The file of JSON lines is the queue. A thread reads it, so training never waits for a tracker, memory holds nothing for
it, and what it missed is still there when it works again, in a later process too.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from speedtronic.config.secrets import redacted
from speedtronic.durable.files import FileSystem, ensure_directory
from speedtronic.metrics.mlflow import open_mlflow
from speedtronic.metrics.records import TRAIN_END, TRAIN_START, Record
from speedtronic.metrics.tensorboard import open_tensorboard
from speedtronic.metrics.trackers import Point, TrackedRun, Tracker, point_of, require_tracker
from speedtronic.metrics.trackio import open_trackio
from speedtronic.metrics.wandb import open_wandb

_LONGEST_PAUSE = 60.0  # seconds between two tries
_NO_ANSWER = 60.0  # seconds after which a tracker is said to hang
_BATCH = 500  # points between two flushes
_LONGEST_REASON = 500  # characters of an error; a database's may hold whole statements


_OPENERS: Mapping[str, Callable[[TrackedRun], Tracker]] = {
    "tensorboard": open_tensorboard,
    "wandb": open_wandb,
    "mlflow": open_mlflow,
    "trackio": open_trackio,
}


def opener_of(name: str) -> Callable[[TrackedRun], Tracker]:
    """What opens a run in the tracker of this name. The tracker's package is imported by the call.

    Raises:
        MissingExtraError: the package is not installed.
    """
    require_tracker(name)
    return _OPENERS[name]


class TrackerFeed:
    """Feeds one tracker from a run's JSON lines, on a thread of its own from `train_start` to the end of the run.

    A tracker that fails is tried again, after a pause that doubles up to a minute, and then gets what it has missed.
    The console says once that it fails. Each step of a curve is sent once: a file in the run's folder says how far the
    tracker is. So a run that resumes from a checkpoint sends none of the steps again that it takes again.

    Args:
        name: of the tracker.
        open_tracker: opens the run in it; called on the thread, and so may import the tracker's package.
        lines: the file of JSON lines. Each record is in it before `write` has it.
        folder: for what the tracker and this feed write.
        run_name: `run.name`.
        config: without secrets.
        warn, inform: called with a message.
        pause: seconds between two looks at the file.
        patience: seconds that `close` waits.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        name: str,
        open_tracker: Callable[[TrackedRun], Tracker],
        lines: Path,
        folder: Path,
        *,
        run_name: str,
        config: Mapping[str, Any],
        warn: Callable[[str], None],
        inform: Callable[[str], None],
        pause: float = 1.0,
        patience: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self._open = open_tracker
        self._lines = lines
        self._folder = folder
        self._run_name = run_name
        self._config = config
        self._warn = warn
        self._inform = inform
        self._pause = pause
        self._patience = patience
        self._clock = clock
        self._thread: threading.Thread | None = None
        self._ending = threading.Event()
        self._calling_since: float | None = None
        self._said_silent = False
        self._complete = True
        self._given_up = False  # by `close`: what the thread finds out later, nobody is told

    def write(self, record: Record) -> None:
        """Start with `train_start`, end after `train_end`. Whatever the record holds is read from the file."""
        if record.event == TRAIN_START and record.run_id is not None:
            run = TrackedRun(record.run_id, self._run_name, self._folder, self._config)
            former, self._ending = self._thread, threading.Event()
            self._said_silent = self._complete = self._given_up = False
            self._thread = threading.Thread(
                target=self._follow, args=(run, self._ending, former), name=f"tracker-{self.name}", daemon=True
            )
            self._thread.start()
        elif record.event == TRAIN_END:
            self._ending.set()
        since = self._calling_since
        if since is not None and self._clock() - since > _NO_ANSWER and not self._said_silent:
            self._said_silent = True
            self._warn(
                f"{self.name} does not answer; training goes on, and {self.name} gets what it misses when it does"
            )

    def close(self) -> None:
        """Send what is left, finish the run in the tracker, and wait for that as long as the patience lasts."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._ending.set()
        thread.join(self._patience)
        self._given_up = thread.is_alive()
        if not self._complete:
            self._warn(f"{self.name} did not take all of this run; the rest is sent when the run is resumed")

    def _follow(self, run: TrackedRun, ending: threading.Event, former: threading.Thread | None) -> None:
        if former is not None:
            former.join()  # the feed of an earlier `fit` finishes its run first
        position = _Position.load(self._folder / f"{self.name}.json", run.run_id, self._lines)
        tracker: Tracker | None = None
        failures = 0
        while True:
            last = ending.is_set()  # asked first: all lines of the run are there by then
            self._calling_since = self._clock()
            try:
                if tracker is None:
                    tracker = self._open(run)
                position.send(tracker)
                if last:
                    tracker.close()
                    self._complete = True
            except Exception as error:  # noqa: BLE001 - the edge of a thread that runs a tracker's own code
                if failures == 0 and not self._given_up:
                    reason = f"{type(error).__name__}: {redacted(str(error))}"[:_LONGEST_REASON]
                    self._warn(
                        f"{self.name} fails: {reason}; training goes on, and {self.name} gets what it misses from "
                        f"{self._lines.name} when it works again"
                    )
                failures += 1
            else:
                if failures and not self._given_up:
                    self._inform(f"{self.name} works again, and has all steps")
                failures = 0
            finally:
                self._calling_since = None
            if last:
                return
            ending.wait(min(_LONGEST_PAUSE, self._pause * 2 ** min(failures, 8)))


class _Position:
    """How far a tracker is: the end of the last line that it has, and the last step of each curve."""

    def __init__(self, file: Path, run_id: str, lines: Path) -> None:
        self._file = file
        self._run_id = run_id
        self._lines = lines
        self._offset = 0
        self._steps: dict[str, int] = {}

    @classmethod
    def load(cls, file: Path, run_id: str, lines: Path) -> _Position:
        """The position that a former process of the run saved; the beginning for another run."""
        position = cls(file, run_id, lines)
        with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            saved = json.loads(file.read_bytes())
            if saved["run_id"] == run_id:
                position._steps = {str(event): int(step) for event, step in saved["steps"].items()}
                # Steps decide what is sent, so the offset only saves time: in another file it is the beginning.
                position._offset = int(saved["offset"]) if saved["lines"] == lines.name else 0
        return position

    def send(self, tracker: Tracker) -> None:
        """Send what the file has gained."""
        with self._lines.open("rb") as opened:
            at_a_line = self._offset == 0
            if not at_a_line:
                opened.seek(self._offset - 1)
                at_a_line = opened.read(1) == b"\n"
            if not at_a_line:  # the file is a new one
                self._offset = 0
                opened.seek(0)
            offset, steps, waiting = self._offset, dict(self._steps), 0
            for line in opened:
                if not line.endswith(b"\n"):
                    break  # it is being written
                offset += len(line)
                point = self._point(line)
                if point is None or point.step <= steps.get(point.event, -1):
                    continue
                tracker.log(point)
                steps[point.event] = point.step
                waiting += 1
                if waiting == _BATCH:
                    tracker.flush()
                    self._save(offset, steps)
                    waiting = 0
        if waiting:
            tracker.flush()
        if offset != self._offset:
            self._save(offset, steps)

    def _point(self, line: bytes) -> Point | None:
        """The point in a line; None if it has none, is of another run, or was cut by a kill."""
        try:
            record = json.loads(line)
            if record["run_id"] != self._run_id:
                return None
            return point_of(record["event"], record, datetime.fromisoformat(record["time"]))
        except (ValueError, KeyError, TypeError):
            return None

    def _save(self, offset: int, steps: dict[str, int]) -> None:
        self._offset, self._steps = offset, dict(steps)
        saved = {"run_id": self._run_id, "lines": self._lines.name, "offset": offset, "steps": steps}
        fs = FileSystem()
        ensure_directory(fs, self._file.parent)
        # Not flushed to the disk, which would be slow here: a power cut costs a few steps that are sent twice.
        beside = self._file.with_suffix(".tmp")
        beside.write_text(json.dumps(saved), encoding="ascii")
        fs.rename(beside, self._file)
