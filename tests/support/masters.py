"""Masters, deltas and stores for tests: everything counted, nothing left to chance."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from speedtronic.distributed.codec import make_codec
from speedtronic.distributed.delta import DeltaHeader, Predecessor, pack_delta
from speedtronic.distributed.master import Master, MasterSettings
from speedtronic.distributed.outer import outer_optimizer
from speedtronic.distributed.packed_tensors import PackedTensors
from speedtronic.distributed.protocol import PROTOCOL, DeltaId, Manifest, find_head, read_manifest
from speedtronic.distributed.records import Position
from speedtronic.distributed.requests import Effect, List, Procedure, T, answer, perform
from speedtronic.distributed.schema import Schema, Tensors, snapshot
from speedtronic.distributed.stores.base import Listing, Store
from speedtronic.distributed.stores.memory import MemoryStore
from speedtronic.errors import StoreUnavailableError


class Small(nn.Module):
    """A parameter of each kind: trained, frozen, averaged buffer, newest buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))
        self.frozen = nn.Parameter(torch.tensor([7.0]), requires_grad=False)
        self.register_buffer("running", torch.tensor([0.0, 10.0]))
        self.register_buffer("count", torch.tensor(0))


SCHEMA = Schema.of(Small())
INITIAL = snapshot(Small())


class Killed(BaseException):
    """A process ends here."""


@dataclass
class Clock:
    """Seconds that pass when a test says so."""

    seconds: float = 0.0

    def __call__(self) -> float:
        return self.seconds


@dataclass
class Heard:
    """What was said."""

    events: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    def __call__(self, event: str, payload: Mapping[str, Any]) -> None:
        self.events.append((event, dict(payload)))

    def of(self, event: str) -> list[dict[str, Any]]:
        return [payload for name, payload in self.events if name == event]

    @property
    def words(self) -> str:
        return "\n".join(payload["message"] for payload in self.of("log"))


_masters = itertools.count()


def new_master(
    settings: MasterSettings | None = None,
    *,
    schema: Schema = SCHEMA,
    initial: Tensors | None = None,
    clock: Clock | None = None,
    heard: Heard | None = None,
    store_id: str | None = None,
) -> Master:
    """A master that knows nothing yet, with nonces that no other master uses."""
    number, attempts = next(_masters), itertools.count()
    settings = settings or MasterSettings(expected_nodes=1)
    return Master(
        schema,
        {name: value.clone() for name, value in (INITIAL if initial is None else initial).items()},
        settings,
        new_outer=outer_optimizer(settings),
        nonce=lambda: f"m{number}-{next(attempts)}",
        clock=clock or Clock(),
        now=lambda: "2026-01-01T00:00:00.000+00:00",
        say=heard or Heard(),
        store_id=store_id,
    )


def packed_delta(
    delta: DeltaId,
    trained: Mapping[str, Tensor],
    *,
    schema: Schema = SCHEMA,
    base_version: int = 0,
    steps: int = 10,
    tokens: int = 1000,
    seconds: float = 5.0,
    step: int | None = None,
    buffers: Mapping[str, Tensor] | None = None,
    codec: str = "fp32",
    predecessor: tuple[str, int] | None = None,
    protocol: int = PROTOCOL,
) -> bytes:
    encoded = make_codec(codec).encode(dict(trained), None).tensors
    header = DeltaHeader(
        protocol=protocol,
        node=delta.node,
        session=delta.session,
        seq=delta.seq,
        base_version=base_version,
        steps=steps,
        samples=tokens,
        tokens=tokens,
        seconds=seconds,
        position=Position(step if step is not None else steps * delta.seq, tokens * delta.seq, tokens * delta.seq),
        schema_id=schema.fingerprint,
        codec=codec,
        time="2026-01-01T00:00:00Z",
        predecessor=Predecessor(session=predecessor[0], last=predecessor[1]) if predecessor is not None else None,
    )
    if buffers is None:
        buffers = {name: INITIAL[name] for name in schema.names("average", "newest")}
    return pack_delta(header, encoded, buffers)


