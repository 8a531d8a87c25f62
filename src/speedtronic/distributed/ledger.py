"""What a node's disk knows of the work that it has sent: the ledger, beside the delta in the spool."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, ValidationError

from speedtronic.distributed.protocol import DeltaId, Hash, Natural, Position, Text
from speedtronic.distributed.stores.base import Buffer

LEDGER = "ledger.json"
SPOOL = "spool.safetensors"

# If a node restarts more often than this while the master is away, it takes its oldest sessions for another node's.
_MOST_SESSIONS = 256

START = Position(0, 0, 0)


class Ledger(BaseModel):
    """Durable before a delta leaves the spool. A delta that is still in the spool is one further.

    Attributes:
        session, seq: the last delta that the store is known to have; seq is 0 where only the position is known.
        step, samples, tokens: the position that all deltas so far cover.
        sessions: all sessions of this node that may have deltas in the store, oldest first.
        origin: SHA-256 of the store's first manifest, which tells apart two stores at one address.
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
        """The last delta, if it is known."""
        return DeltaId(node, self.session, self.seq) if self.seq else None

    def to_bytes(self) -> bytes:
        return self.model_dump_json().encode("ascii")

    @classmethod
    def from_bytes(cls, data: Buffer) -> Ledger | None:
        """Read a ledger; None if it is damaged."""
        try:
            return cls.model_validate_json(bytes(data))
        except ValidationError:
            return None

    @classmethod
    def of(cls, delta: DeltaId, covered: Position, sessions: tuple[str, ...], origin: str | None) -> Ledger:
        known = tuple(dict.fromkeys((*sessions, delta.session)))[-_MOST_SESSIONS:]
        return cls(session=delta.session, seq=delta.seq, **covered._asdict(), sessions=known, origin=origin)
