"""One live line on a terminal or in a notebook: step, bar, loss, speed, time left, memory, last checkpoint."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TextIO, TypeAlias, cast

from speedtronic.metrics.console import ConsoleSink, ConsoleStream
from speedtronic.metrics.lines import duration, short_bytes, short_number
from speedtronic.metrics.records import ENDS, TRAIN_START, TRAIN_STEP, Record

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

ProgressMode: TypeAlias = Literal["off", "auto", "on"]
PROGRESS_MODES: tuple[ProgressMode, ...] = ("off", "auto", "on")

_SECONDS_BETWEEN_FRAMES = 0.1
# Characters. A narrower terminal gets a shorter bar or none, and the last numbers are left out that have no room.
_LONG_BAR, _SHORT_BAR = 20, 6
_WIDE, _NARROW = 100, 60


class ProgressSink:
    """Shows one live line while a run trains. It moves with each step, and stands for the lines about steps.

    On a terminal all other records appear above it, and after a resize its next frame fits.

    It needs a terminal that can move its cursor, or a cell of a Jupyter notebook, where it is the first line; elsewhere
    all records go to the console. With `auto`, there is no live line if the console's level hides ordinary lines; with
    `on`, there is. The thread that writes draws the frames, at most ten a second. A thread of its own could hold a lock
    while data workers are forked.

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
        self._numbers: list[str] = []
        self._saved: str | None = None  # the last checkpoint
        self._drawn_at = -math.inf

    def write(self, record: Record) -> None:
        # The end of a run ends the live line first, so that its last record is an ordinary line.
        if record.event in ENDS:
            self.close()
        if self._live is None:
            self._console.write(record)
        elif record.event == TRAIN_STEP:
            if (step := _finite_number(record.payload, "step")) is not None:
                self._numbers = _numbers(record.payload)
                self.move_to(step)
        else:
            if record.event == "checkpoint" and record.payload.get("path") is not None:
                self._saved = f"saved {record.payload.get('step')}"
            self._draw(self._console.line(record) if self._console.shows(record) else None)
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
        self._numbers, self._saved = [], None
        stream = self._console.stream
        self._live = _NotebookLine(stream) if stream.is_notebook() else _TerminalLine(stream.target)

    def _draw(self, above: str | None = None) -> None:
        assert self._live is not None
        self._drawn_at = self._clock()
        # Rounded down: only the last step makes it 100%.
        share = min(int(100 * self._step / self._target), 100) if self._target > 0 else 100
        words = self._numbers if self._saved is None else [*self._numbers, self._saved]
        self._live.draw(f"step {self._step:.0f}/{self._target:.0f}", share, words, above)


class _TerminalLine:
    """The live line as the last one of a terminal."""

    def __init__(self, stream: TextIO | None) -> None:
        from rich.console import Console
        from rich.live import Live

        # rich may replace `sys.stdout` by a stream that writes above the live line. The line itself needs the old one.
        self._live = Live(
            console=Console(file=cast("TextIO", ConsoleStream(stream))),
            auto_refresh=False,
            redirect_stdout=stream is sys.stdout,
            redirect_stderr=stream is sys.stdout and ConsoleStream(sys.stderr).isatty(),
        )
        self._live.start()

    def draw(self, step: str, share: int, words: Sequence[str], above: str | None) -> None:
        if above is not None:
            self._live.console.print(above, markup=False, highlight=False, soft_wrap=True)
        self._live.update(self._frame(self._live.console.width, step, share, words), refresh=True)

    def stop(self) -> None:
        self._live.stop()

    def _frame(self, width: int, step: str, share: int, words: Sequence[str]) -> Table:
        """The line for a terminal of so many characters."""
        from rich.progress_bar import ProgressBar
        from rich.table import Column, Table

        percent = f"{share}%"
        bar = _LONG_BAR if width >= _WIDE else _SHORT_BAR if width >= _NARROW else 0
        # One character stays free: a full line would make some terminals begin another.
        room = width - 1 - len(step) - 1 - (bar + 1 if bar else 0) - len(percent)
        numbers = ""
        for word in words:
            if len(numbers) + 2 + len(word) > room:
                break
            numbers += f"  {word}"
        bars = [ProgressBar(100, share, width=bar)] if bar else []
        cells: list[RenderableType] = [step, *bars, percent + numbers]
        line = Table.grid(*(Column(no_wrap=True) for _ in cells), padding=(0, 1, 0, 0))
        line.add_row(*cells)
        return line


class _NotebookLine:
    """The live line as an output of its own in a cell of a notebook. Other lines follow below it."""

    def __init__(self, stream: ConsoleStream) -> None:
        from IPython.display import display

        self._stream = stream
        self._handle = display({"text/plain": ""}, raw=True, display_id=True)

    def draw(self, step: str, share: int, words: Sequence[str], above: str | None) -> None:
        if above is not None:
            self._stream.write(f"{above}\n")
            self._stream.flush()
        bar = "█" * (share // 5) + "░" * (20 - share // 5)
        self._handle.update({"text/plain": "  ".join([step, bar, f"{share}%", *words])}, raw=True)

    def stop(self) -> None:
        """The last frame stays."""


def _numbers(payload: Mapping[str, Any]) -> list[str]:
    """The words after the bar, the first ones first, from the numbers that the step has."""
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
    return words


def _first_of(payload: Mapping[str, Any], *keys: str) -> float | None:
    found = (_finite_number(payload, key) for key in keys)
    return next((value for value in found if value is not None), None)


def _finite_number(payload: Mapping[str, Any], key: str) -> float | None:
    """A value to calculate with, or None: user code may emit an event with anything in it."""
    value = payload.get(key)
    return value if isinstance(value, int | float) and math.isfinite(value) else None
