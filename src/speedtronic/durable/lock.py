"""One folder, one holder at a time: a lock that is freed when its holder dies."""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Self

from speedtronic.errors import RunFolderError, RunLockedError

LOCK_FILE = ".lock"

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


class FolderLock:
    """Holds a folder for this process, for as long as the `with` block lasts. It can be used again after that.

    It is a POSIX record lock (`fcntl.lockf`) on a file in the folder, or a byte-range lock on Windows. Such a lock
    belongs to the process: it is freed when the process dies, however it dies, and forked data workers do not keep it.
    Within the process, a table keeps other threads out.

    Args:
        directory: the folder; made when absent.
        file: the name of the lock file in it.
        reentrant: whether this process may take the folder again while it holds it; the last one to leave frees it.
        held: makes the error for a folder that is held, from words for the holder: "process 12 on box, running since
            2030-01-01T00:00:00+00:00", "this process" or "another process".
        unusable: makes the error for a folder that cannot be made, written or locked.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        file: str = LOCK_FILE,
        reentrant: bool = False,
        held: Callable[[str], Exception],
        unusable: Callable[[OSError], Exception],
    ) -> None:
        self._directory = Path(directory).absolute()
        self._file = file
        self._reentrant = reentrant
        self._held_error = held
        self._unusable_error = unusable

    def __enter__(self) -> Self:
        try:
            self._key = self._directory.resolve() / self._file
            with _guard:
                holding = _held.get(self._key)
                if holding is None or holding.pid != os.getpid():  # a forked child does not hold its parent's lock
                    _held[self._key] = _Held(self._take(), os.getpid())
                elif self._reentrant:
                    holding.count += 1
                else:
                    raise self._held_error("this process")
        except OSError as error:
            raise self._unusable_error(error) from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with _guard:
            holding = _held[self._key]
            holding.count -= 1
            if holding.count == 0:
                del _held[self._key]
                _free(holding.descriptor)

    def exit_and_remove(self) -> None:
        """Leave the block, and remove the folder with all that is in it. Only for a lock that is not reentrant."""
        with _guard:
            descriptor = _held.pop(self._key).descriptor
            if sys.platform == "win32":  # open files cannot be removed there
                _free(descriptor)
                shutil.rmtree(self._directory, ignore_errors=True)
            else:
                shutil.rmtree(self._directory, ignore_errors=True)
                _free(descriptor)

    def _take(self) -> int:
        """The descriptor of the lock file, locked, with this process written into it as the holder."""
        path = self._directory / self._file
        while True:
            self._directory.mkdir(parents=True, exist_ok=True)
            try:
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
            except FileNotFoundError:
                continue  # the last holder has just removed the folder
            try:
                _lock(descriptor)
                if _is_there(path, descriptor):
                    _write_holder(descriptor)
                    return descriptor
            except (BlockingIOError, PermissionError):
                holder = _read_holder(descriptor)
                os.close(descriptor)
                raise self._held_error(holder) from None
            except OSError as error:
                os.close(descriptor)
                raise OSError(error.errno, f"{error.strerror}: its file system has no locks") from error
            os.close(descriptor)  # the last holder removed the folder before this process locked the file


class RunLock(FolderLock):
    """Holds a folder for this process, for as long as the `with` block lasts.

    The lock is freed when the process dies, however it dies, and forked data workers do not keep it. A process may take
    the same folder again while it holds it; the last one to leave frees it.

    Args:
        directory: the folder; made when absent.

    Raises:
        RunLockedError: on entry, when another live process holds the folder; the message names its id and machine.
        RunFolderError: on entry, when the folder cannot be made or written, or its file system has no locks.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        folder = Path(directory)
        super().__init__(
            folder,
            reentrant=True,
            held=lambda holder: RunLockedError(
                f"{folder} is in use by {holder}; wait for it to end, stop it, or give this run another run.output_dir"
            ),
            unusable=lambda error: RunFolderError(
                f"{folder} cannot be used as the folder of a run ({error.strerror}); give this run another "
                "run.output_dir"
            ),
        )


def holder_lives(directory: str | os.PathLike[str]) -> bool | None:
    """Whether the process that says it holds a folder lives; None where this machine cannot tell. It takes no lock."""
    path = Path(directory).resolve() / LOCK_FILE
    with _guard:
        if path in _held:
            # Opening and closing the file here would free the lock of this process: POSIX locks are like that.
            return True
    try:
        holder = json.loads(path.read_bytes() or b"null")
        if holder is None:  # freed
            return False
        pid, host = int(holder["pid"]), holder["host"]
    except FileNotFoundError:
        return False
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if host != socket.gethostname() or sys.platform == "win32":
        return None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # the process of somebody else
        return True
    return True


@dataclass
class _Held:
    descriptor: int
    pid: int
    count: int = 1


_guard = threading.Lock()
_held: dict[Path, _Held] = {}


def _free(descriptor: int) -> None:
    """The file stays: unlinking it could take the name from under the next holder."""
    try:
        os.ftruncate(descriptor, 0)
    finally:
        os.close(descriptor)


def _is_there(path: Path, descriptor: int) -> bool:
    """Whether the path still leads to the open file."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


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
        # Read between its lock and its line, or on Windows, where a locked file cannot be read.
        return "another process"
