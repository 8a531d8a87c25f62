"""Files that are either wholly there or not at all, also after a crash, a full disk or a power cut.

A file is written beside its place, flushed to the disk, renamed over it, and the folder that holds the name
is flushed as well (Pillai et al., "All File Systems Are Not Created Equal", OSDI 2014, on why each of these
is needed).
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import stat
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import NamedTuple

from speedtronic.errors import CheckpointError

# Bytes hashed and written at a time: small enough to be written while still in the cache, and for a pause to come soon.
_CHUNK = 2 * 2**20


class FileSystem:
    """The operations that checkpoints are made of, each of which a test can let fail."""

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
        """Return when the file's bytes are on the disk, and not merely in its cache."""
        if sys.platform == "darwin":
            import fcntl

            fcntl.fcntl(file, fcntl.F_FULLFSYNC)
        else:
            os.fsync(file)

    def sync_directory(self, path: Path) -> None:
        """Return when the names in a folder are on the disk. Windows has no such call; it journals names."""
        if sys.platform == "win32":
            return
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

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
            CheckpointError: it is a link or not a file, which no checkpoint holds.
        """
        if not stat.S_ISREG(os.lstat(path).st_mode):
            raise CheckpointError("it is not a plain file")
        return FileIO(path, "rb")


class FileRecord(NamedTuple):
    """What a manifest says about a file: its size in bytes and the SHA-256 of its contents, in hex."""

    size: int
    sha256: str


def ensure_directory(fs: FileSystem, path: Path) -> None:
    """Make a folder and those above it, where they are missing; their names are on the disk on return."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    for folder in reversed(missing):
        fs.make_directory(folder)
        fs.sync_directory(folder.parent)


def no_pause() -> None:
    """Write as fast as the disk takes it."""


def write_file(
    fs: FileSystem, path: Path, chunks: Iterable[bytes | memoryview], pause: Callable[[], None] = no_pause
) -> FileRecord:
    """Write a new file and return when it is on the disk.

    Args:
        pause: called after each part of a few megabytes, to slow the writing down.

    Raises:
        OSError: the disk is full, or failed; what was written is left for the caller to remove.
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
    """Put a file in its place in one durable step: readers see the old contents or the new.

    Raises:
        OSError: the disk is full, or failed; the old file stays.
    """
    beside = path.with_name(f".tmp-{path.name}-{os.getpid()}")
    beside.unlink(missing_ok=True)
    try:
        write_file(fs, beside, [memoryview(data)])
        fs.rename(beside, path)
    except BaseException:  # whatever ends the write, an interrupt too, leaves nothing beside; it is raised on
        beside.unlink(missing_ok=True)
        raise
    fs.sync_directory(path.parent)


def read_small(fs: FileSystem, path: Path, limit: int) -> bytes:
    """The bytes of a file that is expected to be small.

    Raises:
        CheckpointError: it is a link, not a file, or larger than `limit` bytes.
        OSError: it is not there, or cannot be read.
    """
    with fs.open(path) as file:
        if os.fstat(file.fileno()).st_size > limit:
            raise CheckpointError(f"it is larger than {limit} bytes")
        return file.readall()


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Let whatever goes wrong with a file or folder be a CheckpointError that names it."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error


def fill(file: FileIO, buffer: memoryview) -> None:
    """Fill a buffer with the file's next bytes. Raises CheckpointError where it ends before."""
    while buffer:
        count = file.readinto(buffer)
        if not count:
            raise CheckpointError("it ends too early")
        buffer = buffer[count:]


class VerifiedReader:
    """Reads a file from start to end, taking its checksum on the way."""

    def __init__(self, file: FileIO) -> None:
        self._file = file
        self._digest = hashlib.sha256()

    def read_into(self, buffer: memoryview) -> None:
        """Fill the buffer with the file's next bytes.

        Raises:
            CheckpointError: the file ends before.
        """
        while buffer:
            count = self._file.readinto(buffer[:_CHUNK])
            if not count:
                raise CheckpointError("it ends too early")
            self._digest.update(buffer[:count])
            buffer = buffer[count:]

    def sha256(self) -> str:
        return self._digest.hexdigest()


@contextmanager
def verified(fs: FileSystem, path: Path, record: FileRecord) -> Iterator[VerifiedReader]:
    """A reader for a file that must be the recorded one; the block has to read all of it.

    Raises:
        CheckpointError: on entry, it is missing or has another size; on exit, its contents differ.
        OSError: the disk failed.
    """
    try:
        with fs.open(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size != record.size:
                raise CheckpointError(f"it has {size} bytes instead of {record.size}")
            reader = VerifiedReader(file)
            yield reader
        if reader.sha256() != record.sha256:
            raise CheckpointError("its contents do not match their checksum")
    except FileNotFoundError:
        raise CheckpointError(f"{path.name} is missing") from None
    except CheckpointError as error:
        raise CheckpointError(f"{path.name} is damaged: {error}") from error


def copy_file(fs: FileSystem, source: Path, target: Path, record: FileRecord) -> None:
    """Copy a file that must be the recorded one; the copy is on the disk on return.

    Raises:
        CheckpointError: the source is missing or damaged.
        OSError: a disk is full, or failed; what was written is left for the caller to remove.
    """
    with verified(fs, source, record) as reader:
        write_file(fs, target, _chunks(reader, record.size))


def _chunks(reader: VerifiedReader, size: int) -> Iterator[memoryview]:
    buffer = memoryview(bytearray(min(_CHUNK, size)))
    while size:
        part = buffer[:size]
        reader.read_into(part)
        yield part
        size -= len(part)
