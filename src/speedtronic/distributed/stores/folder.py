"""A store in a folder, local or mounted.

An object is written under a temporary name, flushed, and then given its own name by a hard link, which fails if the
name is taken. So it is there whole or not at all, and is created once.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import TypeVar

from speedtronic.distributed.stores.base import (
    REQUEST_TIMEOUT,
    Buffer,
    Entry,
    Listing,
    checked_name,
    checked_prefix,
    expected_bytes,
    first_page,
    is_name,
)
from speedtronic.distributed.stores.timeouts import BoundedCalls
from speedtronic.durable.files import sync, sync_folder
from speedtronic.errors import StoreRefusedError, StoreUnavailableError

T = TypeVar("T")

_UNFINISHED = ".unfinished"  # names of objects do not begin with a dot, so nothing in it is ever listed
_ABANDONED = 24 * 3600.0  # seconds after which the writer of an unfinished file is taken for dead
_TRIES = 8  # a folder can vanish between being made and being used: the deletion of its last object removes it

_NO_ACCESS = {errno.EACCES, errno.EPERM, errno.EROFS}
_NOT_A_FOLDER = {errno.ENOTDIR, errno.EEXIST, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.EINVAL}
_NO_HARD_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK, errno.EXDEV, errno.EINVAL}


class FolderStore:
    """Objects as files under a folder, which is created with the first of them.

    Args:
        folder: where they lie. A relative path is resolved now.
        sync: flushes the file or folder behind a descriptor to the disk, as `os.fsync` does.
        link: gives a file a second name, as `os.link` does.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        sync: Callable[[int], None] = sync,
        link: Callable[[Path, Path], None] = os.link,
    ) -> None:
        self._root = Path(folder).absolute()
        self._sync = sync
        self._link = link
        self._calls = BoundedCalls(self.url)
        self._numbers = count()
        self._flushed: set[Path] = set()
        self._writer = f"{os.getpid()}-{os.urandom(8).hex()}"

    @property
    def url(self) -> str:
        return f"dir://{self._root}"

    def put_if_absent(self, name: str, data: Buffer, *, timeout: float = REQUEST_TIMEOUT) -> bool:
        path = self._root / checked_name(name)
        return self._ask(timeout, lambda: self._create(path, data))

    def get(
        self,
        name: str,
        *,
        limit: int,
        size: int | None = None,
        sha256: str | None = None,
        partial: bool = False,
        timeout: float = REQUEST_TIMEOUT,
    ) -> bytes | None:
        path = self._root / checked_name(name)
        return self._ask(
            timeout,
            lambda: expected_bytes(_read(path, limit, size, partial), limit, size, sha256, partial=partial),
        )

    def list_after(self, prefix: str, marker: str = "", *, timeout: float = REQUEST_TIMEOUT) -> Listing:
        above = checked_prefix(prefix).rpartition("/")[0]
        folder = self._root / above
        before = f"{above}/" if above else ""
        return self._ask(timeout, lambda: first_page(_walk(folder, before, prefix, marker)))

    def delete(self, name: str, *, timeout: float = REQUEST_TIMEOUT) -> None:
        path = self._root / checked_name(name)
        self._ask(timeout, lambda: self._remove(path))

    def close(self) -> None:
        """Nothing to close."""

    def _ask(self, timeout: float, call: Callable[[], T]) -> T:
        try:
            return self._calls.within(timeout, call)
        except OSError as error:
            why = error.strerror or str(error)
            if error.errno in _NO_ACCESS:
                message = f"{self.url}: {why}; check who may read and write this folder"
                raise StoreRefusedError(message) from error
            if error.errno in _NOT_A_FOLDER:
                message = f"{self.url}: {why}; the store must be a folder that holds nothing else"
                raise StoreRefusedError(message) from error
            raise StoreUnavailableError(f"{self.url}: {why}") from error

    def _create(self, path: Path, data: Buffer) -> bool:
        if path.exists():
            # Another writer created it, and its name is perhaps not on the disk yet. The caller relies on it from now.
            self._sync_folder(path.parent)
            return False
        unfinished = self._write(data)
        try:
            created = self._place(unfinished, path)
        finally:
            unfinished.unlink(missing_ok=True)
        self._sync_folder(path.parent)
        return created

    def _write(self, data: Buffer) -> Path:
        """Write the bytes to a temporary file, which is on the disk on return."""
        folder = self._root / _UNFINISHED
        self._make(folder)
        number = next(self._numbers)
        path = folder / f"{self._writer}-{number}"
        try:
            with open(path, "xb") as file:
                file.write(data)
                file.flush()
                self._sync(file.fileno())
        except OSError:
            path.unlink(missing_ok=True)
            raise
        if number == 0:
            # Remove what dead writers left. A slow writer that is still alive finds its file gone and tries again.
            before = path.stat().st_mtime - _ABANDONED
            with suppress(OSError), os.scandir(folder) as found:
                for child in found:
                    if child.stat(follow_symlinks=False).st_mtime < before:
                        os.unlink(child)
        return path

    def _place(self, unfinished: Path, path: Path) -> bool:
        """Give a file its own name; false if the name is taken."""
        for tries_left in reversed(range(_TRIES)):
            try:
                self._make(path.parent)
                return self._link_once(unfinished, path)
            except FileNotFoundError:
                if not tries_left:
                    raise
        raise AssertionError("the last try returns or raises")

    def _link_once(self, unfinished: Path, path: Path) -> bool:
        try:
            self._link(unfinished, path)
        except FileExistsError:
            # Over NFS the answer to a successful link may be lost, and the repeated request finds the name taken.
            with suppress(FileNotFoundError):
                return os.path.samefile(unfinished, path)
            return False
        except OSError as error:
            if error.errno in _NO_HARD_LINKS:
                raise StoreRefusedError(
                    f"{self.url}: the file system has no hard links ({error.strerror}), which the store needs to "
                    "create an object once; keep the store on another, such as ext4, xfs, apfs, ntfs or nfs"
                ) from error
            raise
        return True

    def _make(self, folder: Path) -> None:
        """Create a folder and those above it, if they are missing. Their names are on the disk on return."""
        missing = [above for above in (folder, *folder.parents) if not above.exists()]
        # Another process may have created a folder and not have flushed its name yet.
        unsure = [above for above in (folder, *folder.parents) if self._root in above.parents]
        for above in reversed(missing):
            above.mkdir(exist_ok=True)
        flushed = self._flushed.copy()  # other threads add to it
        for above in {*missing, *unsure} - (flushed - {*missing}):
            self._sync_folder(above.parent)
            self._flushed.add(above)

    def _sync_folder(self, folder: Path) -> None:
        with suppress(FileNotFoundError):  # its last object was deleted meanwhile
            sync_folder(folder, self._sync)

    def _remove(self, path: Path) -> None:
        with suppress(FileNotFoundError, NotADirectoryError):
            path.unlink()
        with suppress(OSError):  # the folder holds other objects, or is gone
            for folder in path.parents:
                if folder == self._root:
                    return
                folder.rmdir()


