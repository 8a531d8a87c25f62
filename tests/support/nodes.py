"""Nodes that train one number per step, so that every delta shows which steps it carries, and a master that adds."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from speedtronic.checkpoint.tree import decode, encode
from speedtronic.distributed.codec import make_codec
from speedtronic.distributed.delta import DeltaHeader, open_delta
from speedtronic.distributed.node import Install, Node
from speedtronic.distributed.packed_tensors import pack_tensors, unpack_tensors
from speedtronic.distributed.protocol import (
    PROTOCOL,
    DeltaId,
    Manifest,
    create_identity,
    create_manifest,
    find_head,
    list_all,
    parse_delta_name,
    weights_name,
)
from speedtronic.distributed.records import (
    Blob,
    NodeMark,
    Outer,
    Rejection,
    SessionMark,
    session_name,
    session_number,
)
from speedtronic.distributed.requests import Effect, Procedure, answer, perform
from speedtronic.distributed.schema import Schema, Tensors, rebase_, snapshot
from speedtronic.distributed.stores.base import Buffer, Store
from speedtronic.distributed.stores.memory import MemoryStore

STEPS = 64  # as many as a model has numbers
FULL_DISK = OSError(28, "No space left on device")
NEW = NodeMark(
    closed_below=0,
    sessions={},
    tokens_per_step=10.0,
    steps=2,
    seconds=1.0,
    norm=1.0,
    version=0,
    rounds=0.0,
    time=0,
    bytes=0,
    rejected=0,
    reason=None,
)


def session(number: int, process: int = 1) -> str:
    """The name of a session of the process with this nonce; see `NodeProcess`."""
    return session_name(number, f"{process:08x}")


def delta_name(session: str, seq: int, node: str = "n") -> str:
    """The name of a delta in the store."""
    return DeltaId(node, session, seq).name


class MemoryFiles:
    """A node's disk: `contents` outlive it. While `full`, writing fails."""

    def __init__(self, contents: Mapping[str, bytes] | None = None) -> None:
        self.contents = dict(contents or {})
        self.full = False

    def write(self, name: str, data: Buffer) -> None:
        if self.full:
            raise FULL_DISK
        self.contents[name] = bytes(data)

    def read(self, name: str) -> bytes | None:
        return self.contents.get(name)

    def remove(self, name: str) -> None:
        self.contents.pop(name, None)


