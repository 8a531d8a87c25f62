"""A file that only grows, by whole lines, without a buffer."""

from __future__ import annotations

import errno
import io
import os
from pathlib import Path


class AppendFile:
    """Appends lines, one unbuffered write for each. So a killed process loses at most the line it was writing.

    The file and its folders are made at once. After `close` or a failure, the next line opens the file again.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._file: io.FileIO | None = None
        self._mid_line = False
        self.path = Path(path).absolute()
        self._open()

    def write_line(self, line: bytes) -> None:
        """Append `line` (without newline).

        Raises:
            OSError: not all of the line could be written. The next line then starts with a newline.
        """
        file = self._file or self._open()
        data = b"\n" + line + b"\n" if self._mid_line else line + b"\n"
        written = file.write(data) or 0  # None if a pipe is full and does not block
        if written:
            self._mid_line = written < len(data)
        if written < len(data):
            raise OSError(errno.ENOSPC, "only a part of the line could be written", str(self.path))

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def __del__(self) -> None:
        # A logger that is dropped without `close` has nothing left to write: there is no buffer.
        self.close()

    def _open(self) -> io.FileIO:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # Open for writing only: a process that also holds the reading end of a pipe never learns that the reader left.
        self._file = file = io.FileIO(self.path, "a")
        self._mid_line = file.seekable() and _ends_mid_line(self.path)
        return file


def _ends_mid_line(path: Path) -> bool:
    """Whether a former writer was killed in the middle of a line."""
    with io.FileIO(path) as file:
        if file.seek(0, os.SEEK_END) == 0:
            return False
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"
