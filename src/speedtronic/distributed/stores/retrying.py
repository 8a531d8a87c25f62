"""Retries: the one place where a request is made again."""

from __future__ import annotations

import random as random_numbers
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from speedtronic.distributed.stores.base import REQUEST_TIMEOUT, Buffer, Listing, Store
from speedtronic.distributed.stores.probe import prove_exclusive
from speedtronic.errors import StoreUnavailableError

T = TypeVar("T")

_SLOWEST_LINK = 64 * 2**10  # bytes per second that a request is given time for in the end
_FIRST_LINK = 2**20  # bytes per second that are expected before anything is measured
_MEASURED = 2**20  # bytes; what carries fewer takes as long as the way to the store, whatever the link carries
_RECENT = 8  # requests whose slowest counts
_MARGIN = 4  # times as long as the slowest one took


class _Link:
    """How long bytes may take in one direction, from how long they took.

    So a request that hangs is given up soon, and one over a slow link gets through in the end.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._learning = threading.Lock()
        self._speeds: deque[float] = deque(maxlen=_RECENT)  # bytes per second
        self._expected: float = _FIRST_LINK

    def carry(self, size: int, timeout: float, request: Callable[[float], T], carried: Callable[[T], int]) -> T:
        """Make a request within the time that it may take, and learn from it.

        Args:
            size: bytes that it carries at most.
            timeout: seconds that it may take beside those for its bytes.
            request: receives the seconds that it may take.
            carried: how many bytes an answer stands for; 0 if it says nothing about the link.
        """
        expected = self._expected
        patience = timeout + size / expected
        begun = self._clock()
        try:
            answer = request(patience)
        except StoreUnavailableError:
            if self._clock() - begun >= patience:
                # Requests that hang together are one timeout.
                self._expected = max(_SLOWEST_LINK, min(self._expected, expected / 2, _FIRST_LINK))
            raise
        seconds = self._clock() - begun
        if (count := carried(answer)) >= _MEASURED and seconds > 0:
            with self._learning:
                self._speeds.append(count / seconds)
                self._expected = max(_SLOWEST_LINK, min(self._speeds) / _MARGIN)
        return answer


class RetryingStore:
    """A store that repeats a request after a temporary error, with exponential backoff and full jitter.

    The jitter (Brooker, "Exponential Backoff And Jitter", AWS Architecture Blog, 2015) keeps nodes that one failure of
    a store stopped together from coming back together. Lasting errors are not tried again. A request is given more
    time, the more bytes it may carry: four times as much as the slowest of the last eight took, and for as long as
    none was measured a second for each MiB. After a timeout they are given twice as much, at least a second for each
    MiB, and at most one for each 64 KiB.

    Args:
        initial: longest first pause, in seconds.
        maximum: longest pause, in seconds.
        attempts: how often one request is made in all.
        sleep: waits, and may return early.
        random: draws from [0, 1).
        clock: seconds since any moment.
        give_up: whether to stop waiting; asked before and after each pause.
        prove: whether the store must prove that it creates each object only once, before the first request that is more
            than the reading of one object. Reading comes first: it tells an empty folder from the store, and the proof
            makes an object.
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
        clock: Callable[[], float] = time.monotonic,
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
        self._upward = _Link(clock)
        self._downward = _Link(clock)
        self._unproven = prove
        self._proof = threading.RLock()  # the proof makes requests through this store

    @property
    def url(self) -> str:
        return self._store.url

    def put_if_absent(self, name: str, data: Buffer, *, timeout: float = REQUEST_TIMEOUT) -> bool:
        """As every store does. False also if an attempt created the object and its answer was lost."""
        size = memoryview(data).nbytes

        def put(patience: float) -> bool:
            return self._store.put_if_absent(name, data, timeout=patience)

        # A name that is taken may have been answered before the bytes were sent.
        return self._ask_proved(lambda: self._upward.carry(size, timeout, put, lambda created: size * created))

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
        most = limit if size is None else size

        def get(patience: float) -> bytes | None:
            return self._store.get(name, limit=limit, size=size, sha256=sha256, partial=partial, timeout=patience)

        return self._ask(lambda: self._downward.carry(most, timeout, get, lambda data: len(data or b"")))

    def list_after(self, prefix: str, marker: str = "", *, timeout: float = REQUEST_TIMEOUT) -> Listing:
        return self._ask_proved(lambda: self._store.list_after(prefix, marker, timeout=timeout))

    def delete(self, name: str, *, timeout: float = REQUEST_TIMEOUT) -> None:
        self._ask_proved(lambda: self._store.delete(name, timeout=timeout))

    def close(self) -> None:
        self._store.close()

    def _ask_proved(self, request: Callable[[], T]) -> T:
        with self._proof:
            if self._unproven:
                self._unproven = False
                try:
                    prove_exclusive(self)
                except BaseException:  # whatever ended the proof, the next request starts it again; it is raised again
                    self._unproven = True
                    raise
        return self._ask(request)

    def _ask(self, request: Callable[[], T]) -> T:
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
