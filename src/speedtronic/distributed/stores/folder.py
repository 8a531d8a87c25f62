"""A store in a folder, local or mounted.

An object is written under a temporary name, flushed, and then given its own name by a hard link, which fails if the
name is taken. So it is there whole or not at all, and is created once.

Each request opens the root and reaches everything else relative to that handle, one folder at a time and through no
link. So it stays in the folder that it began in, whatever is renamed, mounted or linked meanwhile.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
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
from speedtronic.durable.files import sync, sync_folder, sync_open_folder
from speedtronic.errors import StoreRefusedError, StoreUnavailableError

T = TypeVar("T")

_IDENTITY = "store.json"  # an object that each store has once, and no other store has with the same bytes
_UNFINISHED = ".unfinished"  # names of objects do not begin with a dot, so nothing in it is ever listed
_ABANDONED = 24 * 3600.0  # seconds after which the writer of an unfinished file is taken for dead
_TRIES = 8  # a folder can vanish between being made and being used: the deletion of its last object removes it

_NO_ACCESS = {errno.EACCES, errno.EPERM, errno.EROFS}
_NOT_A_FOLDER = {errno.ENOTDIR, errno.EEXIST, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.EINVAL}
_NO_HARD_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK, errno.EXDEV, errno.EINVAL}
_NOT_A_FILE = {errno.ELOOP, errno.ENXIO}  # what opening a link, and a socket, is answered by


def _hard_link(source_folder: int, source: str, folder: int, name: str) -> None:
    os.link(source, name, src_dir_fd=source_folder, dst_dir_fd=folder, follow_symlinks=False)


class FolderStore:
    """Objects as files under a folder, which is created with the first of them, and never again.

    A folder that was used and is gone, or has another folder in its place, is a mount that is not there: requests are
    StoreUnavailableErrors until it returns. The store knows it again by its object `store.json`, once that was created
    or read through this FolderStore. Until then it knows it by its number on the disk, and takes another folder for a
    mount that came late if it has a `store.json`: whether that is the right one is for the reader of it to say.

    Args:
        folder: where they lie. A relative path, or one through links, is resolved now. Links inside are never followed.
        sync: flushes the file or folder behind a descriptor to the disk, as `os.fsync` does.
        link: gives a file a second name: (handle of its folder, its name, handle of another folder, name in that).

    Raises:
        StoreRefusedError: on Windows, which cannot open a file relative to a folder's handle.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        sync: Callable[[int], None] = sync,
        link: Callable[[int, str, int, str], None] = _hard_link,
    ) -> None:
        # The path that was given, not the resolved one: the files of a node are kept by the address of its store.
        self._url = f"dir://{Path(folder).absolute()}"
        if sys.platform == "win32":
            raise StoreRefusedError(
                f"{self._url}: Windows cannot open a file relative to a folder, which keeps a store inside its own; "
                "use s3://bucket/prefix, or run in the Windows Subsystem for Linux"
            )
        self._path = Path(os.path.realpath(folder))
        self._sync = sync
        self._link = link
        self._calls = BoundedCalls(self._url)
        self._numbers = count()
        self._flushed: set[tuple[str, ...]] = set()
        self._writer = f"{os.getpid()}-{os.urandom(8).hex()}"
        self._first = threading.Lock()  # held while the root is made or seen for the first time
        self._root: tuple[int, int] | None = None  # device and inode, from the first request that found or made it
        self._identity: bytes | None = None  # the bytes of `store.json`

    @property
    def url(self) -> str:
        return self._url

    def put_if_absent(self, name: str, data: Buffer, *, timeout: float = REQUEST_TIMEOUT) -> bool:
        *folders, last = checked_name(name).split("/")

        def create() -> bool:
            with self._opened_root(make=True) as root:
                created = self._create(root, folders, last, data)
                if created and name == _IDENTITY:
                    self._identity = bytes(data)
                return created

        return self._ask(timeout, create)

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
        *folders, last = checked_name(name).split("/")

        def read() -> bytes | None:
            with suppress(FileNotFoundError, NotADirectoryError), self._opened_root() as root:
                with _opened(root, folders) as folder:
                    data = _read(folder, last, limit, size, partial)
                found = expected_bytes(data, limit, size, sha256, partial=partial)
                if name == _IDENTITY and found and self._identity is None and _is_identity(found):
                    self._identity = found
                return found
            return None

        return self._ask(timeout, read)

    def list_after(self, prefix: str, marker: str = "", *, timeout: float = REQUEST_TIMEOUT) -> Listing:
        above = checked_prefix(prefix).rpartition("/")[0]

        def scan() -> Listing:
            folders, before = (above.split("/"), f"{above}/") if above else ([], "")
            with (
                suppress(FileNotFoundError, NotADirectoryError),
                self._opened_root() as root,
                _opened(root, folders) as folder,
            ):
                return first_page(_walk(folder, before, prefix, marker))
            return Listing((), more=False)

        return self._ask(timeout, scan)

    def delete(self, name: str, *, timeout: float = REQUEST_TIMEOUT) -> None:
        *folders, last = checked_name(name).split("/")

        def remove() -> None:
            with suppress(FileNotFoundError, NotADirectoryError), self._opened_root() as root:
                _remove(root, folders, last)

        self._ask(timeout, remove)

    def close(self) -> None:
        """Nothing to close."""

    def _ask(self, timeout: float, call: Callable[[], T]) -> T:
        try:
            return self._calls.within(timeout, call)
        except OSError as error:
            where = f"{error.filename}: " if isinstance(error.filename, str) else ""  # a name below the root
            why = f"{self.url}: {where}{error.strerror or error}"
            if error.errno in _NO_ACCESS:
                raise StoreRefusedError(f"{why}; check who may read and write this folder") from error
            if error.errno in _NOT_A_FOLDER:
                message = f"{why}; the store must be a folder that holds nothing else, and no links"
                raise StoreRefusedError(message) from error
            raise StoreUnavailableError(why) from error

    @contextmanager
    def _opened_root(self, *, make: bool = False) -> Iterator[int]:
        """A handle of the root, which is the one of the requests before, in whatever place it lies afterwards.

        Raises:
            FileNotFoundError: it is not there yet, and is not to be made.
            StoreUnavailableError: it is not there any more, or another is in its place.
        """
        seen = self._root is not None
        try:
            root = _open_folder(self._path)
        except FileNotFoundError:
            if seen:
                raise StoreUnavailableError(f"{self.url} is gone; is it mounted?") from None
            if not make:
                raise
            root = self._make_root()
        except NotADirectoryError as error:
            # Not an OSError, which would be taken for the absence of an object.
            message = f"{self.url}: {error.strerror}; the store must be a folder that holds nothing else, and no links"
            raise StoreRefusedError(message) from error
        try:
            if not self._is_same(root):
                what = "another folder" if self._identity is None else f"a folder without this store's {_IDENTITY}"
                raise StoreUnavailableError(f"{self.url}: {what} is in its place; is it mounted?")
            yield root
        finally:
            os.close(root)

    def _make_root(self) -> int:
        with self._first:
            if self._root is None:  # no other thread has seen it meanwhile
                missing = [folder for folder in (self._path, *self._path.parents) if not folder.exists()]
                for folder in reversed(missing):
                    folder.mkdir(exist_ok=True)
                    sync_folder(folder.parent, self._sync)
            root = _open_folder(self._path)
            self._root = self._root or _number(os.fstat(root))
            return root

    def _is_same(self, root: int) -> bool:
        """Whether this is the root of the requests before; true of the first that is seen."""
        if (identity := self._identity) is not None:
            # A mount that returns may have other numbers, and a new folder may have those of one that was removed.
            with suppress(FileNotFoundError):
                return _read(root, _IDENTITY, len(identity), len(identity), partial=False) == identity
            return False
        with self._first:
            number = _number(os.fstat(root))
            # A process may start before its store is mounted, and see the bare folder first.
            if self._root is None or (self._root != number and _has_identity(root)):
                self._root = number
            return self._root == number

    def _create(self, root: int, folders: Sequence[str], name: str, data: Buffer) -> bool:
        with suppress(FileNotFoundError), _opened(root, folders) as folder:
            os.stat(name, dir_fd=folder, follow_symlinks=False)
            # Another writer created it, and its name is perhaps not on the disk yet. The caller relies on it from now.
            sync_open_folder(folder, self._sync)
            return False
        with self._made(root, [_UNFINISHED]) as unfinished:
            temporary = self._write(unfinished, data)
            try:
                return self._place(unfinished, temporary, root, folders, name)
            finally:
                with suppress(FileNotFoundError):
                    os.unlink(temporary, dir_fd=unfinished)

    def _write(self, folder: int, data: Buffer) -> str:
        """Write the bytes to a temporary file, which is on the disk on return."""
        number = next(self._numbers)
        name = f"{self._writer}-{number}"
        descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666, dir_fd=folder)
        try:
            with open(descriptor, "wb") as file:
                file.write(data)
                file.flush()
                self._sync(file.fileno())
        except OSError:
            with suppress(FileNotFoundError):
                os.unlink(name, dir_fd=folder)
            raise
        if number == 0:
            # Remove what dead writers left. A slow writer that is still alive finds its file gone and tries again.
            before = os.stat(name, dir_fd=folder, follow_symlinks=False).st_mtime - _ABANDONED
            with suppress(OSError), os.scandir(folder) as found:
                for child in found:
                    if child.stat(follow_symlinks=False).st_mtime < before:
                        os.unlink(child.name, dir_fd=folder)
        return name

    def _place(self, unfinished: int, temporary: str, root: int, folders: Sequence[str], name: str) -> bool:
        """Give a file its own name, which is on the disk on return; false if the name is taken."""
        for tries_left in reversed(range(_TRIES)):
            try:
                with self._made(root, folders) as folder:
                    created = self._link_once(unfinished, temporary, folder, name)
                    sync_open_folder(folder, self._sync)
                    return created
            except FileNotFoundError:
                if not tries_left:
                    raise
        raise AssertionError("the last try returns or raises")

    def _link_once(self, unfinished: int, temporary: str, folder: int, name: str) -> bool:
        try:
            self._link(unfinished, temporary, folder, name)
        except FileExistsError:
            # Over NFS the answer to a successful link may be lost, and the repeated request finds the name taken.
            with suppress(FileNotFoundError):
                ours = os.stat(temporary, dir_fd=unfinished, follow_symlinks=False)
                there = os.stat(name, dir_fd=folder, follow_symlinks=False)
                return _number(ours) == _number(there)
            return False
        except OSError as error:
            if error.errno in _NO_HARD_LINKS:
                raise StoreRefusedError(
                    f"{self.url}: the file system has no hard links ({error.strerror}), which the store needs to "
                    "create an object once; keep the store on another, such as ext4, xfs, apfs, ntfs or nfs"
                ) from error
            raise
        return True

    @contextmanager
    def _made(self, root: int, folders: Sequence[str]) -> Iterator[int]:
        """A handle of a folder, made with those above it where they are missing. Their names are on the disk."""
        for depth in range(len(folders)):
            path = tuple(folders[: depth + 1])
            with _opened(root, path[:-1]) as above:
                try:
                    os.stat(path[-1], dir_fd=above, follow_symlinks=False)
                except FileNotFoundError:
                    with suppress(FileExistsError):
                        os.mkdir(path[-1], dir_fd=above)
                else:
                    # Another process may have created it and not have flushed its name yet.
                    if path in self._flushed:
                        continue
                sync_open_folder(above, self._sync)
                self._flushed.add(path)
        with _opened(root, folders) as folder:
            yield folder


