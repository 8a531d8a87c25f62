"""Any store, with a count of what is asked of it."""

from __future__ import annotations

import threading
from collections import Counter

from speedtronic.distributed.stores.base import REQUEST_TIMEOUT, Buffer, Listing, Store


class CountingStore:
    """Counts the requests that reach a store, also those that fail; put inside `RetryingStore` it sees each attempt.

    Attributes:
        requests: how many of each kind: `put`, `get`, `list`, `delete`.
        bytes: of contents sent (`put`, whether or not the object was new) and received (`get`).
        reads: how often the contents of each name were received, where not only a part was asked for.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self.reset()

    def reset(self) -> None:
        """Begin to count anew."""
        self.requests: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self.reads: Counter[str] = Counter()

    @property
    def url(self) -> str:
        return self._store.url

    def put_if_absent(self, name: str, data: Buffer, *, timeout: float = REQUEST_TIMEOUT) -> bool:
        self._count("put", memoryview(data).nbytes)
        return self._store.put_if_absent(name, data, timeout=timeout)

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
        self._count("get", 0)
        data = self._store.get(name, limit=limit, size=size, sha256=sha256, partial=partial, timeout=timeout)
        if data is not None:
            with self._lock:
                self.bytes["get"] += len(data)
                self.reads[name] += not partial
        return data

    def list_after(self, prefix: str, marker: str = "", *, timeout: float = REQUEST_TIMEOUT) -> Listing:
        self._count("list", 0)
        return self._store.list_after(prefix, marker, timeout=timeout)

    def delete(self, name: str, *, timeout: float = REQUEST_TIMEOUT) -> None:
        self._count("delete", 0)
        self._store.delete(name, timeout=timeout)

    def close(self) -> None:
        self._store.close()

    def _count(self, kind: str, size: int) -> None:
        with self._lock:
            self.requests[kind] += 1
            self.bytes[kind] += size
