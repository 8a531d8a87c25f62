"""Any store, made as bad as a real one can be: by a seed, so that what happens can happen again."""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from speedtronic.distributed.stores.base import REQUEST_TIMEOUT, Buffer, Entry, Listing, Store
from speedtronic.errors import StoreUnavailableError

T = TypeVar("T")

_FAILURES = ("503 slow down", "no answer in time", "connection reset")
# What is too large to be sent in one go. A manifest is not.
_LARGE = ("in/", "w/", "opt/")


@dataclass(frozen=True, slots=True)
class Faults:
    """What goes wrong, and how often.

    Attributes:
        seed: of everything that is drawn.
        failing: share of the requests that raise StoreUnavailableError, half of them after they took effect.
        torn: share of the creations of weights, momentum and deltas that leave the first bytes under the full name,
            and raise.
        lagging: chance, at each listing, that an object that was not listed yet is not listed this time either, and
            that one that was deleted still is.
        latency: seconds that each request takes.
        bandwidth: bytes of contents per second.
    """

    seed: int = 0
    failing: float = 0.0
    torn: float = 0.0
    lagging: float = 0.0
    latency: float = 0.0
    bandwidth: float = math.inf


class FaultyStore:
    """A store behind `faults`. With several threads, which of them meets which fault depends on their order.

    Args:
        sleep: waits for the seconds that a request takes; a virtual clock's, or an event's that ends all waiting.
    """

    def __init__(self, store: Store, faults: Faults, *, sleep: Callable[[float], object] = time.sleep) -> None:
        self._store = store
        self._faults = faults
        self._sleep = sleep
        self._random = random.Random(faults.seed)
        self._lock = threading.RLock()
        self._listed: dict[str, Entry] = {}

    @property
    def url(self) -> str:
        return self._store.url

    def put_if_absent(self, name: str, data: Buffer, *, timeout: float = REQUEST_TIMEOUT) -> bool:
        size = memoryview(data).nbytes
        if name.startswith(_LARGE) and self._happens(self._faults.torn):
            part = self._draw(size)
            self._take_time(part)
            self._store.put_if_absent(name, memoryview(data).cast("B")[:part], timeout=timeout)
            raise StoreUnavailableError(f"{self.url}: connection reset after {part} bytes")
        return self._ask(lambda: self._store.put_if_absent(name, data, timeout=timeout), lambda _: size)

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
        return self._ask(
            lambda: self._store.get(name, limit=limit, size=size, sha256=sha256, partial=partial, timeout=timeout),
            lambda data: len(data or b""),
        )

    def list_after(self, prefix: str, marker: str = "", *, timeout: float = REQUEST_TIMEOUT) -> Listing:
        listing = self._ask(lambda: self._store.list_after(prefix, marker, timeout=timeout))
        return self._lagging(listing, prefix, marker) if self._faults.lagging else listing

    def delete(self, name: str, *, timeout: float = REQUEST_TIMEOUT) -> None:
        self._ask(lambda: self._store.delete(name, timeout=timeout))

    def close(self) -> None:
        self._store.close()

    def _ask(self, request: Callable[[], T], carried: Callable[[T], int] = lambda _: 0) -> T:
        fails = self._happens(self._faults.failing)
        if fails and self._happens(0.5):
            self._take_time(0)
            raise self._failure()
        result = request()
        self._take_time(carried(result))
        if fails:
            raise self._failure()
        return result

    def _lagging(self, listing: Listing, prefix: str, marker: str) -> Listing:
        """The listing without some of what is new, and with some of what is gone."""
        with self._lock:
            there = {entry.name: entry for entry in listing.entries}
            end = listing.entries[-1].name if listing.more else "\x7f"  # after all names
            new = [entry for name, entry in there.items() if name not in self._listed]
            gone = [
                name for name in self._listed if name.startswith(prefix) and marker < name <= end and name not in there
            ]
            hidden = {entry.name for entry in new if self._happens(self._faults.lagging)}
            self._listed.update((entry.name, entry) for entry in new if entry.name not in hidden)
            ghosts = {}
            for name in gone:
                entry = self._listed.pop(name)
                if self._happens(self._faults.lagging):
                    ghosts[name] = self._listed[name] = entry
            shown = there | ghosts
            entries = tuple(shown[name] for name in sorted(shown) if name not in hidden)
            return Listing(entries, listing.more and bool(entries))

    def _failure(self) -> StoreUnavailableError:
        return StoreUnavailableError(f"{self.url}: {_FAILURES[self._draw(len(_FAILURES))]}")

    def _take_time(self, size: int) -> None:
        seconds = self._faults.latency + size / self._faults.bandwidth
        if seconds:
            self._sleep(seconds)

    def _happens(self, chance: float) -> bool:
        with self._lock:
            return self._random.random() < chance

    def _draw(self, below: int) -> int:
        with self._lock:
            return self._random.randrange(max(1, below))
