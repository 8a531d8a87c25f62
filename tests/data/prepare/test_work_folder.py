from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from speedtronic.data.prepare.work_folder import PartialFolder, is_resumable, partial_folder
from speedtronic.errors import DataError


def test_the_folder_goes_with_its_block_unless_it_has_a_journal(tmp_path: Path) -> None:
    with PartialFolder(tmp_path / "deep" / "out") as work:
        (work.files / "shard").write_text("x")
    assert list((tmp_path / "deep").iterdir()) == []

    with PartialFolder(tmp_path / "out") as work:
        (work.files / "shard").write_text("x")
        work.note({"units": 3})
    assert is_resumable(tmp_path / "out")

    with PartialFolder(tmp_path / "out") as work:
        assert work.journal() == {"units": 3}
        assert (work.files / "shard").read_text() == "x"
        work.forget()
    assert not partial_folder(tmp_path / "out").exists()
    assert not is_resumable(tmp_path / "out")


def test_beginning_anew_leaves_nothing_of_before(tmp_path: Path) -> None:
    with PartialFolder(tmp_path / "out") as work:
        (work.files / "shard").write_text("x")
        work.note({"units": 3})
        work.clear()

        assert work.journal() is None
        assert list(work.files.iterdir()) == []


@pytest.mark.parametrize("content", ["", "{", "[]", "\udcff"])
def test_a_damaged_journal_is_none(tmp_path: Path, content: str) -> None:
    with PartialFolder(tmp_path / "out") as work:
        work.note({"units": 3})
        (work.path / "journal.json").write_bytes(content.encode(errors="surrogateescape"))

        assert work.journal() is None


def test_a_journal_is_replaced_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with PartialFolder(tmp_path / "out") as work:
        work.note({"units": 3})
        monkeypatch.setattr("os.fsync", fail)
        with pytest.raises(OSError, match="No space"):
            work.note({"units": 4})

        assert work.journal() == {"units": 3}


def test_two_at_a_time_are_refused_and_the_first_is_named(tmp_path: Path) -> None:
    with PartialFolder(tmp_path / "out") as work:
        with pytest.raises(DataError, match=f"process {os.getpid()} is preparing this data"):
            PartialFolder(tmp_path / "out").__enter__()
        assert work.files.is_dir()

    with PartialFolder(tmp_path / "out"):
        pass


def test_the_lock_of_a_process_that_was_killed_is_free(tmp_path: Path) -> None:
    code = (
        "import os, sys\nfrom pathlib import Path\nfrom speedtronic.data.prepare.work_folder import PartialFolder\n"
        "work = PartialFolder(Path(sys.argv[1])).__enter__()\nwork.note({'units': 3})\nos._exit(1)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "out")], check=False)
    assert is_resumable(tmp_path / "out")

    with PartialFolder(tmp_path / "out") as work:
        assert work.journal() == {"units": 3}


@pytest.mark.skipif(sys.platform == "win32", reason="what is open cannot be removed there")
def test_a_lock_that_was_removed_while_it_was_taken_is_taken_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = os.open
    removed = []

    def open_and_lose(path: Path, *rest: int) -> int:
        descriptor = opened(path, *rest)
        if not removed:
            removed.append(path)
            path.unlink()
        return descriptor

    with monkeypatch.context() as patch:
        patch.setattr("os.open", open_and_lose)
        work = PartialFolder(tmp_path / "out").__enter__()

    assert removed
    with pytest.raises(DataError, match="is preparing this data"):
        PartialFolder(tmp_path / "out").__enter__()
    work.__exit__(None, None, None)
