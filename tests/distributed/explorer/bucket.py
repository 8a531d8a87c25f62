"""The store of one schedule: it forgets nothing, its listings may lag, and every change to it can be watched."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from hashlib import sha256
from typing import Protocol

from speedtronic.distributed.requests import Get
from speedtronic.distributed.stores.base import Entry, Listing


@dataclass(slots=True)
class Copy:
    """One existence of an object: a name may be created again after it was deleted."""

    name: str
    data: bytes
    created: int
    whole: bool
    deleted: int | None = None


class Watcher(Protocol):
    def created(self, copy: Copy) -> None: ...

    def deleted(self, copy: Copy) -> None: ...


class Bucket:
    """What the requests of the protocol do to a store, without any fault but lagging listings.

    Args:
        lag: for how many ticks a listing may still show a name as it was before its last change.
        page: entries of one page of a listing.
        hidden: names that no listing shows, a regular expression.
        overwrites: the beginnings of names that a put replaces, as in a store without exclusive create.
    """

    def __init__(self, choices: random.Random, watcher: Watcher, *, lag: int, page: int, hidden: str = "") -> None:
        self.choices = choices
        self.watcher = watcher
        self.lag = lag
        self.hidden = hidden
        self.page = page
        self.overwrites: tuple[str, ...] = ()
        self.now = 0
        self.history: dict[str, list[Copy]] = {}
        self.settled: dict[str, int] = {}
        self._sorted: list[str] = []

    def there(self, name: str) -> Copy | None:
        copies = self.history.get(name)
        return copies[-1] if copies and copies[-1].deleted is None else None

    def put(self, name: str, data: bytes, *, whole: bool = True) -> bool:
        there = self.there(name)
        if there is not None and not name.startswith(self.overwrites or "\0"):
            return False
        if there is not None:
            there.deleted = self.now
        copy = Copy(name, data, self.now, whole)
        if name not in self.history:
            self.history[name] = []
            self._sorted = sorted(self.history)
        self.history[name].append(copy)
        self.watcher.created(copy)
        return True

    def get(self, request: Get) -> bytes | None:
        copy = self.there(request.name)
        if copy is not None and request.partial:
            return copy.data[: request.limit + 1]
        if copy is None or len(copy.data) > request.limit:
            return None
        if request.size is not None and request.size != len(copy.data):
            return None
        if request.sha256 is not None and request.sha256 != sha256(copy.data).hexdigest():
            return None
        return copy.data

    def list_after(self, prefix: str, marker: str) -> Listing:
        seen = [
            Entry(name, len(copy.data))
            for name in self._sorted
            if name > marker
            and name.startswith(prefix)
            and not (self.hidden and re.search(self.hidden, name))
            and (copy := self._as_listed(self.history[name])) is not None
        ]
        return Listing(tuple(seen[: self.page]), len(seen) > self.page)

    def delete(self, name: str) -> None:
        copy = self.there(name)
        if copy is not None:
            copy.deleted = self.now
            self.watcher.deleted(copy)

    def settle(self, prefix: str) -> None:
        """What happened to names that begin so is long ago: listings show it."""
        self.settled[prefix] = self.now

    def names(self) -> list[str]:
        return [name for name in self._sorted if self.there(name) is not None]

    def _as_listed(self, copies: list[Copy]) -> Copy | None:
        last = copies[-1]
        changed = last.created if last.deleted is None else last.deleted
        lags = self.now - changed < self.lag and not self._is_settled(last, changed) and self.choices.random() < 0.5
        if last.deleted is None:
            return None if lags else last
        return last if lags else None

    def _is_settled(self, copy: Copy, changed: int) -> bool:
        return any(copy.name.startswith(prefix) and changed <= tick for prefix, tick in self.settled.items())
