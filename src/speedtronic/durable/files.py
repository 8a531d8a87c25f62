"""Files that are either complete or absent, also after a crash, a full disk or a power cut.

A file is written under a temporary name beside its place, flushed to the disk and renamed. Then the folder that holds
the name is flushed. (Pillai et al., "All File Systems Are Not Created Equal", OSDI 2014, explains why each step is
needed.)
"""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
import shutil
import socket
import stat
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import NamedTuple

from speedtronic.errors import InputError

# Bytes hashed and written at a time: small enough to stay in the processor's cache, and for a pause to come soon.
_CHUNK = 2 * 2**20

# What some network mounts answer because they cannot flush a folder.
_CANNOT_FLUSH_FOLDERS = {errno.EINVAL, errno.ENOTSUP}


class DamagedFileError(InputError, RuntimeError):
    """A file is missing, is not a plain file, or does not hold what was written to it."""


def sync(descriptor: int) -> None:
    """Return when a file's bytes, or a folder's names, are on the disk and not only in its cache."""
    if sys.platform == "darwin":
        import fcntl

        fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
    else:
        os.fsync(descriptor)


def sync_folder(path: Path, sync: Callable[[int], None] = sync) -> None:
    """Return when the names in a folder are on the disk, or at once where the file system cannot flush folders."""
    if sys.platform == "win32":
        return  # Windows has no such call; it journals names.
    descriptor = os.open(path, os.O_RDONLY)
    try:
        sync_open_folder(descriptor, sync)
    finally:
        os.close(descriptor)


def sync_open_folder(descriptor: int, sync: Callable[[int], None] = sync) -> None:
    """The same for a folder that is open."""
    try:
        sync(descriptor)
    except OSError as error:
        if error.errno not in _CANNOT_FLUSH_FOLDERS:
            raise


class FileSystem:
    """The operations that change or open files. A test can replace each of them and let it fail."""

    def make_directory(self, path: Path) -> None:
        path.mkdir(exist_ok=True)

    def create(self, path: Path) -> FileIO:
        """A new file for writing; `FileExistsError` when there is one."""
        return FileIO(path, "xb")

    def write(self, file: FileIO, data: memoryview) -> None:
        while data:
            written = file.write(data)
            if not written:
                raise OSError(errno.EIO, "the disk takes no more bytes, and does not say why")
            data = data[written:]

    def sync(self, file: FileIO) -> None:
        sync(file.fileno())

    def sync_directory(self, path: Path) -> None:
        sync_folder(path)

    def rename(self, source: Path, target: Path) -> None:
        """Give `source` the name of `target` in one step; a file that had the name is replaced."""
        os.replace(source, target)

    def remove_tree(self, path: Path) -> None:
        shutil.rmtree(path)

    def remove_file(self, path: Path) -> None:
        path.unlink()

    def open(self, path: Path) -> FileIO:
        """An existing regular file for reading.

        Raises:
            DamagedFileError: it is a link or not a file.
        """
        if not stat.S_ISREG(os.lstat(path).st_mode):
            raise DamagedFileError("it is not a plain file")
        return FileIO(path, "rb")


class FileRecord(NamedTuple):
    """The size of a file in bytes, and the SHA-256 of its contents in hex."""

    size: int
    sha256: str


# ---------------------------------------------------------------------- writing


def where_looked(path: Path) -> str:
    """What a message about a missing `path` ends with: where a relative one leads, and what to do. Else nothing."""
    if path.is_absolute():
        return ""
    return (
        f"; looked for {path.absolute()}, since a relative path begins in the folder where the command runs: run it "
        "in the right folder, or give the whole path"
    )


def temporary_prefix(path: Path, purpose: str = "") -> str:
    """The beginning of all temporary names that this host gives beside `path`."""
    host = hashlib.blake2b(socket.gethostname().encode(), digest_size=4).hexdigest()
    return f".tmp-{purpose}{path.name}-{host}"


def temporary_name(path: Path, purpose: str = "") -> Path:
    """A new name beside `path`: `.tmp-<purpose><name>-<host>-<random>-<process id>`.

    No two writers get the same one. `folders.py` removes files and folders with such names that dead writers left.
    """
    return path.with_name(f"{temporary_prefix(path, purpose)}-{secrets.token_hex(4)}-{os.getpid()}")