def _read(path: Path, limit: int, size: int | None, partial: bool) -> bytes | None:
    try:
        if not stat.S_ISREG(os.lstat(path).st_mode):
            # A link could lead out of the store, and reading a pipe would wait.
            return b"" if partial else None
        with open(path, "rb") as file:
            length = os.fstat(file.fileno()).st_size
            if partial:
                return file.read(limit + 1)
            return file.read(length) if length <= limit and size in (None, length) else None
    except (FileNotFoundError, NotADirectoryError):
        return None


def _walk(folder: Path, before: str, prefix: str, marker: str) -> Iterator[Entry]:
    """The objects under a folder whose names begin with `before`, in ascending order of the whole names.

    A folder is sorted as its name with the `/` that follows it: `a-1` comes before `a/1`.
    """
    try:
        with os.scandir(folder) as found:
            # Most of a long history comes before the marker and is left out before the disk is asked about it. A
            # folder that comes before the marker may hold names that come after it.
            near = [child for child in found if _may_follow(before + child.name, marker)]
            children = sorted(
                (before + child.name + "/" * child.is_dir(follow_symlinks=False), child) for child in near
            )
    except (FileNotFoundError, NotADirectoryError):
        return
    for name, child in children:
        if not name.startswith(prefix) or not is_name(name.removesuffix("/")):
            continue
        if name.endswith("/"):
            if _may_follow(name, marker):
                yield from _walk(folder / child.name, name, prefix, marker)
        elif name > marker:
            try:
                found_there = child.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            if stat.S_ISREG(found_there.st_mode):
                yield Entry(name, found_there.st_size)


def _may_follow(name: str, marker: str) -> bool:
    """Whether a name, or a name that starts with it, can come after a marker."""
    return name > marker or marker.startswith(name)
