"""A node's own files: what it must still know after a crash."""

from __future__ import annotations

import threading
from pathlib import Path

from speedtronic.distributed.stores.base import Buffer
from speedtronic.durable.files import FileSystem, ensure_directory, replace_file


class NodeFiles:
    """Files in one folder, each replaced whole and durably (see `requests.Files`).

    The caller must hold the folder: leftovers of a killed process are removed. After `close` every call raises OSError,
    so that a late thread does not touch the files of the folder's next holder.

    Args:
        directory: created if absent.

    Raises:
        OSError: the folder cannot be created or read.
    """

    def __init__(self, directory: Path, fs: FileSystem | None = None) -> None:
        self._directory = directory
        self._fs = fs or FileSystem()
        self._lock = threading.Lock()
        self._closed = False
        ensure_directory(self._fs, directory)
        for leftover in directory.glob(".tmp-*"):  # what `replace_file` writes before it renames
            self._fs.remove_file(leftover)

    def write(self, name: str, data: Buffer) -> None:
        with self._lock:
            replace_file(self._fs, self._path(name), data)

    def read(self, name: str) -> bytes | None:
        with self._lock:
            path = self._path(name)
            return path.read_bytes() if path.exists() else None

    def remove(self, name: str) -> None:
        with self._lock:
            path = self._path(name)
            if path.exists():
                self._fs.remove_file(path)
                self._fs.sync_directory(self._directory)

    def close(self) -> None:
        with self._lock:
            self._closed = True

    def _path(self, name: str) -> Path:
        if self._closed:
            raise OSError(f"the files of {self._directory} are closed")
        return self._directory / name
