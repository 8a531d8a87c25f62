"""What every store can do. The protocol needs only exclusive creation, and reads that see what was created."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from typing import NamedTuple, Protocol

Buffer = bytes | bytearray | memoryview

REQUEST_TIMEOUT = 60.0  # seconds
PAGE = 1000  # names in one page of a listing

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

    Each call ends within its timeout, in seconds, or raises. A temporary error raises StoreUnavailableError; the caller
    cannot know whether the request took effect, or still will, so the bytes it passed must not change afterwards. A
    lasting error raises StoreRefusedError. A name that `checked_name` refuses is a ValueError on every store.

    Any thread may call any method at any time.
    """

    @property
    def url(self) -> str:
        """The store's address, for messages: without secrets."""

    def put_if_absent(self, name: str, data: Buffer, *, timeout: float = REQUEST_TIMEOUT) -> bool:
        """Create an object, whole or not at all; false if there is one of this name, which stays as it is."""

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
        """The bytes of an object.

        None if there is none, if it has more than `limit` bytes (at most one byte more is read), or if its size or its
        SHA-256 (hex) is not the expected one: an object that does not match counts as absent.

        With `partial`, None says that the name is free. An object with more than `limit` bytes is answered by its
        first `limit + 1` bytes, and what takes the name but is no object (a folder, a link) by no bytes: so junk is
        told from absence. `size` and `sha256` are not given with it.
        """

    def list_after(self, prefix: str, marker: str = "", *, timeout: float = REQUEST_TIMEOUT) -> Listing:
        """The first page of names that begin with `prefix` and come after `marker`.

        Names in one folder, equal up to their last `/`, ascend. The order of folders is always the same in one store,
        but differs between stores: some list `a/1` before `a-1/1`, Amazon after it. A marker is a name that was listed,
        such as the last of the page before; if the prefix is a folder without subfolders, it may be any name in it.

        A listing may lag behind creations and deletions.
        """

    def delete(self, name: str, *, timeout: float = REQUEST_TIMEOUT) -> None:
        """Remove an object; it is no error if there is none."""

    def close(self) -> None:
        """Close connections."""


def checked_name(name: str) -> str:
    """The name, if every store accepts it and it leads only to its own object.

    Names are up to eight components of at most 128 letters, digits, `.`, `_` and `-`, the first a letter or digit,
    with `/` between them. So no name is an absolute path or leads upward, and names that begin with a dot are free for
    the store itself.

    Raises:
        ValueError: the name is not valid.
    """
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} is not a valid name of an object")
    return name


def checked_prefix(prefix: str) -> str:
    """The same for a prefix of names: nothing, a name, or a name and `/`."""
    if not _PREFIX.fullmatch(prefix):
        raise ValueError(f"{prefix!r} is not a valid prefix of a name")
    return prefix


def is_name(name: str) -> bool:
    """Whether a name is valid. Listings leave out everything else that lies in a store."""
    return _NAME.fullmatch(name) is not None


def first_page(entries: Iterable[Entry]) -> Listing:
    """The first page of some ascending entries. Draws one entry more than the page holds."""
    page: list[Entry] = []
    for entry in entries:
        if len(page) == PAGE:
            return Listing(tuple(page), more=True)
        page.append(entry)
    return Listing(tuple(page), more=False)


def expected_bytes(
    data: bytes | None, limit: int, size: int | None, sha256: str | None, *, partial: bool
) -> bytes | None:
    """An object, or its first `limit + 1` bytes at least, as `Store.get` answers it."""
    if partial and data is not None:
        return data[: limit + 1]
    if data is None or len(data) > limit or (size is not None and len(data) != size):
        return None
    if sha256 is not None and hashlib.sha256(data).hexdigest() != sha256:
        return None
    return data
