"""What every store can do. The protocol needs no more than an exclusive create and reads that see it."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from typing import NamedTuple, Protocol

Buffer = bytes | bytearray | memoryview

REQUEST_TIMEOUT = 60.0  # seconds
PAGE = 1000  # names of a listing that are answered at once

COMPONENT = r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}"
_NAME = re.compile(rf"{COMPONENT}(/{COMPONENT}){{0,7}}")
_PREFIX = re.compile(rf"(|{COMPONENT}(/{COMPONENT}){{0,7}}/?)")


class Entry(NamedTuple):
    """One object of a listing: its full name and its size in bytes."""

    name: str
    size: int


class Listing(NamedTuple):
    """A page of names in the store's order, and whether there are more after its last one."""

    entries: tuple[Entry, ...]
    more: bool


class Store(Protocol):
    """Immutable objects under names such as `head/00000007.json`.

    Each call ends within its timeout, in seconds, or raises. What can pass raises StoreUnavailableError, and the caller
    cannot know whether the request took effect, or still will: bytes that it handed over must not change afterwards.
    What will not pass raises StoreRefusedError. A name that `checked_name` refuses is a ValueError on every store.

    Any thread may call any method at any time.
    """

    @property
    def url(self) -> str:
        """The store's address, for messages: without secrets."""

    def put_if_absent(self, name: str, data: Buffer, *, timeout: float = REQUEST_TIMEOUT) -> bool:
        """Create an object, whole or not at all; false when there is one of this name, which stays as it is."""

    def get(
        self,
        name: str,
        *,
        limit: int,
        size: int | None = None,
        sha256: str | None = None,
        timeout: float = REQUEST_TIMEOUT,
    ) -> bytes | None:
        """The bytes of an object.

        None when there is none, when it has more than `limit` bytes (of which no more than one above are read), or when
        its size or its SHA-256 (hex) is not the expected one: what does not match counts as absent.
        """

    def list_after(self, prefix: str, marker: str = "", *, timeout: float = REQUEST_TIMEOUT) -> Listing:
        """The first page of names that begin with `prefix` and come after `marker`.

        Names in one folder, equal up to their last `/`, ascend. Folders come in an order that the store keeps, which is
        not the same on all: some list `a/1` before `a-1/1`, Amazon after it. A marker is a name that was listed, such
        as the last of the page before, or, where the prefix is a folder that holds no others, any name in it.

        A listing may lag behind what was created or deleted.
        """

    def delete(self, name: str, *, timeout: float = REQUEST_TIMEOUT) -> None:
        """Remove an object; one that is not there is no error."""

    def close(self) -> None:
        """Give back connections."""


def checked_name(name: str) -> str:
    """The name, if it is one that every store takes and that leads nowhere but to its own object.

    Names are up to eight components of at most 128 letters, digits, `.`, `_` and `-`, the first a letter or digit,
    with `/` between them. So none is a path that climbs or is absolute, and what begins with a dot is a store's own.

    Raises:
        ValueError: it is another.
    """
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} is no name of an object")
    return name


def checked_prefix(prefix: str) -> str:
    """The same for the beginning of names: nothing, a name, or a name and `/`."""
    if not _PREFIX.fullmatch(prefix):
        raise ValueError(f"{prefix!r} is no beginning of a name")
    return prefix


def is_name(name: str) -> bool:
    """Whether `checked_name` takes a name; a listing leaves out what else lies in a store."""
    return _NAME.fullmatch(name) is not None


def first_page(entries: Iterable[Entry]) -> Listing:
    """The listing that begins with the first of some ascending entries; draws one more than it holds."""
    page: list[Entry] = []
    for entry in entries:
        if len(page) == PAGE:
            return Listing(tuple(page), more=True)
        page.append(entry)
    return Listing(tuple(page), more=False)


def expected_bytes(data: bytes | None, limit: int, size: int | None, sha256: str | None) -> bytes | None:
    """An object as `Store.get` answers it: None in place of what is too long or is not what was expected."""
    if data is None or len(data) > limit or (size is not None and len(data) != size):
        return None
    if sha256 is not None and hashlib.sha256(data).hexdigest() != sha256:
        return None
    return data