def _number(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino


def _is_identity(data: bytes) -> bool:
    """Whether bytes can be the identity of a store. Junk in its place may be gone when the true folder returns."""
    try:
        return set(json.loads(data)) == {"id", "protocol"}
    except (ValueError, TypeError, RecursionError):
        return False


def _has_identity(root: int) -> bool:
    with suppress(FileNotFoundError):
        return stat.S_ISREG(os.stat(_IDENTITY, dir_fd=root, follow_symlinks=False).st_mode)
    return False


def _open_folder(name: str | Path, above: int | None = None) -> int:
    """A handle of a folder. Raises NotADirectoryError where there is something else, such as a link."""
    try:
        return os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=above)
    except OSError as error:
        if error.errno == errno.ELOOP:  # what some systems say of a link, where others say that it is no folder
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), name) from error
        raise


@contextmanager
def _opened(root: int, folders: Sequence[str]) -> Iterator[int]:
    """A handle of a folder below the root. An error has the path of the folder that is missing, or is none."""
    handle = os.dup(root)
    try:
        for depth, name in enumerate(folders):
            try:
                below = _open_folder(name, handle)
            except OSError as error:
                raise OSError(error.errno, error.strerror, "/".join(folders[: depth + 1])) from error
            os.close(handle)
            handle = below
        yield handle
    finally:
        os.close(handle)


