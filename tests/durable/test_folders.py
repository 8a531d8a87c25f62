from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from speedtronic.durable.files import FileSystem, temporary_name
from speedtronic.durable.folders import clean_folder, publish_folder, recover, remove_folder, temporary_beside


class Failing(FileSystem):
    """Lets the n-th rename or folder flush fail."""

    def __init__(self, fail_at: int) -> None:
        self.fail_at = fail_at

    def _count(self) -> None:
        self.fail_at -= 1
        if self.fail_at == 0:
            raise OSError(errno.EIO, "Input/output error")

    def rename(self, source: Path, target: Path) -> None:
        self._count()
        super().rename(source, target)

    def sync_directory(self, path: Path) -> None:
        self._count()
        super().sync_directory(path)


def folder(path: Path, content: str) -> Path:
    path.mkdir()
    (path / "file").write_text(content)
    return path


def names(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir())


def by_a_dead_process(path: Path, purpose: str = "", *, host: str | None = None) -> Path:
    """A temporary name beside `path`, as a process left it that is gone."""
    process = subprocess.Popen([sys.executable, "-S", "-c", ""])
    process.wait()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.getpid", lambda: process.pid)
        if host is not None:
            patch.setattr("socket.gethostname", lambda: host)
        return temporary_name(path, purpose)


def test_a_finished_folder_takes_a_free_name_or_that_of_an_empty_folder(tmp_path: Path) -> None:
    target = tmp_path / "s"
    for _ in range(2):
        publish_folder(FileSystem(), folder(tmp_path / "new", "new"), target, replace=False)
        assert (target / "file").read_text() == "new"
        assert names(tmp_path) == ["s"]
        (target / "file").unlink()


def test_only_with_replace_does_a_folder_with_files_give_way(tmp_path: Path) -> None:
    target, new = folder(tmp_path / "s", "old"), folder(tmp_path / "new", "new")
    with pytest.raises(OSError, match="not empty"):
        publish_folder(FileSystem(), new, target, replace=False)
    assert (target / "file").read_text() == "old"
    publish_folder(FileSystem(), new, target, replace=True)
    assert (target / "file").read_text() == "new"
    assert names(tmp_path) == ["s"]


@pytest.mark.parametrize("fail_at", [1, 2, 3, 4])
def test_whichever_step_of_a_replacement_fails_both_folders_are_where_they_were(tmp_path: Path, fail_at: int) -> None:
    target, new = folder(tmp_path / "s", "old"), folder(tmp_path / "new", "new")
    with pytest.raises(OSError, match="Input/output"):
        publish_folder(Failing(fail_at), new, target, replace=True)
    assert names(tmp_path) == ["new", "s"]
    assert (target / "file").read_text() == "old"
    assert (new / "file").read_text() == "new"


@pytest.mark.parametrize("make", [Path.mkdir, Path.touch])
def test_a_block_that_fails_leaves_nothing_beside_the_target(tmp_path: Path, make: Callable[[Path], None]) -> None:
    def fail() -> None:
        with temporary_beside(FileSystem(), tmp_path / "deep" / "s") as temporary:
            make(temporary)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert names(tmp_path / "deep") == []


def test_a_removed_folder_leaves_no_name(tmp_path: Path) -> None:
    remove_folder(FileSystem(), folder(tmp_path / "s", "old"))
    assert names(tmp_path) == []


def test_only_what_dead_processes_of_this_host_left_of_the_target_is_removed(tmp_path: Path) -> None:
    target = tmp_path / "s"
    kept = [
        temporary_name(target).with_name(f".tmp-s-{os.getppid()}"),
        by_a_dead_process(target, host="elsewhere"),
        by_a_dead_process(tmp_path / "other"),
        tmp_path / "notes.txt",
    ]
    for path in (*kept, by_a_dead_process(target), temporary_name(target)):
        folder(path, "half")
    with temporary_beside(FileSystem(), target) as temporary:
        folder(temporary, "in the making")
        recover(FileSystem(), target)
        assert names(tmp_path) == sorted(path.name for path in (*kept, temporary))
    recover(FileSystem(), tmp_path / "none" / "s")


def test_a_folder_that_a_killed_replacement_moved_away_comes_back(tmp_path: Path) -> None:
    folder(by_a_dead_process(tmp_path / "s", "replaced-"), "old")
    recover(FileSystem(), tmp_path / "s")
    assert names(tmp_path) == ["s"]
    folder(by_a_dead_process(tmp_path / "s", "replaced-"), "older")
    recover(FileSystem(), tmp_path / "s")
    assert names(tmp_path) == ["s"], "something has taken its place"
    assert (tmp_path / "s" / "file").read_text() == "old"


def test_the_holder_of_a_folder_cleans_it_whatever_host_left_something(tmp_path: Path) -> None:
    for path in (by_a_dead_process(tmp_path / "a"), by_a_dead_process(tmp_path / "a", host="elsewhere")):
        folder(path, "half")
    by_a_dead_process(tmp_path / "latest.json").write_text("half")
    by_a_dead_process(tmp_path / "link").symlink_to(folder(tmp_path / "mine", "x"))
    clean_folder(FileSystem(), tmp_path, pytest.fail)
    assert names(tmp_path) == ["mine"]
    assert names(tmp_path / "mine") == ["file"]


def test_what_cannot_be_removed_is_a_warning(tmp_path: Path) -> None:
    class Stuck(FileSystem):
        def remove_tree(self, path: Path) -> None:
            raise OSError(errno.EACCES, "Permission denied")

    left = folder(by_a_dead_process(tmp_path / "a"), "half")
    warned: list[str] = []
    clean_folder(Stuck(), tmp_path, warned.append)
    assert warned == [f"{left}, left by a process that was killed, could not be removed: [Errno 13] Permission denied"]
