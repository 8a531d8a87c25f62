"""What a procedure of the protocol asks for, one request at a time.

The rules of the protocol are written as generators that yield these and receive the answers. They do no I/O, know no
threads and no clocks: a lane runs them against a real store and a real disk, and the tests run many of them against
each other in any order, ending each at any request.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from speedtronic.distributed.stores.base import Buffer, Listing, Store

T = TypeVar("T")

# Whom a procedure tells of an event and its payload, or of words: "log", with `level` and `message`.
Say = Callable[[str, Mapping[str, Any]], None]


@dataclass(frozen=True, slots=True)
class Put:
    """Create an object in the store; answered with true, or with false when there was one of this name."""

    name: str
    data: Buffer


@dataclass(frozen=True, slots=True)
class Get:
    """Read an object of the store; answered with its bytes, or None (see `Store.get`)."""

    name: str
    limit: int
    size: int | None = None
    sha256: str | None = None


@dataclass(frozen=True, slots=True)
class List:
    """Answered with a `Listing`."""

    prefix: str
    marker: str = ""


@dataclass(frozen=True, slots=True)
class Delete:
    """Remove an object of the store."""

    name: str


@dataclass(frozen=True, slots=True)
class WriteFile:
    """Put a file of this node's own in its place; durable when answered, whole or not at all. Raises OSError."""

    name: str
    data: Buffer


@dataclass(frozen=True, slots=True)
class ReadFile:
    """Answered with the file's bytes, or None when there is none. Raises OSError."""

    name: str


@dataclass(frozen=True, slots=True)
class RemoveFile:
    """Remove a file of this node's own, if it is there."""

    name: str


StoreEffect = Put | Get | List | Delete
FileEffect = WriteFile | ReadFile | RemoveFile
Effect = StoreEffect | FileEffect
Procedure = Generator[Effect, Any, T]


class Files(Protocol):
    """A node's own files: flat names, each written whole and durably."""

    def write(self, name: str, data: Buffer) -> None: ...

    def read(self, name: str) -> bytes | None: ...

    def remove(self, name: str) -> None: ...


def put(name: str, data: Buffer) -> Procedure[bool]:
    created: bool = yield Put(name, data)
    return created


def get(name: str, *, limit: int, size: int | None = None, sha256: str | None = None) -> Procedure[bytes | None]:
    data: bytes | None = yield Get(name, limit, size, sha256)
    return data


def list_after(prefix: str, marker: str = "") -> Procedure[Listing]:
    listing: Listing = yield List(prefix, marker)
    return listing


def delete(name: str) -> Procedure[None]:
    yield Delete(name)


def write_file(name: str, data: Buffer) -> Procedure[None]:
    yield WriteFile(name, data)


def read_file(name: str) -> Procedure[bytes | None]:
    data: bytes | None = yield ReadFile(name)
    return data


def remove_file(name: str) -> Procedure[None]:
    yield RemoveFile(name)


def answer(effect: Effect, store: Store, files: Files | None) -> Any:
    """Do what an effect asks for."""
    match effect:
        case Put(name, data):
            return store.put_if_absent(name, data)
        case Get(name, limit, size, sha256):
            return store.get(name, limit=limit, size=size, sha256=sha256)
        case List(prefix, marker):
            return store.list_after(prefix, marker)
        case Delete(name):
            return store.delete(name)
    assert files is not None, "only a node has files"
    match effect:
        case WriteFile(name, data):
            return files.write(name, data)
        case ReadFile(name):
            return files.read(name)
        case RemoveFile(name):
            return files.remove(name)


def perform(procedure: Procedure[T], store: Store, files: Files | None = None) -> T:
    """Run a procedure to its end. What a request raises is raised inside the procedure, which may live with it."""
    try:
        effect = next(procedure)
        while True:
            try:
                result = answer(effect, store, files)
            except Exception as error:  # noqa: BLE001 - handed to the procedure, which raises on what it does not expect
                effect = procedure.throw(error)
            else:
                effect = procedure.send(result)
                del result  # a delta or weights, which would be kept while the next request runs
    except StopIteration as end:
        value: T = end.value
        return value
