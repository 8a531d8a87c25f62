"""Folders that get their name when they are complete, and leftovers of processes that died before that."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from speedtronic.durable.files import FileSystem, ensure_directory, temporary_name, temporary_prefix
from speedtronic.durable.processes import process_is_alive

_REPLACED = "replaced-"
_TEMPORARY = re.compile(r"\.tmp-.+-(\d+)")  # the process id is last

# What this process is writing now. Any other temporary name with this process id was left by an earlier process with
# the same id, which is common in containers.
_being_written: set[Path] = set()


@contextmanager
def temporary_beside(fs: FileSystem, target: Path) -> Iterator[Path]:
    """A free path beside `target`. The block writes a file or folder there and renames it.

    If the block fails, nothing is left at the path.

    Raises:
        OSError: on entry, the folder above cannot be made.
    """
    ensure_directory(fs, target.parent)
    temporary = temporary_name(target)
    _being_written.add(temporary)
    try:
        yield temporary
    except BaseException:  # an interrupt too leaves nothing half written; it is raised again
        with suppress(OSError):
            remove(fs, temporary)
        raise
    finally:
        _being_written.discard(temporary)


def publish_folder(fs: FileSystem, finished: Path, target: Path, *, replace: bool) -> None:
    """Give a finished folder the name of `target`, durably. Both must be on one file system.

    An empty folder is replaced, any other only with `replace`. The old folder comes back if a step fails. If the
    process is killed between the two renames, the old folder is left under a temporary name, and `recover` brings it
    back.

    Args:
        finished: its files must be on the disk already.

    Raises:
        OSError: the disk failed, or the target has files and `replace` is false. Both folders are where they were.
    """
    fs.sync_directory(finished)
    replaces = target.is_dir() and (replace or not any(target.iterdir()))
    former = temporary_name(target, _REPLACED)
    if replaces:
        fs.rename(target, former)
    try:
        fs.rename(finished, target)
        fs.sync_directory(target.parent)
    except BaseException:  # an interrupt too puts both folders back; it is raised again
        if not finished.exists():
            fs.rename(target, finished)
        if replaces:
            fs.rename(former, target)
        raise
    if replaces:
        fs.remove_tree(former)


def remove_folder(fs: FileSystem, path: Path) -> None:
    """Remove a folder: its name in one step, then its files, so that nobody finds half of it."""
    removed = temporary_name(path, "removed-")
    fs.rename(path, removed)
    fs.remove_tree(removed)


def remove(fs: FileSystem, path: Path) -> None:
    """Remove a file, a link or a folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        fs.remove_tree(path)
    elif os.path.lexists(path):
        fs.remove_file(path)


def recover(fs: FileSystem, target: Path) -> None:
    """Clean up beside `target` after processes of this host that were killed while they wrote it.

    A folder that was moved away comes back if nothing has taken its place. Everything else is removed.
    """
    unfinished, former = (
        re.compile(rf"{re.escape(temporary_prefix(target, purpose))}-[0-9a-f]+-\d+") for purpose in ("", _REPLACED)
    )
    # What cannot be listed or removed does no harm here. If it keeps others from writing, they will report it.
    with suppress(OSError):
        for path in list(target.parent.iterdir()):
            if not _is_abandoned(path):
                continue
            with suppress(OSError):
                if former.fullmatch(path.name) and not target.exists():
                    fs.rename(path, target)
                elif former.fullmatch(path.name) or unfinished.fullmatch(path.name):
                    remove(fs, path)


def clean_folder(fs: FileSystem, folder: Path, warn: Callable[[str], None]) -> None:
    """Remove everything temporary that dead processes left in a folder.

    Only for a process that holds the folder: processes of other machines count as dead.

    Args:
        warn: told what could not be removed.
    """
    for path in folder.iterdir():
        if _is_abandoned(path):
            try:
                remove(fs, path)
            except OSError as error:
                warn(f"{path}, left by a process that was killed, could not be removed: {error}")


def _is_abandoned(path: Path) -> bool:
    match = _TEMPORARY.fullmatch(path.name)
    if match is None:
        return False
    pid = int(match[1])
    return path not in _being_written if pid == os.getpid() else not process_is_alive(pid)
