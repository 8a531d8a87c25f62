"""What a node's disk knows of the work that it has handed over: the ledger, and the delta in the spool."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, ValidationError

from speedtronic.distributed.protocol import DeltaId, Hash, Natural, Position, Text
from speedtronic.distributed.stores.base import Buffer

LEDGER = "ledger.json"
SPOOL = "spool.safetensors"

# Of a node that restarts this often while a master is away, the oldest sessions are taken for those of a stranger.
_MOST_SESSIONS = 256

START = Position(0, 0, 0)


class Ledger(BaseModel):
    """Durable from before a delta leaves the spool; with a delta in the spool, that one's header is further.

    Attributes:
        session, seq: the last delta that the store is known to have; of number 0 where only the position is known.
        step, samples, tokens: the position which all deltas so far cover.
        sessions: all sessions of this node that may have deltas in the store, oldest first.
        origin: SHA-256 of the store's first manifest, by which another store under the same address is recognised.
    """

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    session: Text
    seq: Natural
    step: Natural
    samples: Natural
    tokens: Natural
    sessions: tuple[Text, ...]
    origin: Hash | None

    @property
    def position(self) -> Position:
        return Position(self.step, self.samples, self.tokens)

    def last(self, node: str) -> DeltaId | None:
        """The last delta, where it is known which one it was."""
        return DeltaId(node, self.session, self.seq) if self.seq else None

    def to_bytes(self) -> bytes:
        return self.model_dump_json().encode("ascii")

    @classmethod
    def from_bytes(cls, data: Buffer) -> Ledger | None:
        """Read a ledger; None when it is not one."""
        try:
            return cls.model_validate_json(bytes(data))
        except ValidationError:
            return None

    @classmethod
    def of(cls, delta: DeltaId, covered: Position, sessions: tuple[str, ...], origin: str | None) -> Ledger:
        known = tuple(dict.fromkeys((*sessions, delta.session)))[-_MOST_SESSIONS:]
        return cls(session=delta.session, seq=delta.seq, **covered._asdict(), sessions=known, origin=origin)
