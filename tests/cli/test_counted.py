from __future__ import annotations

from pathlib import Path

import pytest

from speedtronic.cli.counted import CountedFileSystem
from speedtronic.errors import CheckpointError


def test_every_byte_that_is_read_is_counted(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(1000))
    counts: list[int] = []
    with CountedFileSystem(counts.append).open(tmp_path / "file") as file:
        assert file.readinto(bytearray(600)) == 600
        assert file.readinto(bytearray(600)) == 400
        assert file.readinto(bytearray(600)) == 0
    assert counts == [600, 400, 0]


def test_what_is_no_plain_file_is_refused_as_ever(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "file")
    with pytest.raises(CheckpointError, match="not a plain file"):
        CountedFileSystem(lambda count: None).open(tmp_path / "link")
