"""`MetricLogger`: sends every event of a run to the sinks and the hooks."""

from __future__ import annotations

import numbers
import os
import secrets
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Self, TextIO

from speedtronic.errors import ConfigError
from speedtronic.metrics.console import ConsoleSink
from speedtronic.metrics.events import event_level
from speedtronic.metrics.hooks import HookThread, hook_name
from speedtronic.metrics.jsonl import JsonlSink
from speedtronic.metrics.progress import PROGRESS_MODES, ProgressMode, ProgressSink
from speedtronic.metrics.records import (
    ENDS,
    ERROR,
    INFO,
    LEVELS,
    LOG,
    TRAIN_START,
    TRAIN_STEP,
    WARNING,
    Hook,
    Record,
    Sink,
    TrainingHook,
    plain_payload,
)
from speedtronic.metrics.textfile import TextFileSink


def _utc_now() -> datetime:
    return datetime.now(UTC)


class MetricLogger:
    """Sends events to the console, a text file, a JSON-lines file, a progress line and hooks. It never ends a run.

    A `train_step` event reaches the sinks only if its `step` is a multiple of `every_steps`, or the last one of a run,
    however that ends; other events always do. Hooks get every event, each hook on its own thread, and may hear of a
    step late: what must act between two steps is a callback of the trainer. `HookThread` says how long training waits
    for a slow hook. If a file cannot be written (a full disk), the console says so once, and each record tries again.
    After its pipe is closed, the console is silent. Safe to use from several threads.

    Attributes:
        every_steps: the cadence.
        hooks: the hooks that get every event.
        run_id: stands in every JSON line. A `Trainer` with a checkpoint manager makes it that of the checkpoints.

    Args:
        level: the lowest level that console and text file show: DEBUG, INFO, WARNING, ERROR or CRITICAL. It does not
            filter the JSON lines and the hooks.
        file: a text file to append the console's lines to, with time and level.
        json_file: a file to append one strict JSON object for each event to.
        every_steps: cadence of `train_step` on the sinks, at least 1.
        stream: where console lines go; None means the `sys.stdout` of each moment.
        hooks: callables `(event, payload)` or objects with `on_event(event, payload)`.
        progress: a live line on a terminal: `off`, `auto` (unless `level` hides ordinary lines) or `on`.
        fields: what a line about a step shows, in this order; without it step, loss, lr, rate and gradient norm.
        hook_patience: seconds that training waits for each hook in all, besides a twentieth of the time that passes.
        run_id: the id of the run; a random one without it.
        clock: monotonic seconds, for `elapsed_s`.
        now: the time in UTC.

    Raises:
        ConfigError: an unknown level or progress mode, a cadence below 1, or a file that cannot be opened.
        TypeError: a hook that is neither callable nor has `on_event`.
    """

    def __init__(
        self,
        level: str = "INFO",
        file: str | os.PathLike[str] | None = None,
        json_file: str | os.PathLike[str] | None = None,
        every_steps: int = 1,
        stream: TextIO | None = None,
        hooks: Iterable[Hook] | None = None,
        *,
        progress: ProgressMode = "off",
        fields: Sequence[str] | None = None,
        hook_patience: float = 2.0,
        run_id: str | None = None,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = _utc_now,
    ) -> None:
        threshold = LEVELS.get(level.upper())
        if threshold is None:
            raise ConfigError(f"logging.level: must be one of {', '.join(LEVELS)}, got {level!r}")
        if every_steps < 1:
            raise ConfigError(f"logging.every_steps: must be at least 1, got {every_steps}")
        if progress not in PROGRESS_MODES:
            raise ConfigError(f"logging.progress: must be one of {', '.join(PROGRESS_MODES)}, got {progress!r}")
        self.every_steps = every_steps
        # Not from the seeded generators: two runs of one seed are two runs.
        self.run_id = run_id if run_id is not None else secrets.token_hex(16)
        self._clock = clock
        self._now = now
        self._started = clock()
        # Re-entrant: a signal handler, or a warning raised while a record is written, may log on the same thread.
        self._lock = threading.RLock()
        console = ConsoleSink(stream, threshold, fields)
        self._progress = None if progress == "off" else ProgressSink(console, progress, clock)
        self._console: Sink = self._progress or console
        self._sinks: list[Sink] = [self._console]
        if file is not None:
            self._sinks.append(_open_sink("file", file, lambda path: TextFileSink(path, threshold, fields)))
        if json_file is not None:
            self._sinks.append(_open_sink("json_file", json_file, JsonlSink))
        self._feeds: list[Sink] = []
        self._failing: set[str] = set()
        self._target: object = None  # the last step of the run, if `train_start` has told it
        self._held: Record | None = None  # the last step, where the cadence keeps it from the sinks
        self.hooks: list[Hook] = []
        self._hook_patience = hook_patience
        self._hook_threads: dict[int, HookThread] = {}
        self._hooks_explained: set[int] = set()
        for hook in hooks or ():
            self.add_hook(hook)

    def add_hook(self, hook: Hook) -> None:
        """Send every event to `hook` from now on.

        Raises:
            TypeError: it is neither callable nor has `on_event`.
        """
        if not isinstance(hook, TrainingHook) and not callable(hook):
            raise TypeError(f"a hook is a callable or has on_event(event, payload); got {type(hook).__name__}")
        self.hooks.append(hook)

    def add_feed(self, feed: Sink) -> None:
        """Tell `feed` of every record, after the files have it. It may log while it is closed."""
        self._feeds.append(feed)

    def emit(self, event: str, payload: Mapping[str, Any] | None = None) -> None:
        """Write one event to the sinks, then tell the hooks.

        Scalars of tensors and arrays are read here. A value that no sink could write becomes text.
        """
        payload = payload or {}
        if event == TRAIN_STEP and not self._is_due(payload):
            # Its values are made plain only if it turns out to be the last one.
            self._held = Record(event, event_level(event), payload, self._clock() - self._started, self._now())
        else:
            if event == TRAIN_STEP:
                self._held = None
            elif event == TRAIN_START or event in ENDS:
                self.log_last_step()
                self._target = payload.get("target_steps") if event == TRAIN_START else None
            self._write(event, event_level(event), payload)
        for hook in self.hooks:
            with self._lock:
                # By id, because a hook need not be hashable. The entry keeps its hook, so no other gets the same id.
                if id(hook) not in self._hook_threads:
                    self._hook_threads[id(hook)] = HookThread(
                        hook, patience=self._hook_patience, failed=self._hook_failed, warn=self.warning
                    )
                thread = self._hook_threads[id(hook)]
            thread.tell(event, dict(payload))

    def show_step(self, step: int) -> None:
        """Move the progress line to a step that is done, before its numbers are known. It is no event."""
        if self._progress is not None:
            with self._lock:
                self._progress.move_to(step)

    def log_last_step(self) -> None:
        """Write the step that was emitted last, if the cadence has kept it from the sinks: no other follows it."""
        held, self._held = self._held, None
        if held is not None:
            self._write_record(held._replace(payload=plain_payload(held.payload)))

    def info(self, message: str) -> None:
        self._log(INFO, message)

    def warning(self, message: str) -> None:
        self._log(WARNING, message)

    def error(self, message: str) -> None:
        self._log(ERROR, message)

    def close(self) -> None:
        """Wait for slow hooks and trackers, end the progress line, close the files.

        A second call does no harm. A later event opens everything again.
        """
        for thread in list(self._hook_threads.values()):
            thread.close()
        self.log_last_step()
        for feed in self._feeds:
            feed.close()  # without the lock, which the thread of the feed needs for its last messages
        with self._lock:
            for sink in self._sinks:
                sink.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _log(self, level: int, message: str) -> None:
        name = next(name for name, number in LEVELS.items() if number == level)
        self._write(LOG, level, {"level": name, "message": message})

    def _is_due(self, payload: Mapping[str, Any]) -> bool:
        """Whether the sinks get this step now."""
        step = payload.get("step", 0)
        # A step that is not a number is shown: the sender may have a reason for it.
        return not isinstance(step, numbers.Real) or step % self.every_steps == 0 or step == self._target

    def _write(self, event: str, level: int, payload: Mapping[str, Any]) -> None:
        self._write_record(self._record(event, level, payload))

    def _write_record(self, record: Record) -> None:
        with self._lock:
            for sink in (*self._sinks, *self._feeds):
                self._write_to(sink, record)

    def _record(self, event: str, level: int, payload: Mapping[str, Any]) -> Record:
        return Record(
            event=event,
            level=level,
            payload=plain_payload(payload),
            elapsed_s=self._clock() - self._started,
            time=self._now(),
            run_id=self.run_id,
        )

    def _write_to(self, sink: Sink, record: Record) -> None:
        try:
            sink.write(record)
        except OSError as error:
            # Say it once on the console, until the sink works again.
            if sink.name not in self._failing and sink is not self._console:
                self._failing.add(sink.name)
                reason = error.strerror or str(error)
                message = f"cannot write to {sink.name}: {reason}; training goes on, but this file will miss lines"
                self._write_to(self._console, self._record(LOG, WARNING, {"level": "WARNING", "message": message}))
        else:
            self._failing.discard(sink.name)

    def _hook_failed(self, hook: Hook, event: str, error: BaseException) -> None:
        message = f"hook {hook_name(hook)} failed on {event}: {type(error).__name__}: {error}"
        if id(hook) not in self._hooks_explained:
            self._hooks_explained.add(id(hook))
            message += "\n" + "".join(traceback.format_exception(error)).rstrip()
        self.warning(message)


def _open_sink(key: str, path: str | os.PathLike[str], open_path: Callable[[str | os.PathLike[str]], Sink]) -> Sink:
    try:
        return open_path(path)
    except OSError as error:
        raise ConfigError(f"logging.{key}: cannot write to {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise ConfigError(f"logging.{key}: cannot write to {str(path)!r}: {error}") from error
