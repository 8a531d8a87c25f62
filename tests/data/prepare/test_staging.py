from __future__ import annotations

import hashlib
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from speedtronic.data.prepare.staging import StagingFolder, is_resumable, staging_folder
from speedtronic.errors import DataError


def test_the_folder_goes_with_its_block_unless_it_has_a_journal(tmp_path: Path) -> None:
    with StagingFolder(tmp_path / "deep" / "out") as staging:
        (staging.files / "shard").write_text("x")
    assert list((tmp_path / "deep").iterdir()) == []

    with StagingFolder(tmp_path / "out") as staging:
        (staging.files / "shard").write_text("x")
        staging.write_journal({"units": 3})
    assert is_resumable(tmp_path / "out")

    with StagingFolder(tmp_path / "out") as staging:
        assert staging.read_journal() == {"units": 3}
        assert (staging.files / "shard").read_text() == "x"
        staging.remove_journal()
    assert not staging_folder(tmp_path / "out").exists()
    assert not is_resumable(tmp_path / "out")


def test_folders_of_an_older_version_go_when_their_process_has_ended_and_nobody_holds_the_data(tmp_path: Path) -> None:
    host = hashlib.blake2b(socket.gethostname().encode(), digest_size=4).hexdigest()
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    left = f".out.partial-{host}-{gone.pid}-0123abcd"
    kept = {
        f".out.partial-{host}-{os.getpid()}-0123abcd",
        f".out.partial-00000000-{gone.pid}-0123abcd" if host != "00000000" else "another",
        f".out.partial-{host}-{gone.pid}-0123abcd.txt",
        f".out.partial-{host}-{gone.pid}-mine",
        f".out.partial-{gone.pid}",
        f".outs.partial-{host}-{gone.pid}-0123abcd",
        f".out.old-{host}-{gone.pid}-0123abcd",
        f"out.partial-{host}-{gone.pid}-0123abcd",
    }
    link, file = f".out.partial-{host}-{gone.pid}-0123aaaa", f".out.partial-{host}-{gone.pid}-0123bbbb"
    for name in {left, *kept}:
        (tmp_path / name).mkdir()
        (tmp_path / name / "shard_00000.bin").write_text("x")
    (tmp_path / link).symlink_to(tmp_path / f".out.partial-{gone.pid}")
    (tmp_path / file).write_text("x")

    with StagingFolder(tmp_path / "out"):
        assert not (tmp_path / left).exists()
        (tmp_path / left).mkdir()
        with pytest.raises(DataError, match="is preparing this data"), StagingFolder(tmp_path / "out"):
            pass
        assert (tmp_path / left).is_dir()
    assert {path.name for path in tmp_path.iterdir()} == {left, link, file, *kept}
    assert (tmp_path / f".out.partial-{gone.pid}" / "shard_00000.bin").is_file()


def test_clearing_leaves_nothing_of_before(tmp_path: Path) -> None:
    with StagingFolder(tmp_path / "out") as staging:
        (staging.files / "shard").write_text("x")
        staging.write_journal({"units": 3})
        staging.clear()

        assert staging.read_journal() is None
        assert list(staging.files.iterdir()) == []


@pytest.mark.parametrize("content", ["", "{", "[]", "\udcff"])
def test_a_damaged_journal_is_ignored(tmp_path: Path, content: str) -> None:
    with StagingFolder(tmp_path / "out") as staging:
        staging.write_journal({"units": 3})
        (staging.path / "journal.json").write_bytes(content.encode(errors="surrogateescape"))

        assert staging.read_journal() is None


def test_a_journal_is_replaced_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with StagingFolder(tmp_path / "out") as staging:
        staging.write_journal({"units": 3})
        monkeypatch.setattr("os.fsync", fail)
        with pytest.raises(OSError, match="No space"):
            staging.write_journal({"units": 4})

        assert staging.read_journal() == {"units": 3}


def test_a_second_holder_is_refused_and_the_first_is_named(tmp_path: Path) -> None:
    with StagingFolder(tmp_path / "out") as staging:
        with pytest.raises(DataError, match="this process is preparing this data"):
            StagingFolder(tmp_path / "out").__enter__()
        assert staging.files.is_dir()

    with StagingFolder(tmp_path / "out"):
        pass


def test_the_lock_of_a_process_that_was_killed_is_free(tmp_path: Path) -> None:
    code = (
        "import os, sys\nfrom pathlib import Path\nfrom speedtronic.data.prepare.staging import StagingFolder\n"
        "staging = StagingFolder(Path(sys.argv[1])).__enter__()\nstaging.write_journal({'units': 3})\nos._exit(1)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "out")], check=False)
    assert is_resumable(tmp_path / "out")

    with StagingFolder(tmp_path / "out") as staging:
        assert staging.read_journal() == {"units": 3}
