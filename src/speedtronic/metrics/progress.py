"""One live line on a terminal or in a notebook: step, bar, loss, tokens per second, time left, memory."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TextIO, TypeAlias, cast

from speedtronic.metrics.console import ConsoleSink, ConsoleStream
from speedtronic.metrics.lines import duration, short_bytes, short_number
from speedtronic.metrics.records import ENDS, TRAIN_START, TRAIN_STEP, Record

ProgressMode: TypeAlias = Literal["off", "auto", "on"]
PROGRESS_MODES: tuple[ProgressMode, ...] = ("off", "auto", "on")

_SECONDS_BETWEEN_FRAMES = 0.1
_WIDE = 100  # characters; a narrower terminal gets a shorter bar, so that the numbers after it are not cut off


class ProgressSink:
    """Shows one live line while a run trains. It moves with each step, and all records appear above it.

    It needs a terminal that can move its cursor, or a cell of a Jupyter notebook, where it is the first line; elsewhere
    all records go to the console. With `auto`, there is no live line if the console's level hides ordinary lines; with
    `on`, there is. The thread that writes draws the frames, at most ten a second, and lines about steps wait for the
    next frame. A thread of its own could hold a lock while data workers are forked.

    Args:
        console: the sink for everything but the live line.
        mode: `auto` or `on`.
        clock: seconds, monotonic.
    """

    name = "console"

    def __init__(self, console: ConsoleSink, mode: ProgressMode, clock: Callable[[], float]) -> None:
        self._console = console
        self._mode = mode
        self._clock = clock
        self._live: _TerminalLine | _NotebookLine | None = None
        self._target: float = 0
        self._step: float = 0
        self._numbers = ""
        self._above: list[str] = []  # lines that wait for the next frame
        self._drawn_at = -math.inf

    def write(self, record: Record) -> None:
        # The end of a run ends the live line first, so that its last record is an ordinary line.
        if record.event in ENDS:
            self.close()
        if self._live is None:
            self._console.write(record)
        else:
            if self._console.shows(record):
                self._above.append(self._console.line(record))
            if record.event != TRAIN_STEP:
                self._draw()
            elif (step := _finite_number(record.payload, "step")) is not None:
                self._numbers = _numbers(record.payload)
                self.move_to(step)
        # The record that starts a run is an ordinary line too, and the live line follows it.
        if record.event == TRAIN_START and self._live is None and self._wanted(record):
            self._start(record.payload)

    def move_to(self, step: float) -> None:
        """Move the live line, if there is one, to a step that is done. Its numbers may come later."""
        if self._live is None:
            return
        self._step = max(self._step, step)
        # Draw at most ten frames a second, and always the last one.
        if self._clock() - self._drawn_at >= _SECONDS_BETWEEN_FRAMES or self._step >= self._target:
            self._draw()

    def close(self) -> None:
        """End the live line and show the terminal's cursor again."""
        if self._live is not None:
            self._draw()
            live, self._live = self._live, None
            live.stop()

    def _wanted(self, record: Record) -> bool:
        """Whether to show the live line from this `train_start` on."""
        possible = self._console.is_terminal() or self._console.stream.is_notebook()
        visible = possible and (self._mode == "on" or self._console.shows(record))
        return visible and all(_finite_number(record.payload, key) is not None for key in ("step", "target_steps"))

    def _start(self, payload: Mapping[str, Any]) -> None:
        self._target, self._step = payload["target_steps"], payload["step"]
        self._numbers = ""
        stream = self._console.stream
        self._live = _NotebookLine(stream) if stream.is_notebook() else _TerminalLine(stream.target, self._target)

    def _draw(self) -> None:
        assert self._live is not None
        self._drawn_at = self._clock()
        # Rounded down: only the last step makes it 100%.
        share = min(int(100 * self._step / self._target), 100) if self._target > 0 else 100
        lines, self._above = self._above, []
        self._live.draw(self._step, self._target, share, self._numbers, lines)


class _TerminalLine:
    """The live line as the last one of a terminal."""

    def __init__(self, stream: TextIO | None, target: float) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        # rich may replace `sys.stdout` by a stream that writes above the live line. The line itself needs the old one.
        console = Console(file=cast("TextIO", ConsoleStream(stream)))
        self._progress = Progress(
            TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
            BarColumn(bar_width=20 if console.width >= _WIDE else 6),
            TextColumn("{task.fields[numbers]}", markup=False),
            console=console,
            auto_refresh=False,
            redirect_stdout=stream is sys.stdout,
            redirect_stderr=stream is sys.stdout and ConsoleStream(sys.stderr).isatty(),
        )
        self._task = self._progress.add_task("", total=target, numbers="")
        self._progress.start()

    def draw(self, step: float, target: float, share: int, numbers: str, lines: Sequence[str]) -> None:
        self._progress.update(self._task, completed=step, numbers=f"{share}%  {numbers}")
        if lines:
            self._progress.console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)
        self._progress.refresh()

    def stop(self) -> None:
        self._progress.stop()


class _NotebookLine:
    """The live line as an output of its own in a cell of a notebook. Other lines follow below it."""

    def __init__(self, stream: ConsoleStream) -> None:
        from IPython.display import display

        self._stream = stream
        self._handle = display({"text/plain": ""}, raw=True, display_id=True)

    def draw(self, step: float, target: float, share: int, numbers: str, lines: Sequence[str]) -> None:
        if lines:
            self._stream.write("".join(f"{line}\n" for line in lines))
            self._stream.flush()
        bar = "█" * (share // 5) + "░" * (20 - share // 5)
        text = f"step {step:.0f}/{target:.0f}  {bar}  {share}%  {numbers}"
        self._handle.update({"text/plain": text}, raw=True)

    def stop(self) -> None:
        """The last frame stays."""


def _numbers(payload: Mapping[str, Any]) -> str:
    """The text after the bar, from the numbers that the step has."""
    words = []
    if (loss := _first_of(payload, "interval_loss", "loss")) is not None:
        words.append(f"loss {loss:.4f}")
    if tokens_per_sec := _first_of(payload, "interval_tokens_per_sec", "tokens_per_sec"):
        words.append(f"{short_number(tokens_per_sec)} tok/s")
    elif samples_per_sec := _first_of(payload, "interval_samples_per_sec", "samples_per_sec"):
        words.append(f"{short_number(samples_per_sec)} samples/s")
    if (eta := _finite_number(payload, "eta_s")) is not None:
        words.append(f"eta {duration(eta)}")
    if peak_memory := _finite_number(payload, "peak_memory_bytes"):
        words.append(short_bytes(peak_memory))
    return "  ".join(words)


def _first_of(payload: Mapping[str, Any], *keys: str) -> float | None:
    found = (_finite_number(payload, key) for key in keys)
    return next((value for value in found if value is not None), None)


def _finite_number(payload: Mapping[str, Any], key: str) -> float | None:
    """A value to calculate with, or None: user code may emit an event with anything in it."""
    value = payload.get(key)
    return value if isinstance(value, int | float) and math.isfinite(value) else None