class Counter(nn.Module):
    """Step k takes 1 from its k-th number; a running average and a count are its buffers."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.done = nn.Parameter(torch.zeros(STEPS + 1, dtype=dtype))
        self.register_buffer("average", torch.zeros(1))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))


class KilledError(Exception):
    """The process ended before this effect."""


class NodeProcess:
    """A training process from its start: a node and its model.

    Args:
        process: a number, from which the nonce of its sessions is made.
        checkpoint: of an earlier process, to continue from; without one the model is new.
        learns: what a step takes from its number.
        budget: how many effects happen before the process is killed; None for all.
    """

    def __init__(
        self,
        store: Store,
        files: MemoryFiles,
        process: int,
        checkpoint: Checkpoint | None = None,
        *,
        node: str = "n",
        codec: str = "fp32",
        model: Counter | None = None,
        learns: float = 1.0,
        budget: int | None = None,
    ) -> None:
        self.store = store
        self.learns = learns
        self.files = files
        self.said: list[tuple[str, Mapping[str, Any]]] = []
        self.budget = budget
        self.model = copy.deepcopy(checkpoint.model) if checkpoint is not None else (model or Counter())
        self.step = checkpoint.step if checkpoint is not None else 0
        self.node = Node(
            Schema.of(self.model),
            node=node,
            nonce=f"{process:08x}",
            codec=make_codec(codec),
            inner_steps=2,
            initial=snapshot(self.model),
            say=lambda event, payload: self.said.append((event, payload)),
            now=lambda: "2031-05-06T07:08:09+00:00",
        )
        self.run(self.node.begin(None if checkpoint is None else checkpoint.state))
        self.continue_training()

    def run(self, procedure: Procedure[Any]) -> Any:
        """Perform a procedure, unless the process is killed on the way."""
        if self.budget is None:
            return perform(procedure, self.store, self.files)
        try:
            effect: Effect = next(procedure)
            while True:
                if self.budget == 0:
                    procedure.close()
                    raise KilledError
                self.budget -= 1
                effect = procedure.send(answer(effect, self.store, self.files))
        except StopIteration as end:
            return end.value

    def train(self, steps: int = 1) -> None:
        for _ in range(steps):
            self.step += 1
            with torch.no_grad():
                self.model.done[self.step] -= self.learns
                self.model.average += 1
                self.model.count += 1
            self.node.count(2, 10)
            self.node.stepped(self.step)

    def boundary(self) -> str:
        taken = self.node.start_boundary()
        if taken == "queued":
            values = snapshot(self.model, self.node.spare(), names=self.node.exchanged)
            self.node.give_snapshot(values, 1.5)
        return taken

    def train_and_send(self, steps: int = 2) -> str:
        """Train, and see the delta into the store."""
        self.train(steps)
        taken = self.boundary()
        self.run(self.node.spool())
        self.run(self.node.upload())
        return taken

    def install(self) -> Install | None:
        install = self.node.installable()
        if install is not None:
            rebase_(self.model, install.new_base, install.base, adopt=install.adopt)
            self.node.installed(install)
            self.continue_training()
        return install

    def receive(self) -> Install | None:
        """Look for a version and install it."""
        self.run(self.node.poll())
        return self.install()

    def continue_training(self) -> None:
        position = self.node.continue_at()
        if position is not None and position.step > self.step:
            self.step = position.step

    def checkpoint(self) -> Checkpoint:
        return Checkpoint(copy.deepcopy(self.model), self.step, through_a_checkpoint(self.node.state_dict(patience=0)))

    def payloads(self, event: str) -> list[Mapping[str, Any]]:
        return [payload for name, payload in self.said if name == event]

    def logged(self, level: str) -> list[str]:
        return [payload["message"] for payload in self.payloads("log") if payload["level"] == level]

    @property
    def values(self) -> list[float]:
        return [float(value) for value in self.model.done.detach()]


class Checkpoint:
    def __init__(self, model: Counter, step: int, state: Any) -> None:
        self.model = model
        self.step = step
        self.state = state


def through_a_checkpoint(state: Any) -> Any:
    """A state as it comes back from a checkpoint, sharing no memory with what was saved."""
    encoded = encode(state)
    return decode(encoded.tree, {name: tensor.clone() for name, tensor in encoded.tensors.items()})


class AddingMaster:
    """Publishes versions in which each new delta is taken from the weights, whole: a number is -1 where its step is in
    them once.

    Args:
        anonymous: whether the store has no identity yet, as one of protocol 1.
    """

    def __init__(
        self,
        store: Store,
        model: nn.Module | None = None,
        codec: str = "fp32",
        nonce: str = "m",
        *,
        anonymous: bool = False,
    ) -> None:
        self.store = store
        self.nonce = nonce
        self.schema = Schema.of(model or Counter())
        self.codec = make_codec(codec)
        self.identity = None if anonymous else self._identify()
        head = perform(find_head(None), store)
        if head is None:
            head = self._publish(None, snapshot(model or Counter()), {})
        self.head = head

    def _identify(self) -> str:
        return perform(create_identity(hashlib.sha256(self.nonce.encode()).hexdigest()[:32]), self.store)

    def give_identity(self) -> None:
        """As the next master does that finds none."""
        self.identity = self._identify()
        self.publish()

    @property
    def weights(self) -> Tensors:
        data = self.store.get(self.head.weights.path, limit=self.head.weights.size)
        assert data is not None
        return unpack_tensors(data, self.schema.types())[0]

    def apply_deltas(self, *, refuse: bool = False, most: int = STEPS) -> int:
        """Publish a version of all deltas that are there and follow on those before; return how many there were."""
        weights, nodes, taken = self.weights, dict(self.head.nodes), 0
        names = [entry.name for entry in perform(list_all("in/"), self.store)][:most]
        for id in sorted(filter(None, map(parse_delta_name, names))):
            if self.head.has_processed(id):
                continue
            data = self.store.get(id.name, limit=2**20)
            assert data is not None
            opened = open_delta(data, self.schema, self.codec)
            assert opened.header.id == id
            if not refuse:
                weights = {
                    name: value - opened.tensors[name] if name in opened.tensors else opened.buffers[name]
                    for name, value in weights.items()
                }
            nodes[id.node] = self._settled(nodes.get(id.node, NEW), opened.header, refuse)
            taken += 1
        if taken:
            self.head = self._publish(self.head, weights, nodes)
            for name in names:
                self.store.delete(name)
        return taken

    def _settled(self, mark: NodeMark, header: DeltaHeader, refuse: bool) -> NodeMark:
        """The mark of a node after one more delta: it opens its session, and may close the one before."""
        sessions, closed_below = dict(mark.sessions), mark.closed_below
        before = header.predecessor
        if header.session not in sessions:
            assert session_number(header.session) >= closed_below, "a session that was closed"
            if before is not None:
                assert session_number(before.session) < session_number(header.session)
                standing = sessions.get(before.session, SessionMark(seq=0, last=None, position=(0, 0, 0)))
                if before.session in sessions or session_number(before.session) >= closed_below:
                    sessions[before.session] = standing.model_copy(update={"last": before.last})
        open_ = sessions.get(header.session, SessionMark(seq=0, last=None, position=(0, 0, 0)))
        assert header.seq == open_.seq + 1
        sessions[header.session] = open_.model_copy(update={"seq": header.seq, "position": tuple(header.position)})
        for name, session in list(sessions.items()):
            if session.last is not None and session.seq >= session.last:
                closed_below = max(closed_below, session_number(name) + 1)
                del sessions[name]
        return mark.model_copy(
            update={
                "closed_below": closed_below,
                "sessions": sessions,
                "rejected": mark.rejected + refuse,
                "reason": "for a test" if refuse else mark.reason,
            }
        )

    def publish(self, weights: Tensors | None = None, nodes: dict[str, NodeMark] | None = None) -> None:
        """A version with these weights and marks, whatever the deltas; without them, with those before."""
        weights = self.weights if weights is None else weights
        self.head = self._publish(self.head, weights, self.head.nodes if nodes is None else nodes)

    def _publish(self, parent: Manifest | None, weights: Tensors, nodes: dict[str, NodeMark]) -> Manifest:
        version = 0 if parent is None else parent.version + 1
        data = pack_tensors(weights, {})
        path = weights_name(version, self.nonce)
        manifest = Manifest(
            protocol=PROTOCOL,
            version=version,
            parent=None if parent is None else parent.sha256,
            nonce=self.nonce,
            time="t",
            store=self.identity,
            schema_id=self.schema.fingerprint,
            weights=Blob(path=path, size=len(data), sha256=hashlib.sha256(data).hexdigest()),
            momentum=None,
            outer=Outer(name="sgd", scalars={}),
            nodes=nodes,
            horizon=0,
            applied=(),
            rejected=tuple[Rejection, ...](),
            fraction=1.0,
            rounds=float(version),
        )
        assert self.store.put_if_absent(path, data)
        assert perform(create_manifest(manifest, parent), self.store)
        return manifest


def each_once(last: int) -> list[float]:
    """The numbers of a model that has learned from each step up to `last` once."""
    return [0.0] + [-1.0] * last + [0.0] * (STEPS - last)


def started(codec: str = "fp32") -> tuple[MemoryStore, AddingMaster, NodeProcess]:
    """A store with version 0, its master, and a node that has installed that."""
    store = MemoryStore()
    master = AddingMaster(store, codec=codec)
    process = NodeProcess(store, MemoryFiles(), 1, codec=codec)
    process.receive()
    return store, master, process
