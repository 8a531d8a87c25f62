"""The requests that the protocol makes, one at a time.

The rules of the protocol are generators ("procedures") that yield requests and receive the answers. They do no I/O and
know no threads and no clocks: a background thread runs them against a real store and a real disk, and the tests run
many of them against each other in any order, ending each at any request.

    data = yield from Get(name, limit=4096)
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from speedtronic.distributed.stores.base import Buffer, Listing, Store

T = TypeVar("T")

# Receives the name of an event and its payload; or "log", with `level` and `message`.
EventSink = Callable[[str, Mapping[str, Any]], None]


class Request(Generic[T]):
    """What a procedure yields. `yield from request` gives the answer, with its type."""

    __slots__ = ()

    def __iter__(self) -> Generator[Any, Any, T]:
        answer: T = yield self
        return answer


@dataclass(frozen=True, slots=True)
class Put(Request[bool]):
    """Create an object in the store. Answer: true, or false if there was one of this name."""

    name: str
    data: Buffer


@dataclass(frozen=True, slots=True)
class Get(Request[bytes | None]):
    """Read an object of the store. Answer: its bytes, or None (see `Store.get`)."""

    name: str
    limit: int
    size: int | None = None
    sha256: str | None = None
    partial: bool = False


@dataclass(frozen=True, slots=True)
class List(Request[Listing]):
    """One page of names."""

    prefix: str
    marker: str = ""


@dataclass(frozen=True, slots=True)
class Delete(Request[None]):
    """Remove an object of the store."""

    name: str


@dataclass(frozen=True, slots=True)
class WriteFile(Request[None]):
    """Replace a file of this node; durable when answered, whole or not at all. Raises OSError."""

    name: str
    data: Buffer


@dataclass(frozen=True, slots=True)
class ReadFile(Request[bytes | None]):
    """Answer: the bytes of a file of this node, or None if there is none. Raises OSError."""

    name: str


@dataclass(frozen=True, slots=True)
class RemoveFile(Request[None]):
    """Remove a file of this node, if it is there."""

    name: str


Effect = Put | Get | List | Delete | WriteFile | ReadFile | RemoveFile
Procedure = Generator[Effect, Any, T]


class Files(Protocol):
    """A node's own files: flat names, each written whole and durably."""

    def write(self, name: str, data: Buffer) -> None: ...

    def read(self, name: str) -> bytes | None: ...

    def remove(self, name: str) -> None: ...


def answer(effect: Effect, store: Store, files: Files | None) -> Any:
    """Do what an effect asks for."""
    match effect:
        case Put(name, data):
            return store.put_if_absent(name, data)
        case Get(name, limit, size, sha256, partial):
            return store.get(name, limit=limit, size=size, sha256=sha256, partial=partial)
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
    """Run a procedure to its end. What a request raises is raised inside the procedure, which may handle it."""
    try:
        effect = next(procedure)
        while True:
            try:
                result = answer(effect, store, files)
            except Exception as error:  # noqa: BLE001 - passed to the procedure, which raises what it does not expect
                effect = procedure.throw(error)
            else:
                effect = procedure.send(result)
                del result  # a delta or weights, which would stay in memory while the next request runs
    except StopIteration as end:
        value: T = end.value
        return value
