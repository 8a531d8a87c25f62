"""A node's own files: what it must still know after a crash."""

from __future__ import annotations

import threading
from pathlib import Path

from speedtronic.distributed.stores.base import Buffer
from speedtronic.durable.files import FileSystem, ensure_directory, replace_file

_BESIDE = ".tmp-*"  # what `replace_file` writes before it is renamed


class NodeFiles:
    """Files in one folder, each replaced whole and durably (see `effects.Files`).

    Made by whoever holds the folder: what a killed process left half written is removed. After `close` every call is an
    OSError, so that a thread that is late does not touch what the folder's next holder writes.

    Args:
        directory: made when absent.

    Raises:
        OSError: the folder cannot be made or read.
    """

    def __init__(self, directory: Path, fs: FileSystem | None = None) -> None:
        self._directory = directory
        self._fs = fs or FileSystem()
        self._lock = threading.Lock()
        self._closed = False
        ensure_directory(self._fs, directory)
        for beside in directory.glob(_BESIDE):
            self._fs.remove_file(beside)

    def write(self, name: str, data: Buffer) -> None:
        with self._lock:
            replace_file(self._fs, self._place(name), data)

    def read(self, name: str) -> bytes | None:
        try:
            with self._lock:
                return self._place(name).read_bytes()
        except FileNotFoundError:
            return None

    def remove(self, name: str) -> None:
        with self._lock:
            path = self._place(name)
            if path.exists():
                self._fs.remove_file(path)
                self._fs.sync_directory(self._directory)

    def close(self) -> None:
        with self._lock:
            self._closed = True

    def _place(self, name: str) -> Path:
        if self._closed:
            raise OSError(f"the files of {self._directory} are closed")
        return self._directory / name
