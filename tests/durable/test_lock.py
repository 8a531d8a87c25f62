from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from speedtronic.durable.lock import LOCK_FILE, FolderLock, RunLock
from speedtronic.errors import RunFolderError, RunLockedError

HOLDER = """
import sys
from speedtronic.durable.lock import RunLock
from speedtronic.errors import RunLockedError
try:
    with RunLock(sys.argv[1]):
        print("held", flush=True)
        sys.stdin.read()
except RunLockedError as error:
    print(error, flush=True)
"""


@contextmanager
def other_process(folder: Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield process
    finally:
        process.stdin.close()
        process.wait()
        process.stdout.close()


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_a_second_process_is_refused_and_told_who_holds_the_folder(tmp_path: Path) -> None:
    with RunLock(tmp_path), other_process(tmp_path) as process:
        message = first_line(process)
    assert str(tmp_path) in message
    assert f"process {os.getpid()} on " in message
    assert "run.output_dir" in message


def test_this_process_is_refused_while_another_holds_it(tmp_path: Path) -> None:
    with other_process(tmp_path) as process:
        assert first_line(process) == "held"
        with pytest.raises(RunLockedError, match=f"process {process.pid} on "), RunLock(tmp_path):
            pass


def test_a_killed_holder_frees_the_folder(tmp_path: Path) -> None:
    with other_process(tmp_path) as process:
        assert first_line(process) == "held"
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        assert json.loads((tmp_path / LOCK_FILE).read_text())["pid"] == process.pid
        with RunLock(tmp_path):
            assert json.loads((tmp_path / LOCK_FILE).read_text())["pid"] == os.getpid()


def test_one_process_may_take_it_again_and_the_last_to_leave_frees_it(tmp_path: Path) -> None:
    link = tmp_path / "link"
    folder = tmp_path / "folder"
    folder.mkdir()
    link.symlink_to(folder)
    with RunLock(folder):
        with RunLock(link):
            pass
        with other_process(folder) as process:
            assert "is in use by" in first_line(process)
    with other_process(folder) as process:
        assert first_line(process) == "held"


def test_a_lock_can_be_used_again_and_its_folder_is_made(tmp_path: Path) -> None:
    lock = RunLock(tmp_path / "new" / "folder")
    for _ in range(2):
        with lock:
            assert (tmp_path / "new" / "folder" / LOCK_FILE).stat().st_size > 0
    assert (tmp_path / "new" / "folder" / LOCK_FILE).stat().st_size == 0


@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
def test_a_forked_child_does_not_hold_its_parents_lock(tmp_path: Path) -> None:
    with RunLock(tmp_path):
        child = os.fork()
        if child == 0:
            try:
                with RunLock(tmp_path):
                    os._exit(1)
            except RunLockedError:
                os._exit(0)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        with other_process(tmp_path) as process:
            assert "is in use by" in first_line(process)


def exclusive(folder: Path) -> FolderLock:
    return FolderLock(folder, file="lock", held=ValueError, unusable=lambda error: error)


def test_an_exclusive_lock_keeps_out_the_same_process_too(tmp_path: Path) -> None:
    with exclusive(tmp_path), pytest.raises(ValueError, match="^this process$"):
        exclusive(tmp_path).__enter__()
    with exclusive(tmp_path):
        pass


def test_a_folder_that_cannot_be_made_is_the_callers_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError):
        exclusive(tmp_path / "file" / "folder").__enter__()
    with pytest.raises(RunFolderError, match=r"cannot be used as the folder of a run .*run\.output_dir"):
        RunLock(tmp_path / "file" / "folder").__enter__()


def test_a_file_system_without_locks_is_named_as_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("speedtronic.durable.lock._lock", refuse)
    with pytest.raises(RunFolderError, match="No locks available: its file system has no locks"):
        RunLock(tmp_path).__enter__()


def test_a_holder_may_remove_the_folder_with_its_lock(tmp_path: Path) -> None:
    lock = exclusive(tmp_path / "work")
    for _ in range(2):
        lock.__enter__()
        (tmp_path / "work" / "half").write_text("x")
        lock.exit_and_remove()
        assert not (tmp_path / "work").exists()


@pytest.mark.skipif(sys.platform == "win32", reason="what is open cannot be removed there")
@pytest.mark.parametrize("before_it_is_opened", [False, True])
def test_a_lock_file_that_its_last_holder_removes_meanwhile_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before_it_is_opened: bool
) -> None:
    removed: list[Path] = []
    opened = os.open

    def open_and_lose(path: Path, *rest: int) -> int:
        first = not removed
        removed.append(path)
        if first and before_it_is_opened:
            path.parent.rmdir()
        descriptor = opened(path, *rest)
        if first:
            path.unlink()
        return descriptor

    with monkeypatch.context() as patch:
        patch.setattr("os.open", open_and_lose)
        lock = exclusive(tmp_path / "work").__enter__()
    assert len(removed) == 2
    with pytest.raises(ValueError, match="this process"):
        exclusive(tmp_path / "work").__enter__()
    lock.exit_and_remove()
