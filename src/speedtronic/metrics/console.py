"""Lines on a stream: a terminal, a pipe or a file."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import TextIO

from speedtronic.metrics.lines import LineFormat
from speedtronic.metrics.records import Record

_FIXED_TERMINALS = ("dumb", "unknown")


class ConsoleStream:
    """A text stream that never raises: a console that fails must not end a run.

    Characters that the encoding lacks are escaped. Once a stream is gone (a closed pipe, file or terminal), nothing
    more is written to it. After any other failure, such as a full disk behind a redirection, the text is lost, because
    there is no other place to report it.

    Args:
        stream: where to write; None means the `sys.stdout` of each moment, which may be None too.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        self._gone = False

    @property
    def target(self) -> TextIO | None:
        return sys.stdout if self._stream is None else self._stream

    @property
    def encoding(self) -> str | None:
        return self.target.encoding if self.target is not None else None

    def isatty(self) -> bool:
        with suppress(OSError, ValueError):
            return not self._gone and self.target is not None and self.target.isatty()
        return False

    def is_notebook(self) -> bool:
        """Whether this is the output of a cell in Jupyter, which no cursor moves in but which can change in place."""
        return type(self.target).__module__ == "ipykernel.iostream"

    def write(self, text: str) -> int:
        self._attempt(lambda target: _write_encodable(target, text))
        return len(text)

    def flush(self) -> None:
        self._attempt(lambda target: target.flush())

    def _attempt(self, act: Callable[[TextIO], None]) -> None:
        target = self.target
        if target is None or self._gone:
            return
        try:
            act(target)
        except (BrokenPipeError, ValueError):
            # The reader has closed the pipe, or the file was closed.
            self._gone = True
            _discard_buffer(target)
        except OSError as error:
            if error.errno == errno.EIO:  # the terminal was closed
                self._gone = True
                _discard_buffer(target)


class ConsoleSink:
    """One plain line per record at or above `level`.

    Args:
        stream: where to write; None means the `sys.stdout` of each moment.
        level: records below it are not shown.
    """

    name = "console"

    def __init__(self, stream: TextIO | None, level: int) -> None:
        self.stream = ConsoleStream(stream)
        self._level = level
        self._format = LineFormat()

    def is_terminal(self) -> bool:
        """Whether the stream can move its cursor, and so draw a line again."""
        return self.stream.isatty() and os.environ.get("TERM") not in _FIXED_TERMINALS

    def shows(self, record: Record) -> bool:
        return record.level >= self._level

    def line(self, record: Record) -> str:
        return self._format.line(record)

    def write(self, record: Record) -> None:
        if self.shows(record):
            self.stream.write(self.line(record) + "\n")
            self.stream.flush()

    def close(self) -> None:
        """Do nothing: the stream belongs to the caller."""


def _write_encodable(stream: TextIO, text: str) -> None:
    try:
        stream.write(text)
    except UnicodeEncodeError as error:
        stream.write(text.encode(error.encoding, "backslashreplace").decode(error.encoding))


def _discard_buffer(stream: TextIO) -> None:
    """Redirect the stream to nowhere: at exit, Python flushes it, and on the broken pipe that would raise again."""
    with suppress(OSError, ValueError):
        devnull = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(devnull, stream.fileno())
        finally:
            os.close(devnull)
