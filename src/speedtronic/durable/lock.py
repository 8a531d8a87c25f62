"""One folder, one run at a time: a lock that its holder's death frees."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Self

from speedtronic.errors import RunFolderError, RunLockedError

LOCK_FILE = ".lock"


class RunLock:
    """Holds a folder for this process, for as long as the `with` block lasts.

    It is a POSIX record lock (`fcntl.lockf`) on a file in the folder, or a byte-range lock on Windows: it
    belongs to the process, so that it goes when the process dies however it dies, and forked data workers
    do not keep it. A process may take the same folder again while it holds it; the last one to leave frees
    it.

    Args:
        directory: the folder; made when absent.

    Raises:
        RunLockedError: on entry, when another live process holds the folder; the message names its id and machine.
        RunFolderError: on entry, when the folder cannot be made or written, or its file system has no locks.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self._directory = Path(directory)

    def __enter__(self) -> Self:
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            self._key = self._directory.resolve()
            self._hold()
        except OSError as error:
            raise RunFolderError(
                f"{self._directory} cannot be used as the folder of a run ({error.strerror}); give this run another "
                "run.output_dir"
            ) from error
        return self

    def _hold(self) -> None:
        with _guard:
            held = _held_here(self._key)
            if held is None:
                _held[self._key] = _Held(_take(self._key), os.getpid())
            else:
                held.count += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with _guard:
            held = _held[self._key]
            held.count -= 1
            if held.count == 0:
                del _held[self._key]
                _release(held.descriptor)


class _Held:
    def __init__(self, descriptor: int, pid: int) -> None:
        self.descriptor = descriptor
        self.pid = pid
        self.count = 1


_guard = threading.Lock()
_held: dict[Path, _Held] = {}


def _held_here(key: Path) -> _Held | None:
    """What this process holds. A forked child finds its parent's entry, but not its lock."""
    held = _held.get(key)
    return held if held is not None and held.pid == os.getpid() else None


def _take(directory: Path) -> int:
    path = directory / LOCK_FILE
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        _lock(descriptor)
    except (BlockingIOError, PermissionError):
        holder = _read_holder(descriptor)
        os.close(descriptor)
        raise RunLockedError(
            f"{directory} is in use by {holder}; wait for it to end, stop it, or give this run another run.output_dir"
        ) from None
    except OSError as error:
        os.close(descriptor)
        raise RunFolderError(
            f"{directory} cannot be locked ({error.strerror}): its file system has no locks; give this run a "
            "run.output_dir on another one"
        ) from error
    _write_holder(descriptor)
    return descriptor


def _release(descriptor: int) -> None:
    """The file stays: unlinking it could take the name from under the next holder."""
    try:
        os.ftruncate(descriptor, 0)
    finally:
        os.close(descriptor)


def _write_holder(descriptor: int) -> None:
    started = datetime.now(UTC).isoformat(timespec="seconds")
    holder = {"pid": os.getpid(), "host": socket.gethostname(), "started": started}
    # Only for the message to others: a full disk must not keep a run from starting.
    with suppress(OSError):
        os.ftruncate(descriptor, 0)
        os.lseek(descriptor, 0, os.SEEK_SET)
        os.write(descriptor, json.dumps(holder).encode("ascii"))


def _read_holder(descriptor: int) -> str:
    try:
        holder = json.loads(os.read(descriptor, 4096))
        return f"process {holder['pid']} on {holder['host']}, running since {holder['started']}"
    except (OSError, ValueError, KeyError, TypeError):
        # Caught between its lock and its line, or on Windows, where a locked file cannot be read.
        return "another process"


if sys.platform == "win32":
    import msvcrt

    def _lock(descriptor: int) -> None:
        # A byte far beyond the contents, so that the line about the holder stays readable.
        os.lseek(descriptor, 2**30, os.SEEK_SET)
        msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        os.lseek(descriptor, 0, os.SEEK_SET)

else:
    import fcntl

    def _lock(descriptor: int) -> None:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
