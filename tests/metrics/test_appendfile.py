from __future__ import annotations

import io
import os
import threading
from pathlib import Path

import pytest

from speedtronic.metrics.appendfile import AppendFile


class Short(io.FileIO):
    """Writes only a few bytes of each write, like a disk that runs full."""

    def write(self, data: object) -> int:  # type: ignore[override]
        assert isinstance(data, bytes)
        return super().write(data[:3])


def test_lines_are_appended_to_what_is_there(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "file"
    AppendFile(path).write_line(b"one")
    AppendFile(path).write_line(b"two")
    assert path.read_bytes() == b"one\ntwo\n"


def test_a_line_that_is_only_partly_written_is_an_error_and_the_next_starts_on_its_own_line(tmp_path: Path) -> None:
    path = tmp_path / "file"
    file = AppendFile(path)
    whole = file._file
    file._file = Short(path, "a+")
    with pytest.raises(OSError, match="part of the line"):
        file.write_line(b"abcdef")
    file._file.close()
    file._file = whole
    file.write_line(b"next")
    assert path.read_bytes() == b"abc\nnext\n"
    file.close()


def test_a_file_that_is_dropped_is_closed(tmp_path: Path) -> None:
    file = AppendFile(tmp_path / "file")
    opened = file._file
    assert opened is not None
    del file
    assert opened.closed


def test_after_close_the_next_line_opens_the_file_again(tmp_path: Path) -> None:
    file = AppendFile(tmp_path / "file")
    file.write_line(b"one")
    file.close()
    file.close()
    file.write_line(b"two")
    file.close()
    assert (tmp_path / "file").read_bytes() == b"one\ntwo\n"


def test_a_later_change_of_folder_does_not_move_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = AppendFile("file")
    file.close()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    file.write_line(b"one")
    file.close()
    assert (tmp_path / "file").read_bytes() == b"one\n"


def test_lines_go_into_a_pipe_until_its_reader_leaves(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    read: list[bytes] = []

    def read_one_line() -> None:
        with open(path, "rb") as pipe:
            read.append(pipe.readline())

    reader = threading.Thread(target=read_one_line)
    reader.start()
    file = AppendFile(path)
    file.write_line(b"one")
    reader.join()
    assert read == [b"one\n"]
    with pytest.raises(BrokenPipeError):
        file.write_line(b"two")
    file.close()
