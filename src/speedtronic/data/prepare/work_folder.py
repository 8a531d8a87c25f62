"""The folder in which data is prepared: held by one process at a time, and left to the next when that is killed."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from speedtronic.errors import DataError

_JOURNAL = "journal.json"
_LOCK = "lock"


def output_folder(out: str | os.PathLike[str]) -> Path:
    """The folder that is written for `out`: what a symbolic link leads to, there or not, since none can be replaced."""
    path = Path(out)
    return Path(os.path.realpath(path)) if os.path.islink(path) else path


def partial_folder(out: Path) -> Path:
    """Where the data that will be `out` is prepared."""
    folder = output_folder(out)
    return folder.parent / f".{folder.name}.partial"


def is_resumable(folder: Path) -> bool:
    """Whether there is work left that a preparation of `folder` can go on with."""
    return (partial_folder(folder) / _JOURNAL).is_file()


class PartialFolder:
    """Holds the folder for as long as the `with` block lasts, and removes it then if it has no journal.

    The lock is one of the operating system's: it is free when its process has died, however that died.

    Args:
        folder: where the finished data will be.

    Attributes:
        files: a folder for what will be published.

    Raises:
        DataError: on entry, when another live process holds it.
        OSError: on entry, when it cannot be made.
    """

    def __init__(self, folder: Path) -> None:
        self.path = partial_folder(folder)
        self.files = self.path / "files"

    def __enter__(self) -> PartialFolder:
        self._descriptor = self._held()
        self.files.mkdir(exist_ok=True)
        return self

    def _held(self) -> int:
        while True:
            self.path.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                _lock(descriptor)
            except (BlockingIOError, PermissionError):
                holder = _holder(descriptor)
                os.close(descriptor)
                raise DataError(
                    f"{self.path}: {holder} is preparing this data; wait for it to end or choose another folder"
                ) from None
            if self._is_lock(descriptor):
                _name_holder(descriptor)
                return descriptor
            os.close(descriptor)  # its last holder has removed it in the meantime

    def _is_lock(self, descriptor: int) -> bool:
        try:
            return os.path.samestat(os.fstat(descriptor), os.stat(self.path / _LOCK))
        except FileNotFoundError:
            return False

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        _leave(self.path, self._descriptor, remove=not (self.path / _JOURNAL).exists())

    def journal(self) -> dict[str, Any] | None:
        """What was noted last; None if nothing was, or nothing that can be read."""
        try:
            journal = json.loads((self.path / _JOURNAL).read_bytes())
        except (OSError, ValueError):
            return None
        return journal if isinstance(journal, dict) else None

    def note(self, journal: Mapping[str, Any]) -> None:
        """Replace the journal, at one go."""
        self.keep(_JOURNAL, json.dumps(journal).encode())

    def forget(self) -> None:
        """Remove the journal: nothing here is to be gone on with."""
        (self.path / _JOURNAL).unlink(missing_ok=True)

    def clear(self) -> None:
        """Begin anew."""
        self.forget()
        shutil.rmtree(self.files)
        self.files.mkdir()

    def keep(self, name: str, content: bytes) -> None:
        """Write a file beside the journal, whole or not at all."""
        written = self.path / f"{name}.new"
        with written.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        written.replace(self.path / name)


def _name_holder(descriptor: int) -> None:
    # Only for the message to others: a full disk says so elsewhere.
    with suppress(OSError):
        os.ftruncate(descriptor, 0)
        os.write(descriptor, str(os.getpid()).encode())


def _holder(descriptor: int) -> str:
    with suppress(OSError):  # Windows lets nobody read what is locked
        if pid := os.read(descriptor, 32).decode("ascii", "replace"):
            return f"process {pid}"
    return "another process"


if sys.platform == "win32":
    import msvcrt

    def _lock(descriptor: int) -> None:
        msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)

    def _leave(path: Path, descriptor: int, *, remove: bool) -> None:
        os.close(descriptor)  # what is open cannot be removed
        if remove:
            shutil.rmtree(path, ignore_errors=True)

else:
    import fcntl

    def _lock(descriptor: int) -> None:
        # Unlike `lockf` this also keeps out another thread of this process.
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def _leave(path: Path, descriptor: int, *, remove: bool) -> None:
        if remove:
            shutil.rmtree(path, ignore_errors=True)
        os.close(descriptor)
