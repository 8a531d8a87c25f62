"""A slice of an array in a file is what numpy makes of the whole file."""

from __future__ import annotations

import errno
import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from speedtronic.data import file_array
from speedtronic.data.file_array import FileArray, array_in_file, seek_and_read
from speedtronic.errors import DataError

Read = Callable[[int, int, int], bytes]


def short_reads(descriptor: int, size: int, position: int) -> bytes:
    return os.pread(descriptor, min(size, 5), position)


def opened(path: Path, values: np.ndarray[Any, Any], *, mapped: bool = False) -> Any:
    path.write_bytes(b"head" + values.tobytes())
    with path.open("rb", buffering=0) as file:
        return array_in_file(file, values.dtype, len(values), 4, mapped=mapped)


@pytest.mark.parametrize("dtype", ["<u1", "<u2", "<u4", "<u8"])
@pytest.mark.parametrize("read_at", [os.pread, seek_and_read, short_reads])
def test_any_slice_and_any_number_is_that_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, read_at: Read
) -> None:
    monkeypatch.setattr(file_array, "_read_at", read_at)
    values = np.random.default_rng(0).integers(0, 2**64 - 1, 100, np.uint64).astype(dtype)
    array = opened(tmp_path / "file", values)

    assert isinstance(array, FileArray)
    assert len(array) == 100
    for part in (slice(0, 100), slice(None), slice(17, 90), slice(95, 200), slice(50, 50), slice(60, 40)):
        assert array[part].dtype == values.dtype
        assert array[part].tolist() == values[part].tolist()
    assert [array[at] for at in (0, 41, 99)] == [int(values[at]) for at in (0, 41, 99)]


@pytest.mark.parametrize("entries", [0, 3])
def test_a_map_is_a_plain_array(tmp_path: Path, entries: int) -> None:
    array = opened(tmp_path / "file", np.arange(entries, dtype="<u2"), mapped=True)

    assert type(array) is np.ndarray
    assert array.tolist() == list(range(entries))


def test_a_file_that_is_shortened_is_an_error_that_names_it(tmp_path: Path) -> None:
    array = opened(tmp_path / "file", np.arange(100, dtype="<u2"))
    os.truncate(tmp_path / "file", 100)

    assert array[0:48].tolist() == list(range(48))
    with pytest.raises(DataError, match=r"/file: the file was shortened while it was in use"):
        array[40:60]


def test_a_disk_that_fails_is_an_error_that_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(descriptor: int, size: int, position: int) -> bytes:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(file_array, "_read_at", failing)
    with pytest.raises(DataError, match=r"/file: cannot be read: Input/output error"):
        opened(tmp_path / "file", np.arange(100, dtype="<u2"))[3]


def test_the_file_is_closed_with_the_array(tmp_path: Path) -> None:
    array = opened(tmp_path / "file", np.arange(4, dtype="<u2"))
    descriptor = array._descriptor
    assert os.fstat(descriptor).st_size == 12

    del array
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
