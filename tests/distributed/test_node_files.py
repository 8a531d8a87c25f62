from __future__ import annotations

from io import FileIO
from pathlib import Path

import pytest

from speedtronic.distributed.node_files import NodeFiles
from speedtronic.durable.files import FileSystem


class FullDisk(FileSystem):
    full = False

    def write(self, file: FileIO, data: memoryview) -> None:
        if self.full:
            raise OSError(28, "No space left on device")
        super().write(file, data)


def test_a_file_comes_back_and_is_replaced_whole(tmp_path: Path) -> None:
    files = NodeFiles(tmp_path / "a" / "b")
    assert files.read("spool") is None
    files.write("spool", bytearray(b"longer than the next"))
    files.write("spool", memoryview(b"next"))
    assert files.read("spool") == b"next"
    assert NodeFiles(tmp_path / "a" / "b").read("spool") == b"next"


def test_removing_a_missing_file_is_no_error(tmp_path: Path) -> None:
    files = NodeFiles(tmp_path)
    files.write("spool", b"x")
    files.remove("spool")
    files.remove("spool")
    assert files.read("spool") is None
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_leaves_the_old_file_and_nothing_beside_it(tmp_path: Path) -> None:
    disk = FullDisk()
    files = NodeFiles(tmp_path, disk)
    files.write("ledger", b"old")
    disk.full = True
    with pytest.raises(OSError, match="No space left"):
        files.write("ledger", b"new")
    assert files.read("ledger") == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["ledger"]


def test_leftovers_of_a_killed_process_are_removed(tmp_path: Path) -> None:
    (tmp_path / ".tmp-spool-4711").write_bytes(b"half")
    NodeFiles(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_late_thread_cannot_touch_closed_files(tmp_path: Path) -> None:
    late = NodeFiles(tmp_path)
    late.close()
    now = NodeFiles(tmp_path)
    now.write("spool", b"of the next life")
    for act in (lambda: late.write("spool", b"late"), lambda: late.remove("spool"), lambda: late.read("spool")):
        with pytest.raises(OSError, match="closed"):
            act()
    assert now.read("spool") == b"of the next life"
