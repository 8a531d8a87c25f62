"""The console's lines, with time and level, in a file."""

from __future__ import annotations

import os
from collections.abc import Sequence

from speedtronic.metrics.appendfile import AppendFile
from speedtronic.metrics.lines import LineFormat
from speedtronic.metrics.records import LEVELS, Record

_LEVEL_NAMES = {number: name for name, number in LEVELS.items()}


class TextFileSink:
    """Appends one line for each record at or above `level`: `2026-01-31T12:00:00+00:00 INFO step 1  loss 5.5452`.

    `fields` are those of a step's line.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, path: str | os.PathLike[str], level: int, fields: Sequence[str] | None = None) -> None:
        self._file = AppendFile(path)
        self._level = level
        self._format = LineFormat(fields)

    @property
    def name(self) -> str:
        return str(self._file.path)

    def write(self, record: Record) -> None:
        if record.level >= self._level:
            time = record.time.isoformat(timespec="seconds")
            line = f"{time} {_LEVEL_NAMES[record.level]} {self._format.line(record)}"
            self._file.write_line(line.encode("utf-8", "backslashreplace"))

    def close(self) -> None:
        self._file.close()
