"""Retries: the one place where a request is made again."""

from __future__ import annotations

import random as random_numbers
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from speedtronic.distributed.stores.base import REQUEST_TIMEOUT, Buffer, Listing, Store
from speedtronic.distributed.stores.probe import prove_exclusive
from speedtronic.errors import StoreUnavailableError

T = TypeVar("T")

_SLOWEST_LINK = 64 * 1024  # bytes per second that a request is given time for


class RetryingStore:
    """A store that repeats a request after a temporary error, with exponential backoff and full jitter.

    The jitter (Brooker, "Exponential Backoff And Jitter", AWS Architecture Blog, 2015) keeps nodes that one failure of
    a store stopped together from coming back together. Lasting errors are not tried again. A request is given more
    time, the more bytes it may carry.

    Args:
        initial: longest first pause, in seconds.
        maximum: longest pause, in seconds.
        attempts: how often one request is made in all.
        sleep: waits, and may return early.
        random: draws from [0, 1).
        give_up: whether to stop waiting; asked before and after each pause.
        prove: whether the store must prove, before its first request, that it creates each object only once.
    """

    def __init__(
        self,
        store: Store,
        *,
        initial: float = 1.0,
        maximum: float = 60.0,
        attempts: int = 6,
        sleep: Callable[[float], object] = time.sleep,
        random: Callable[[], float] = random_numbers.random,
        give_up: Callable[[], bool] = lambda: False,
        prove: bool = False,
    ) -> None:
        self._store = store
        self._initial = initial
        self._maximum = maximum
        self._attempts = attempts
        self._sleep = sleep
        self._random = random
        self._give_up = give_up
        self._unproven = prove
        self._proof = threading.RLock()  # the proof makes requests through this store

    @property
    def url(self) -> str:
        return self._store.url

    def put_if_absent(self, name: str, data: Buffer, *, timeout: float = REQUEST_TIMEOUT) -> bool:
        """As every store does. False also if an attempt created the object and its answer was lost."""
        patience = timeout + memoryview(data).nbytes / _SLOWEST_LINK
        return self._ask(lambda: self._store.put_if_absent(name, data, timeout=patience))

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
        patience = timeout + (limit if size is None else size) / _SLOWEST_LINK
        return self._ask(
            lambda: self._store.get(name, limit=limit, size=size, sha256=sha256, partial=partial, timeout=patience)
        )

    def list_after(self, prefix: str, marker: str = "", *, timeout: float = REQUEST_TIMEOUT) -> Listing:
        return self._ask(lambda: self._store.list_after(prefix, marker, timeout=timeout))

    def delete(self, name: str, *, timeout: float = REQUEST_TIMEOUT) -> None:
        self._ask(lambda: self._store.delete(name, timeout=timeout))

    def close(self) -> None:
        self._store.close()

    def _ask(self, request: Callable[[], T]) -> T:
        with self._proof:
            if self._unproven:
                self._unproven = False
                try:
                    prove_exclusive(self)
                except BaseException:  # whatever ended the proof, the next request starts it again; it is raised again
                    self._unproven = True
                    raise
        for attempt in range(1, self._attempts):
            try:
                return request()
            except StoreUnavailableError:
                if self._give_up():
                    raise
                # Beyond 2⁶⁰ the pause is the longest in any case, and a float would overflow.
                longest = min(self._maximum, self._initial * 2.0 ** min(attempt - 1, 60))
                self._sleep(longest * self._random())
                if self._give_up():
                    raise
        return request()
