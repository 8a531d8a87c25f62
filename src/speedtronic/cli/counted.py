"""Files whose reading is counted, for a progress bar."""

from __future__ import annotations

from collections.abc import Callable
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING

from speedtronic.durable.files import FileSystem

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer


class CountedFileSystem(FileSystem):
    """Tells `count` how many bytes each read brought."""

    def __init__(self, count: Callable[[int], None]) -> None:
        self._count = count

    def open(self, path: Path) -> FileIO:
        with super().open(path):
            return _CountedFile(path, self._count)


class _CountedFile(FileIO):
    def __init__(self, path: Path, count: Callable[[int], None]) -> None:
        super().__init__(path, "rb")
        self._count = count

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        read = super().readinto(buffer)
        self._count(read)
        return read
