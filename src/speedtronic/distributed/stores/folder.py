"""A store in a folder, local or mounted.

An object is written beside its place, flushed, and given its name by a hard link, which fails where the name is taken:
so it is there whole or not at all, and once. (Pillai et al., "All File Systems Are Not Created Equal", OSDI 2014, on
why file and folders are each flushed.)
"""

from __future__ import annotations

import errno
import os
import stat
import sys
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
from speedtronic.errors import StoreRefusedError, StoreUnavailableError

T = TypeVar("T")

# Begins with a dot, which no name does: what lies there is never listed.
_UNFINISHED = ".unfinished"
_LEFT_BEHIND = 24 * 3600.0  # seconds after which an unfinished file is taken for one whose writer is gone
# A folder can vanish between being made and being used, since the last object to leave takes it along.
_TRIES = 8

_NO_ACCESS = {errno.EACCES, errno.EPERM, errno.EROFS}
_NOT_A_FOLDER = {errno.ENOTDIR, errno.EEXIST, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.EINVAL}
_NO_FLUSH = {errno.EINVAL, errno.ENOTSUP}  # what mounts answer that cannot flush a folder
_NO_HARD_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK, errno.EXDEV, errno.EINVAL}


def flush(descriptor: int) -> None:
    """Return when a file's bytes, or a folder's names, are on the disk, and not merely in its cache."""
    if sys.platform == "darwin":
        import fcntl

        fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
    else:
        os.fsync(descriptor)


class FolderStore:
    """Objects as files under a folder, which is made with the first of them.

    Args:
        folder: where they lie. A relative one is resolved now.
        sync: returns when what a descriptor refers to is on the disk, as `os.fsync` does.
        link: gives a file a second name, as `os.link` does.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        sync: Callable[[int], None] = flush,
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
        timeout: float = REQUEST_TIMEOUT,
    ) -> bytes | None:
        path = self._root / checked_name(name)
        return self._ask(timeout, lambda: expected_bytes(_read(path, limit, size), limit, size, sha256))

    def list_after(self, prefix: str, marker: str = "", *, timeout: float = REQUEST_TIMEOUT) -> Listing:
        above = checked_prefix(prefix).rpartition("/")[0]
        folder = self._root / above
        before = f"{above}/" if above else ""
        return self._ask(timeout, lambda: first_page(_walk(folder, before, prefix, marker)))

    def delete(self, name: str, *, timeout: float = REQUEST_TIMEOUT) -> None:
        path = self._root / checked_name(name)
        self._ask(timeout, lambda: self._remove(path))

    def close(self) -> None:
        """Nothing is held."""

    def _ask(self, timeout: float, call: Callable[[], T]) -> T:
        try:
            return self._calls.within(timeout, call)
        except OSError as error:
            raise self._explained(error) from error

    def _explained(self, error: OSError) -> StoreRefusedError | StoreUnavailableError:
        why = error.strerror or str(error)
        if error.errno in _NO_ACCESS:
            return StoreRefusedError(f"{self.url}: {why}; check who may read and write this folder")
        if error.errno in _NOT_A_FOLDER:
            return StoreRefusedError(f"{self.url}: {why}; the store must be a folder that holds nothing else")
        return StoreUnavailableError(f"{self.url}: {why}")

    def _create(self, path: Path, data: Buffer) -> bool:
        if path.exists():
            # Another's name, and perhaps not on the disk yet; whoever is told that it is there builds on it.
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
            _sweep(folder, path.stat().st_mtime - _LEFT_BEHIND)
        return path

    def _place(self, unfinished: Path, path: Path) -> bool:
        for tries_left in reversed(range(_TRIES)):
            try:
                self._make(path.parent)
                return self._give_name(unfinished, path)
            except FileNotFoundError:
                if not tries_left:
                    raise
        raise AssertionError("the last try returns or raises")

    def _give_name(self, unfinished: Path, path: Path) -> bool:
        try:
            self._link(unfinished, path)
        except FileExistsError:
            # Over NFS the reply to a link that was made may be lost, and its repetition finds the name taken.
            return _is_same(unfinished, path)
        except OSError as error:
            if error.errno in _NO_HARD_LINKS:
                raise StoreRefusedError(
                    f"{self.url}: the file system has no hard links ({error.strerror}), by which an object is created "
                    "once; keep the store on another, such as ext4, xfs, apfs, ntfs or nfs"
                ) from error
            raise
        return True

    def _make(self, folder: Path) -> None:
        """Make a folder and those above it, where they are missing; their names are on the disk on return."""
        missing = [above for above in (folder, *folder.parents) if not above.exists()]
        # Another process may have made a folder, and may not have flushed its name yet.
        unsure = [above for above in (folder, *folder.parents) if self._root in above.parents]
        for above in reversed(missing):
            above.mkdir(exist_ok=True)
        flushed = self._flushed.copy()  # other threads add to it
        for above in {*missing, *unsure} - (flushed - {*missing}):
            self._sync_folder(above.parent)
            self._flushed.add(above)

    def _sync_folder(self, folder: Path) -> None:
        if sys.platform == "win32":
            return  # has no such call; it journals names
        try:
            descriptor = os.open(folder, os.O_RDONLY)
        except FileNotFoundError:
            return  # its last object was deleted meanwhile
        try:
            self._sync(descriptor)
        except OSError as error:
            if error.errno not in _NO_FLUSH:
                raise
        finally:
            os.close(descriptor)

    def _remove(self, path: Path) -> None:
        with suppress(FileNotFoundError, NotADirectoryError):
            path.unlink()
        with suppress(OSError):  # the folder holds other objects, or is gone
            for folder in path.parents:
                if folder == self._root:
                    return
                folder.rmdir()


def _read(path: Path, limit: int, size: int | None) -> bytes | None:
    try:
        if not stat.S_ISREG(os.lstat(path).st_mode):
            return None  # a link could lead out of the store, and a pipe would be waited for
        with open(path, "rb") as file:
            length = os.fstat(file.fileno()).st_size
            return file.read(length) if length <= limit and size in (None, length) else None
    except (FileNotFoundError, NotADirectoryError):
        return None


def _walk(folder: Path, before: str, prefix: str, marker: str) -> Iterator[Entry]:
    """The objects under a folder whose names begin with `before`, in ascending order of the whole names.

    A folder is sorted as its name with the `/` that follows it: `a-1` comes before `a/1`.
    """
    try:
        with os.scandir(folder) as found:
            # Most of a long history comes before the marker: it is left out before anything is asked of the disk. What
            # comes after it may lie in a folder that does not.
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
    """Whether a name, or one that it is the beginning of, can come after a marker."""
    return name > marker or marker.startswith(name)


def _is_same(one: Path, other: Path) -> bool:
    try:
        return os.path.samefile(one, other)
    except FileNotFoundError:
        return False


def _sweep(folder: Path, before: float) -> None:
    """Remove what writers that are gone left unfinished. One that still writes finds its file gone and tries again."""
    with suppress(OSError), os.scandir(folder) as found:
        for child in found:
            if child.stat(follow_symlinks=False).st_mtime < before:
                os.unlink(child)