def ensure_directory(fs: FileSystem, path: Path) -> None:
    """Make a folder and those above it where they are missing. Their names are on the disk on return."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    for folder in reversed(missing):
        fs.make_directory(folder)
        fs.sync_directory(folder.parent)


def no_pause() -> None:
    """Write as fast as the disk takes it."""


def write_file(
    fs: FileSystem, path: Path, chunks: Iterable[bytes | memoryview], pause: Callable[[], None] = no_pause
) -> FileRecord:
    """Write a new file and return when its bytes are on the disk.

    Args:
        pause: called after each part of a few megabytes, to slow the writing down.

    Raises:
        FileExistsError: there is one already.
        OSError: the disk is full, or failed. The caller removes what was written.
    """
    digest = hashlib.sha256()
    size = 0
    with fs.create(path) as file:
        for chunk in chunks:
            view = memoryview(chunk)
            for start in range(0, len(view), _CHUNK):
                part = view[start : start + _CHUNK]
                digest.update(part)
                fs.write(file, part)
                pause()
            size += len(view)
        fs.sync(file)
    return FileRecord(size, digest.hexdigest())


def replace_file(fs: FileSystem, path: Path, data: bytes | bytearray | memoryview) -> None:
    """Write a file, or replace it, in one durable step: readers see the old contents or the new.

    Raises:
        OSError: the disk is full, or failed. The old file stays.
    """
    temporary = temporary_name(path)
    try:
        write_file(fs, temporary, [memoryview(data)])
        fs.rename(temporary, path)
    except BaseException:  # an interrupt too leaves no temporary file; it is raised again
        temporary.unlink(missing_ok=True)
        raise
    fs.sync_directory(path.parent)


def copy_file(fs: FileSystem, source: Path, target: Path, record: FileRecord) -> None:
    """Copy a file that must be the recorded one. The copy is on the disk on return.

    Raises:
        DamagedFileError: the source is missing or damaged.
        OSError: a disk is full, or failed. The caller removes what was written.
    """
    with verified(fs, source, record) as reader:
        write_file(fs, target, reader.rest(record.size))


# ---------------------------------------------------------------------- reading


def read_small(fs: FileSystem, path: Path, limit: int) -> bytes:
    """The bytes of a file that is expected to be small.

    Raises:
        DamagedFileError: it is a link, not a file, or larger than `limit` bytes.
        OSError: it is not there, or cannot be read.
    """
    with fs.open(path) as file:
        if os.fstat(file.fileno()).st_size > limit:
            raise DamagedFileError(f"it is larger than {limit} bytes")
        return file.readall()


def fill(file: FileIO, buffer: memoryview) -> None:
    """Fill a buffer with the file's next bytes. Raises DamagedFileError where the file ends before."""
    while buffer:
        count = file.readinto(buffer)
        if not count:
            raise DamagedFileError("it ends too early")
        buffer = buffer[count:]


class VerifiedReader:
    """Reads a file from start to end and takes its checksum on the way."""

    def __init__(self, file: FileIO) -> None:
        self._file = file
        self._digest = hashlib.sha256()

    def read_into(self, buffer: memoryview) -> None:
        """Fill the buffer with the file's next bytes. Raises DamagedFileError where the file ends before."""
        for start in range(0, len(buffer), _CHUNK):
            part = buffer[start : start + _CHUNK]
            fill(self._file, part)
            self._digest.update(part)

    def rest(self, size: int) -> Iterator[memoryview]:
        """The next `size` bytes in parts, each of which the next one overwrites."""
        buffer = memoryview(bytearray(min(_CHUNK, size)))
        for start in range(0, size, _CHUNK):
            part = buffer[: size - start]
            self.read_into(part)
            yield part

    def sha256(self) -> str:
        return self._digest.hexdigest()


@contextmanager
def verified(fs: FileSystem, path: Path, record: FileRecord) -> Iterator[VerifiedReader]:
    """A reader for a file that must be the recorded one. The block has to read all of it.

    Raises:
        DamagedFileError: on entry, the file is missing or has another size; on exit, its contents differ.
        OSError: the disk failed.
    """
    try:
        with fs.open(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size != record.size:
                raise DamagedFileError(f"it has {size} bytes instead of {record.size}")
            reader = VerifiedReader(file)
            yield reader
        if reader.sha256() != record.sha256:
            raise DamagedFileError("its contents do not match their checksum")
    except FileNotFoundError:
        raise DamagedFileError(f"{path.name} is missing") from None
    except DamagedFileError as error:
        raise DamagedFileError(f"{path.name} is damaged: {error}") from error
