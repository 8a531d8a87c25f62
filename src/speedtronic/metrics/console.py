"""Lines on a stream: the terminal, or whatever the output is piped into."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import TextIO

from speedtronic.metrics.lines import format_line
from speedtronic.metrics.records import Record

_FIXED_TERMINALS = ("dumb", "unknown")


class ConsoleSink:
    """One plain line per record at or above `level`.

    Args:
        stream: where to write; None means whatever `sys.stdout` is at that moment.
        level: records below it are not shown.
    """

    name = "console"

    def __init__(self, stream: TextIO | None, level: int) -> None:
        self._stream = stream
        self._level = level
        self._silenced = False

    @property
    def stream(self) -> TextIO:
        return sys.stdout if self._stream is None else self._stream

    def is_terminal(self) -> bool:
        """Whether the stream can move its cursor, so that a line can be redrawn."""
        return not self._silenced and self.stream.isatty() and os.environ.get("TERM") not in _FIXED_TERMINALS

    def shows(self, record: Record) -> bool:
        return record.level >= self._level

    def write(self, record: Record) -> None:
        if not self._silenced and self.shows(record):
            self._print(format_line(record) + "\n")

    def close(self) -> None:
        """The stream is not ours to close."""

    def _print(self, text: str) -> None:
        stream = self.stream
        try:
            _write_encodable(stream, text)
            stream.flush()
        except (BrokenPipeError, ValueError):
            # The reader has gone (`| head`) or the stream was closed: it will not come back.
            self._silenced = True
            _discard_buffer(stream)
        except OSError:
            # A full disk behind a redirection: this line is lost, the next may pass, and there is nowhere
            # to say so.
            return


def _write_encodable(stream: TextIO, text: str) -> None:
    try:
        stream.write(text)
    except UnicodeEncodeError as error:
        stream.write(text.encode(error.encoding, "backslashreplace").decode(error.encoding))


def _discard_buffer(stream: TextIO) -> None:
    """Let the interpreter's last flush go nowhere: on the broken pipe it would raise once more, at exit."""
    with suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(nowhere, stream.fileno())
        finally:
            os.close(nowhere)
