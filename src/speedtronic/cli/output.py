"""What a command shows: its standard output, facts, tables and progress, and what SIGTERM and SIGHUP do meanwhile."""

from __future__ import annotations

import io
import logging
import math
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from io import FileIO
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Protocol, TextIO, cast

from speedtronic.durable.files import FileSystem
from speedtronic.errors import SpeedtronicError, SpeedtronicWarning

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer
    from rich.console import RenderableType
    from rich.progress import TaskID

    from speedtronic.data.prepare.prepare import Progress
    from speedtronic.metrics.console import ConsoleStream

_SECONDS_BETWEEN_LINES = 10.0
_SECONDS_BETWEEN_FRAMES = 0.1
_WORTH_SHOWING = 256 * 10**6  # bytes; less is read before a person wonders


# ---------------------------------------------------------------------- standard output


class OutputError(SpeedtronicError):
    """The standard output cannot be written to."""


def prepare() -> None:
    """Make whatever is printed from here on printable.

    Without a standard output it goes nowhere, and a character that the encoding lacks is escaped. What our own modules
    warn of, or a library logs, looks like any other warning.
    """
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(logging.Formatter("warning: %(message)s"))
    warnings.formatwarning = _format_warning
    if sys.stdout is None:  # as it is when the shell closed it: `>&-`
        # Also keeps the descriptor of the standard output from becoming that of the next file that is opened.
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - open as long as the process
    elif isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


_pythons_format = warnings.formatwarning


def _format_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    if issubclass(category, SpeedtronicWarning):
        return f"warning: {message}\n"
    return _pythons_format(message, category, filename, lineno, line)


def warn(message: str) -> None:
    """Print a warning to the standard error."""
    print(f"warning: {message}", file=sys.stderr)


def write(text: str) -> None:
    """Write to the standard output at once.

    Raises:
        BrokenPipeError: the reader is gone.
        OutputError: it cannot be written for another reason, such as a full disk.
    """
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputError(f"cannot write to the standard output: {error.strerror or error}") from error


def finish() -> None:
    """Write what was printed and not written yet. Raises as `write` does."""
    write("")


def abandon() -> None:
    """Discard what could not be written: the interpreter would try, and complain, once more at exit."""
    with suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(nowhere, sys.stdout.fileno())
        finally:
            os.close(nowhere)


def printable(text: str) -> str:
    """Replace what is not printable: text from a file must not steer the terminal."""
    return "".join(character if character.isprintable() else "\ufffd" for character in text)


# ---------------------------------------------------------------------- facts and tables


def write_facts(facts: Iterable[tuple[str, str]]) -> None:
    """Write names with their values: a table on a terminal, plain lines elsewhere. Raises as `write` does."""
    if not sys.stdout.isatty():
        write("".join(f"{name}: {value}\n" for name, value in facts))
        return
    from rich.table import Table

    table = Table(show_header=False)
    for name, value in facts:
        table.add_row(name, value)
    _write_rendered(table)


def write_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Write rows under their headings: framed on a terminal, plain columns elsewhere. Raises as `write` does."""
    if not sys.stdout.isatty():
        widths = [max(map(len, column)) for column in zip(headings, *rows, strict=True)]
        lines = [
            "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
            for row in (headings, *rows)
        ]
        write("\n".join(lines) + "\n")
        return
    from rich.table import Table
    from rich.text import Text

    table = Table()
    for heading in headings:
        table.add_column(Text(heading))
    for row in rows:
        table.add_row(*map(Text, row))
    _write_rendered(table)


def write_dimmed(pieces: Iterable[tuple[str, bool]]) -> None:
    """Write pieces of a text to a terminal, those dimmed that are not flagged. Raises as `write` does."""
    from rich.text import Text

    _write_rendered(Text.assemble(*((text, "" if flagged else "dim") for text, flagged in pieces)))


def _write_rendered(rendered: RenderableType) -> None:
    from rich.console import Console

    console = Console(markup=False, highlight=False)
    with console.capture() as captured:  # so that a failure to write is ours to report
        console.print(rendered)
    write(captured.get())


def counted(number: int, noun: str) -> str:
    """`1 file`, `2 files`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def age(seconds: float) -> str:
    """A duration in its largest unit: `5s`, `12m`, `3h`, `2d`."""
    for length, letter in ((86400, "d"), (3600, "h"), (60, "m")):
        if seconds >= length:
            return f"{int(seconds // length)}{letter}"
    return f"{max(0, int(seconds))}s"


# ---------------------------------------------------------------------- progress


