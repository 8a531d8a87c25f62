"""Arrays in files that are read at any position, within a bound on the memory that they take."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from io import FileIO
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from speedtronic.errors import DataError

MOST_RESIDENT = 256 * 2**20
"""Bytes of one set of files that the process may come to hold in memory."""

UnsignedArray = npt.NDArray[np.unsignedinteger[Any]]

_lock = threading.Lock()


def seek_and_read(descriptor: int, size: int, position: int) -> bytes:
    """What `os.pread` does, where the system lacks it: bytes from a position, fewer at the end of the file."""
    with _lock:
        os.lseek(descriptor, position, os.SEEK_SET)
        return os.read(descriptor, size)


_read_at: Callable[[int, int, int], bytes] = getattr(os, "pread", seek_and_read)


class FileArray:
    """The numbers in a file as an array of one dimension, of which each slice is read when it is asked for.

    Nothing is mapped into memory: for one byte that is touched in a map, a kernel may count a megabyte or more as the
    process's own, and does not say how much. A slice costs one system call instead.

    Args:
        file: opened without a buffer; it may be closed, since the array keeps a descriptor of its own.
        dtype: of the numbers, little-endian.
        entries: how many there are.
        offset: where the first one lies, in bytes.
    """

    def __init__(self, file: FileIO, dtype: np.dtype[np.unsignedinteger[Any]], entries: int, offset: int = 0) -> None:
        self._name = file.name
        self._descriptor = os.dup(file.fileno())
        self._dtype = dtype
        self._entries = entries
        self._offset = offset
        weakref.finalize(self, os.close, self._descriptor)

    def __len__(self) -> int:
        return self._entries

    @overload
    def __getitem__(self, key: int) -> int: ...

    @overload
    def __getitem__(self, key: slice) -> UnsignedArray: ...

    def __getitem__(self, key: int | slice) -> int | UnsignedArray:
        """One number, or those of a slice without a step.

        Raises:
            DataError: the disk failed, or the file was shortened after it was opened.
        """
        if isinstance(key, slice):
            start, stop, _ = key.indices(self._entries)
            return np.frombuffer(self._read(start, max(stop - start, 0)), self._dtype)
        return int.from_bytes(self._read(key, 1), "little")

    def _read(self, start: int, entries: int) -> bytes:
        size, position = entries * self._dtype.itemsize, self._offset + start * self._dtype.itemsize
        try:
            data = _read_at(self._descriptor, size, position)
            while len(data) < size:  # a signal, or a limit of the system on one read
                more = _read_at(self._descriptor, size - len(data), position + len(data))
                if not more:
                    raise DataError(f"{self._name}: the file was shortened while it was in use")
                data += more
        except OSError as error:
            raise DataError(f"{self._name}: cannot be read: {error.strerror or error}") from error
        return data


def array_in_file(
    file: FileIO, dtype: np.dtype[np.unsignedinteger[Any]], entries: int, offset: int = 0, *, mapped: bool
) -> UnsignedArray | FileArray:
    """The numbers in a file, of which any slice costs the same.

    Args:
        file, dtype, entries, offset: as for `FileArray`.
        mapped: whether the file may be held in memory. Then the array is a memory map, which is faster: reading it
            beyond the end of a file that was shortened ends the process.
    """
    if not mapped:
        return FileArray(file, dtype, entries, offset)
    if not entries:
        return np.empty(0, dtype)
    # A plain array: slicing numpy's memmap class costs several times more.
    return np.asarray(np.memmap(file, dtype, mode="r", offset=offset, shape=(entries,)))
