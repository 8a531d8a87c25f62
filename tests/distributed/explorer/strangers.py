"""What others put into the store of a schedule: stray heads, junk where deltas lie, deltas in the name of a node."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from speedtronic.distributed.codec import make_codec
from speedtronic.distributed.delta import DeltaHeader, Predecessor, pack_delta
from speedtronic.distributed.ledger import LEDGER
from speedtronic.distributed.records import Position, session_name
from speedtronic.distributed.requests import List, Put
from speedtronic.distributed.schema import Schema, snapshot
from tests.distributed.explorer.machines import Counting, NodeMachine
from tests.distributed.explorer.schedule import Stage
from tests.distributed.explorer.truth import NO_NODE, SLOTS, Truth

KINDS = ("stray head", "junk", "forged")
_MOST_IN_A_PLACE = 5  # stray heads; of nine names, some must be free
_FAR = 10**9  # steps


@dataclass
class Strangers:
    """Everybody who can write to the store and is no part of the run.

    Args:
        kinds: which of `KINDS` they do.
    """

    stage: Stage
    truth: Truth
    nodes: Sequence[NodeMachine]
    kinds: Sequence[str]
    written: int = 0

    def __post_init__(self) -> None:
        machine = self.nodes[0]
        model = Counting(machine.units, machine.buffers)
        self._schema = Schema.of(model)
        self._values = snapshot(model)

    @property
    def _choices(self) -> random.Random:
        return self.stage.choices

    def act(self) -> None:
        if not self.kinds or self.stage.away:
            return
        kind = self._choices.choice(self.kinds)
        acts: dict[str, Callable[[], str | None]] = {
            "stray head": self._stray_head,
            "junk": self._junk,
            "forged": self._forge,
        }
        name = acts[kind]()
        if name is not None:
            self.stage.troubles[kind] += 1
            self.stage.note(f"a stranger puts {name}: {kind}")

    def _put(self, name: str, data: bytes) -> str | None:
        if self.stage.bucket.there(name) is not None:
            return None
        self.truth.strays.add(name)
        self.stage.bucket.put(name, data)
        return name

    # --- Heads

    def _stray_head(self) -> str | None:
        if self._choices.random() < 0.5 and (removable := self._removable()):
            name = self._choices.choice(removable)
            self.stage.bucket.delete(name)
            self.truth.strays.discard(name)  # what is created there now is no stray
            self.stage.troubles["stray head removed"] += 1
            self.stage.note(f"a stranger removes {name}")
            return None
        version = len(self.truth.heads) + self._choices.choice((0, 0, 0, 1, 2, 5, 50))
        for place in range(_MOST_IN_A_PLACE):
            name = f"head/{version:08d}{f'.{place}' if place else ''}.json"
            if (put := self._put(name, self._no_head(version))) is not None:
                return put
        return None

    def _removable(self) -> list[str]:
        """Stray heads in the place of versions that listings show, where no creation is on its way any more.

        A name that is free again can be created again: no protocol can tell that from the first time.
        """
        bucket = self.stage.bucket
        shown_since = bucket.now - bucket.lag
        asked = [task.asks for process in self.stage.processes for task in process.tasks]
        on_their_way = {asks.name[:13] for asks in [*asked, *self.stage.late] if isinstance(asks, Put)}
        on_their_way |= {asks.prefix[:13] for asks in asked if isinstance(asks, List)}
        shown = {
            name[:13]
            for name, copies in bucket.history.items()
            if name.startswith("head/") and name not in self.truth.strays and copies[0].created <= shown_since
        }
        strays = [name for name in self.truth.strays if name.startswith("head/") and bucket.there(name) is not None]
        return sorted(name for name in strays if name[:13] in shown - on_their_way)

    def _no_head(self, version: int) -> bytes:
        """Anything but the manifest of this version."""
        if not self.truth.heads or self._choices.random() < 0.4:
            return self._choices.choice((b"", b"junk", b"{}", b"\0" * 100))
        old = self._choices.choice(self.truth.head_bytes)
        if self._choices.random() < 0.4:
            return old
        other_history = json.loads(old) | {"version": version, "parent": self._hex(64)}
        return json.dumps(other_history, sort_keys=True, separators=(",", ":")).encode("ascii")

    # --- Deltas

    def _junk(self) -> str | None:
        """What no version can take in, under names that no node gives."""
        node = self._choices.choice(("ghost0", "ghost1", self._choices.choice(self.nodes).name))
        number = self._choices.randrange(1, 2000)
        session = self._choices.choice((session_name(number, self._hex(8)), "odd"))
        seq = self._choices.choice((1, 1, 2, 7))
        name = f"in/{node}/{session}/{seq:08d}.safetensors"
        real = [delta for delta in self.stage.bucket.history if delta in self.truth.committed]
        kind = self._choices.choice(("bytes", "copy", "nan", "model"))
        if kind == "copy" and real:
            return self._put(name, self.stage.bucket.history[self._choices.choice(real)][-1].data)
        if kind == "nan":
            return self._put(name, self._delta(node, session, seq, value=float("nan")))
        if kind == "model":
            return self._put(name, self._delta(node, session, seq, schema_id=self._hex(64)))
        return self._put(name, self._choices.choice((b"", b"junk", b"\0" * 4000)))

    def _forge(self) -> str | None:
        """A delta of nothing in the name of a node, that claims to have trained very far."""
        heads = self.truth.heads
        machine = self._choices.choice(self.nodes)
        looks_for_the_first_time = machine.running is not None and machine.running.node.session is None
        if not heads or LEDGER not in machine.files or looks_for_the_first_time:
            return None  # what it knows of itself, it learns from the store
        mark = heads[-1]["nodes"].get(machine.name, NO_NODE)
        numbers = [mark["closed_below"], *(int(session[:8]) for session in mark["sessions"])]
        session = session_name(max(numbers) + self._choices.choice((1, 2, 500)), self._hex(8))
        own = sorted(delta for delta in self.truth.committed if delta.startswith(f"in/{machine.name}/"))
        predecessor = None
        if own and self._choices.random() < 0.5:
            _, _, before, file = own[-1].split("/")
            predecessor = Predecessor(session=before, last=int(file[:8]) + self._choices.choice((-1, 0, 0, 1)))
        data = self._delta(machine.name, session, 1, predecessor=predecessor, tokens=machine.tokens)
        name = f"in/{machine.name}/{session}/00000001.safetensors"
        self.truth.forge(data)
        self.stage.bucket.put(name, data)
        return name

    def make_time_pass(self) -> None:
        """A node that trains on nothing lets versions be made."""
        self.written += 1
        name = f"in/idler/{session_name(1, '0' * 8)}/{self.written:08d}.safetensors"
        data = self._delta("idler", session_name(1, "0" * 8), self.written)
        self.truth.forge(data)
        self.stage.bucket.put(name, data)

    def _delta(
        self,
        node: str,
        session: str,
        seq: int,
        *,
        value: float = 0.0,
        schema_id: str | None = None,
        predecessor: Predecessor | None = None,
        tokens: int = 8,
    ) -> bytes:
        machine = self.nodes[0]
        header = DeltaHeader(
            node=node,
            session=session,
            seq=seq,
            base_version=max(0, len(self.truth.heads) - 1),
            steps=1,
            samples=1,
            tokens=tokens,
            seconds=1.0,
            position=Position(_FAR, _FAR, _FAR),
            schema_id=schema_id or self._schema.fingerprint,
            codec=machine.codec,
            time="t",
            predecessor=predecessor,
        )
        encoded = make_codec(machine.codec).encode({SLOTS: torch.full((machine.units,), value)}, None).tensors
        buffers = {name: self._values[name] for name in self._schema.names("average", "newest")}
        return pack_delta(header, encoded, buffers)

    def _hex(self, digits: int) -> str:
        return f"{self._choices.getrandbits(4 * digits):0{digits}x}"