@contextmanager
def reading_progress(label: str, size: int) -> Iterator[FileSystem]:
    """A file system whose reads move a bar, on a terminal and when reading takes a while.

    Args:
        label: the text before the bar.
        size: how much will be read, in bytes.
    """
    if size < _WORTH_SHOWING or sys.stderr is None or not sys.stderr.isatty():
        yield FileSystem()
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    with Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
        redirect_stdout=sys.stdout.isatty(),
    ) as progress:
        task = progress.add_task(label, total=size)
        yield CountingFileSystem(lambda count: progress.advance(task, count))


class CountingFileSystem(FileSystem):
    """Tells `count` how many bytes each read returned."""

    def __init__(self, count: Callable[[int], None]) -> None:
        self._count = count

    def open(self, path: Path) -> FileIO:
        with super().open(path):  # refuses what is not a plain file
            return _CountingFile(path, self._count)


class _CountingFile(FileIO):
    def __init__(self, path: Path, count: Callable[[int], None]) -> None:
        super().__init__(path, "rb")
        self._count = count

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        read = super().readinto(buffer)
        self._count(read)
        return read


class PreparationProgress(Protocol):
    """Shows how far `data prepare` is. It never fails: showing must not end the work."""

    def show(self, progress: Progress) -> None:
        """Show how far it is."""

    def close(self) -> None:
        """Leave the terminal as it was."""


def preparation_progress(clock: Callable[[], float]) -> PreparationProgress:
    """A bar on a terminal, a line now and then elsewhere.

    Args:
        clock: seconds, monotonic.
    """
    from speedtronic.metrics.console import ConsoleStream

    stream = ConsoleStream(None)
    return _ProgressBar(stream, clock) if stream.isatty() else _ProgressLines(stream, clock)


class _ProgressLines:
    """`encoding: 1.2 GB of 5.0 GB, 24.0 MB/s, 0:02:38 left`, at most every ten seconds."""

    def __init__(self, stream: ConsoleStream, clock: Callable[[], float]) -> None:
        self._stream = stream
        self._clock = clock
        self._shown_at = clock()
        self._stage = ""
        self._started_at = 0.0
        self._started_with = 0

    def show(self, progress: Progress) -> None:
        from speedtronic.metrics.lines import short_bytes

        now = self._clock()
        if progress.stage != self._stage:
            self._stage, self._started_at, self._started_with = progress.stage, now, progress.done
        if now - self._shown_at < _SECONDS_BETWEEN_LINES:
            return
        self._shown_at = now
        words = [f"{progress.stage}: {short_bytes(progress.done)} of {short_bytes(progress.total)}"]
        # The speed is that of this stage and this process: work of an interrupted one does not count.
        done, seconds = progress.done - self._started_with, now - self._started_at
        if done > 0 and seconds > 0:
            left = timedelta(seconds=round((progress.total - progress.done) * seconds / done))
            words += [f"{short_bytes(done / seconds)}/s", f"{left} left"]
        self._stream.write(", ".join(words) + "\n")
        self._stream.flush()

    def close(self) -> None:
        pass


class _ProgressBar:
    """A live line. It is drawn by the thread that calls, at most ten times a second."""

    def __init__(self, stream: ConsoleStream, clock: Callable[[], float]) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
        from rich.progress import TransferSpeedColumn as SpeedColumn

        self._clock = clock
        self._drawn_at = -math.inf
        self._stage = ""
        self._task: TaskID | None = None
        self._live = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            DownloadColumn(),
            SpeedColumn(),
            TimeRemainingColumn(),
            console=Console(file=cast("TextIO", stream)),
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
            transient=True,
            get_time=clock,
        )
        self._live.start()

    def show(self, progress: Progress) -> None:
        if self._task is None or progress.stage != self._stage:
            if self._task is not None:
                self._live.remove_task(self._task)
            self._stage = progress.stage
            # It starts with what is done already, so that the speed counts from here.
            self._task = self._live.add_task(progress.stage, total=progress.total, completed=progress.done)
        self._live.update(self._task, completed=progress.done)
        now = self._clock()
        if now - self._drawn_at >= _SECONDS_BETWEEN_FRAMES:
            self._drawn_at = now
            self._live.refresh()

    def close(self) -> None:
        self._live.stop()


# ---------------------------------------------------------------------- interrupts


@contextmanager
def termination_unwinds() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end the process by an exception, so that half-written files are removed on the way out."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may install a handler
        return
    asked = [signal.SIGTERM] if sys.platform == "win32" else [signal.SIGTERM, signal.SIGHUP]
    # A signal that the process ignores, as under `nohup`, stays ignored.
    watched = [number for number in asked if signal.getsignal(number) is not signal.SIG_IGN]

    def stop(number: int, frame: FrameType | None) -> None:
        for other in watched:
            signal.signal(other, signal.SIG_IGN)  # a second one must not interrupt the removal
        raise SystemExit(128 + number)

    previous = {number: signal.signal(number, stop) for number in watched}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