def send(store: Store, node: str, seq: int, values: list[float], *, session: str = "s", **header: Any) -> DeltaId:
    """Put a delta of `Small` into a store."""
    delta = DeltaId(node, session, seq)
    assert store.put_if_absent(delta.name, packed_delta(delta, {"weight": torch.tensor(values)}, **header))
    return delta


class Watched:
    """A store in memory that writes down what it is asked for."""

    def __init__(self, store: Store | None = None) -> None:
        self.inner: Store = store or MemoryStore()
        self.requests: list[tuple[str, str]] = []
        self.downloaded = 0
        self.refused: set[str] = set()  # kinds of requests that fail

    @property
    def url(self) -> str:
        return self.inner.url

    def _note(self, kind: str, name: str) -> None:
        self.requests.append((kind, name))
        if kind in self.refused:
            raise StoreUnavailableError(f"{kind} {name}: down")

    def put_if_absent(self, name: str, data: Any, **options: Any) -> bool:
        self._note("put", name)
        return self.inner.put_if_absent(name, data, **options)

    def get(self, name: str, **options: Any) -> bytes | None:
        self._note("get", name)
        data = self.inner.get(name, **options)
        self.downloaded += len(data or b"")
        return data

    def list_after(self, prefix: str, marker: str = "", **options: Any) -> Listing:
        self._note("list", prefix)
        return self.inner.list_after(prefix, marker, **options)

    def delete(self, name: str, **options: Any) -> None:
        self._note("delete", name)
        self.inner.delete(name, **options)

    def close(self) -> None:
        self.inner.close()

    def counts(self) -> Counter[tuple[str, str]]:
        return Counter(self.requests)


def names(store: Store, prefix: str = "") -> list[str]:
    """All names in a store."""
    found: list[str] = []
    for start in [prefix] if prefix else ["head/", "w/", "opt/", "in/", "place/"]:
        page = store.list_after(start)
        found += [entry.name for entry in page.entries]
        while page.more:
            page = store.list_after(start, found[-1])
            found += [entry.name for entry in page.entries]
    return found


def head_of(store: Store) -> Manifest:
    head = perform(find_head(None), store)
    assert head is not None
    return head


def history_of(store: Store) -> list[Manifest]:
    """All versions; fails unless each follows on the one before."""
    versions: list[Manifest] = []
    while (manifest := perform(read_manifest(len(versions)), store)) is not None:
        assert manifest.parent == (versions[-1].sha256 if versions else None)
        versions.append(manifest)
    return versions


def weights_of(store: Store, manifest: Manifest) -> Tensors:
    blob = manifest.weights
    data = store.get(blob.path, limit=blob.size, size=blob.size, sha256=blob.sha256)
    assert data is not None, f"{blob.path} is missing or torn"
    return dict(PackedTensors(data))


def steps(procedure: Procedure[T], store: Store) -> Iterator[Effect]:
    """Run a procedure, and stop before each of its requests to show it."""
    effect = next(procedure)
    while True:
        yield effect
        try:
            try:
                result = answer(effect, store, None)
            except StoreUnavailableError as error:
                effect = procedure.throw(error)
            else:
                effect = procedure.send(result)
        except StopIteration:
            return


@dataclass
class Fault:
    """Ends a process, or fails a request, at the n-th request that all runs under it make together.

    Attributes:
        at: which request, from 0.
        done: whether that request still takes effect.
        kills: whether the process ends there; else the answer is lost.
    """

    at: int
    done: bool
    kills: bool
    count: int = 0

    def run(self, procedure: Procedure[T], store: Store) -> T:
        effect = next(procedure)
        try:
            while True:
                hit = self.count == self.at
                self.count += 1
                if not hit:
                    effect = procedure.send(answer(effect, store, None))
                    continue
                if self.done or isinstance(effect, List):
                    answer(effect, store, None)
                if self.kills:
                    raise Killed
                effect = procedure.throw(StoreUnavailableError("the answer is lost"))
        except StopIteration as end:
            return end.value
