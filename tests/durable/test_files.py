from __future__ import annotations

import errno
import hashlib
from io import FileIO
from pathlib import Path

import pytest

from speedtronic.durable.files import (
    DamagedFileError,
    FileRecord,
    FileSystem,
    copy_file,
    ensure_directory,
    read_small,
    replace_file,
    verified,
    write_file,
)


class Recording(FileSystem):
    """Writes down what was asked of the disk, in order."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def write(self, file: FileIO, data: memoryview) -> None:
        self.calls.append("write")
        super().write(file, data)

    def sync(self, file: FileIO) -> None:
        self.calls.append("sync")
        super().sync(file)

    def rename(self, source: Path, target: Path) -> None:
        self.calls.append("rename")
        super().rename(source, target)

    def sync_directory(self, path: Path) -> None:
        self.calls.append("sync_directory")
        super().sync_directory(path)


class Full(FileSystem):
    def write(self, file: FileIO, data: memoryview) -> None:
        super().write(file, data[: len(data) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_file_is_recorded_with_size_and_checksum(tmp_path: Path) -> None:
    record = write_file(FileSystem(), tmp_path / "x", [b"ab", memoryview(b"cd")])
    assert record == FileRecord(4, hashlib.sha256(b"abcd").hexdigest())
    assert (tmp_path / "x").read_bytes() == b"abcd"


def test_an_existing_file_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"old")
    with pytest.raises(FileExistsError):
        write_file(FileSystem(), tmp_path / "x", [b"new"])


def test_replacing_syncs_the_file_before_the_name_and_the_folder_after(tmp_path: Path) -> None:
    fs = Recording()
    replace_file(fs, tmp_path / "x", b"new")
    assert fs.calls == ["write", "sync", "rename", "sync_directory"]
    assert (tmp_path / "x").read_bytes() == b"new"


def test_a_failed_replacement_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"old")
    with pytest.raises(OSError, match="No space left"):
        replace_file(Full(), tmp_path / "x", b"newer")
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
    assert (tmp_path / "x").read_bytes() == b"old"


def test_a_copy_is_compared_with_the_record(tmp_path: Path) -> None:
    fs = FileSystem()
    record = write_file(fs, tmp_path / "x", [b"abcd"])
    copy_file(fs, tmp_path / "x", tmp_path / "y", record)
    assert (tmp_path / "y").read_bytes() == b"abcd"
    (tmp_path / "x").write_bytes(b"abce")
    with pytest.raises(DamagedFileError, match="x is damaged"):
        copy_file(fs, tmp_path / "x", tmp_path / "z", record)


def test_verified_reading_names_the_file_and_what_is_wrong(tmp_path: Path) -> None:
    fs = FileSystem()
    record = write_file(fs, tmp_path / "x", [b"abcd"])
    buffer = bytearray(4)
    with verified(fs, tmp_path / "x", record) as reader:
        reader.read_into(memoryview(buffer))
    assert buffer == b"abcd"
    with (
        pytest.raises(DamagedFileError, match="x is damaged: it has 4 bytes instead of 5"),
        verified(fs, tmp_path / "x", record._replace(size=5)),
    ):
        pass
    with (
        pytest.raises(DamagedFileError, match="x is damaged: its contents"),
        verified(fs, tmp_path / "x", record._replace(sha256="0" * 64)) as reader,
    ):
        reader.read_into(memoryview(buffer))
    with pytest.raises(DamagedFileError, match="y is missing"), verified(fs, tmp_path / "y", record):
        pass


def test_links_are_not_followed(tmp_path: Path) -> None:
    fs = FileSystem()
    record = write_file(fs, tmp_path / "x", [b"abcd"])
    (tmp_path / "link").symlink_to(tmp_path / "x")
    with pytest.raises(DamagedFileError, match="not a plain file"), verified(fs, tmp_path / "link", record):
        pass
    with pytest.raises(DamagedFileError, match="not a plain file"):
        read_small(fs, tmp_path / "link", 100)


def test_small_files_have_a_limit(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"abcd")
    assert read_small(FileSystem(), tmp_path / "x", 4) == b"abcd"
    with pytest.raises(DamagedFileError, match="larger than 3 bytes"):
        read_small(FileSystem(), tmp_path / "x", 3)


def test_folders_are_made_durably_from_the_top(tmp_path: Path) -> None:
    fs = Recording()
    ensure_directory(fs, tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()
    assert fs.calls == ["sync_directory", "sync_directory"]
    ensure_directory(fs, tmp_path / "a" / "b")
    assert len(fs.calls) == 2
