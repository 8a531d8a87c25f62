"""A store in the memory of one process: for tests, and for nodes that are threads of one process."""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from typing import ClassVar

from speedtronic.distributed.stores.base import (
    REQUEST_TIMEOUT,
    Buffer,
    Entry,
    Listing,
    checked_name,
    checked_prefix,
    expected_bytes,
    first_page,
)


class MemoryStore:
    """Objects in a dict. Never fails and never lags; the tests wrap it in `FaultyStore` for that.

    Args:
        name: for messages.
    """

    _shared: ClassVar[dict[str, MemoryStore]] = {}
    _sharing: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, name: str = "") -> None:
        self._name = name
        self._lock = threading.Lock()
        self._objects: dict[str, bytes] = {}
        self._names: list[str] = []  # ascending

    @classmethod
    def shared(cls, name: str) -> MemoryStore:
        """The process's one store of this name."""
        with cls._sharing:
            return cls._shared.setdefault(name, cls(name))

    @property
    def url(self) -> str:
        return f"memory://{self._name}"

    def put_if_absent(self, name: str, data: Buffer, *, timeout: float = REQUEST_TIMEOUT) -> bool:
        checked_name(name)
        with self._lock:
            if name in self._objects:
                return False
            self._objects[name] = bytes(data)
            insort(self._names, name)
            return True

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
        return expected_bytes(self._objects.get(checked_name(name)), limit, size, sha256, partial=partial)

    def list_after(self, prefix: str, marker: str = "", *, timeout: float = REQUEST_TIMEOUT) -> Listing:
        checked_prefix(prefix)
        with self._lock:
            return first_page(self._entries(prefix, marker))

    def _entries(self, prefix: str, marker: str) -> Iterator[Entry]:
        start = max(bisect_left(self._names, prefix), bisect_right(self._names, marker))
        for index in range(start, len(self._names)):
            name = self._names[index]
            if not name.startswith(prefix):
                return
            yield Entry(name, len(self._objects[name]))

    def delete(self, name: str, *, timeout: float = REQUEST_TIMEOUT) -> None:
        checked_name(name)
        with self._lock:
            if self._objects.pop(name, None) is not None:
                del self._names[bisect_left(self._names, name)]

    def close(self) -> None:
        """Nothing to close."""