def _read(folder: int, name: str, limit: int, size: int | None, partial: bool) -> bytes | None:
    taken = b"" if partial else None
    try:
        # Without waiting for a writer, where it is a pipe.
        descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    except OSError as error:
        if error.errno in _NOT_A_FILE:
            return taken
        raise
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            return taken
        if not partial and (found.st_size > limit or size not in (None, found.st_size)):
            return None
        with open(descriptor, "rb", closefd=False) as file:
            return file.read(limit + 1 if partial else found.st_size)
    finally:
        os.close(descriptor)


def _remove(root: int, folders: Sequence[str], name: str) -> None:
    with suppress(FileNotFoundError, NotADirectoryError), _opened(root, folders) as folder:
        os.unlink(name, dir_fd=folder)
    with suppress(OSError):  # the folder holds other objects, or is gone
        for depth in reversed(range(len(folders))):
            with _opened(root, folders[:depth]) as above:
                os.rmdir(folders[depth], dir_fd=above)


def _walk(folder: int, before: str, prefix: str, marker: str) -> Iterator[Entry]:
    """The objects under a folder whose names begin with `before`, in ascending order of the whole names.

    A folder is sorted as its name with the `/` that follows it: `a-1` comes before `a/1`.
    """
    with os.scandir(folder) as found:
        # Most of a long history comes before the marker and is left out before the disk is asked about it. A
        # folder that comes before the marker may hold names that come after it.
        near = [child for child in found if _may_follow(before + child.name, marker)]
        children = sorted((before + child.name + "/" * child.is_dir(follow_symlinks=False), child) for child in near)
    for name, child in children:
        if not name.startswith(prefix) or not is_name(name.removesuffix("/")):
            continue
        if name.endswith("/"):
            if _may_follow(name, marker):
                # It may be gone by now, or something else.
                with suppress(FileNotFoundError, NotADirectoryError), _opened(folder, [child.name]) as below:
                    yield from _walk(below, name, prefix, marker)
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
