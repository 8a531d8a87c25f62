"""One live line on a terminal: step, bar, loss, tokens per second, time left, memory."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, TextIO, TypeAlias, cast

from speedtronic.metrics.console import ConsoleSink, ConsoleStream
from speedtronic.metrics.lines import format_line, short_bytes, short_number
from speedtronic.metrics.records import TRAIN_STEP, Record

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

ProgressMode: TypeAlias = Literal["off", "auto", "on"]
PROGRESS_MODES: tuple[ProgressMode, ...] = ("off", "auto", "on")

_ENDS = frozenset({"train_end", "interrupted"})
_SECONDS_BETWEEN_FRAMES = 0.1
_LONGEST_ETA = 1e10  # seconds, three centuries


class ProgressSink:
    """Shows one live line while a run trains. Steps move the line; all other records appear above it.

    It needs a terminal that can move its cursor; elsewhere all records go to the console. With `auto`, there is no live
    line if the console's level hides ordinary lines; with `on`, there is. The thread that writes draws the frames, at
    most ten a second. A thread of its own could hold a lock while data workers are forked.

    Args:
        console: the sink for everything but live steps.
        mode: `auto` or `on`.
        clock: seconds, monotonic.
    """

    name = "console"

    def __init__(self, console: ConsoleSink, mode: ProgressMode, clock: Callable[[], float]) -> None:
        self._console = console
        self._mode = mode
        self._clock = clock
        self._live: Progress | None = None
        self._task: TaskID | None = None
        self._target = 0
        self._drawn_at = -math.inf

    def write(self, record: Record) -> None:
        # The end of a run ends the live line first, so that its last record is an ordinary line.
        if record.event in _ENDS:
            self.close()
        if self._live is None:
            self._console.write(record)
        elif record.event == TRAIN_STEP and _finite_number(record.payload, "step") is not None:
            self._move(record.payload)
        elif self._console.shows(record):
            self._live.console.print(format_line(record), markup=False, highlight=False, soft_wrap=True)
        # The record that starts a run is an ordinary line too, and the live line follows it.
        if record.event == "train_start" and self._live is None and self._wanted(record):
            self._start(record.payload)

    def close(self) -> None:
        """End the live line and show the terminal's cursor again."""
        if self._live is not None:
            live, self._live = self._live, None
            live.stop()

    def _wanted(self, record: Record) -> bool:
        """Whether to show the live line from this `train_start` on."""
        visible = self._console.is_terminal() and (self._mode == "on" or self._console.shows(record))
        return visible and all(_finite_number(record.payload, key) is not None for key in ("step", "target_steps"))

    def _start(self, payload: Mapping[str, Any]) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        # rich may replace `sys.stdout` by a stream that writes above the live line. The line itself needs the old one.
        stream = self._console.stream.target
        self._live = Progress(
            TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[numbers]}", markup=False),
            console=Console(file=cast("TextIO", ConsoleStream(stream))),
            auto_refresh=False,
            redirect_stdout=stream is sys.stdout,
            redirect_stderr=stream is sys.stdout and ConsoleStream(sys.stderr).isatty(),
        )
        self._target = payload["target_steps"]
        self._task = self._live.add_task("", total=self._target, completed=payload["step"], numbers="")
        self._live.start()

    def _move(self, payload: Mapping[str, Any]) -> None:
        assert self._live is not None
        assert self._task is not None
        steps_left = self._target - payload["step"]
        self._live.update(self._task, completed=payload["step"], numbers=_numbers(payload, steps_left))
        # Draw at most ten frames a second, and always the last one.
        now = self._clock()
        if now - self._drawn_at >= _SECONDS_BETWEEN_FRAMES or steps_left <= 0:
            self._drawn_at = now
            self._live.refresh()


def _numbers(payload: Mapping[str, Any], steps_left: float) -> str:
    """The text after the bar, from the numbers that the step has."""
    words = []
    if (loss := _finite_number(payload, "loss")) is not None:
        words.append(f"loss {loss:.4f}")
    if tokens_per_sec := _finite_number(payload, "tokens_per_sec"):
        words.append(f"{short_number(tokens_per_sec)} tok/s")
    steps_per_sec = _finite_number(payload, "steps_per_sec")
    if steps_per_sec and abs(seconds := steps_left / steps_per_sec) < _LONGEST_ETA:
        words.append(f"eta {timedelta(seconds=round(seconds))}")
    if peak_memory := _finite_number(payload, "peak_memory_bytes"):
        words.append(short_bytes(peak_memory))
    return "  ".join(words)


def _finite_number(payload: Mapping[str, Any], key: str) -> float | None:
    """A value to calculate with, or None: user code may emit an event with anything in it."""
    value = payload.get(key)
    return value if isinstance(value, int | float) and math.isfinite(value) else None
