"""What a node's disk knows of the work that it has sent: the ledger, beside the delta in the spool."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, ValidationError

from speedtronic.distributed.protocol import DeltaId
from speedtronic.distributed.records import Hash, Natural, Position, StoreId, Text
from speedtronic.distributed.stores.base import Buffer

LEDGER = "ledger.json"
SPOOL = "spool.safetensors"
RESIDUALS = ("residual-0.safetensors", "residual-1.safetensors")
"""What a lossy codec owes, before and after the last delta. The spool, without one the ledger, says which is valid."""

# If a node restarts more often than this while the master is away, it takes its oldest sessions for another node's.
_MOST_SESSIONS = 256

START = Position(0, 0, 0)


class Ledger(BaseModel):
    """Durable before a delta leaves the spool. A delta that is still in the spool is one further.

    Attributes:
        session, seq: the last delta that the store is known to have; seq is 0 where there is none.
        step, samples, tokens: the position that all deltas so far cover.
        sessions: all sessions of this node that may have deltas in the store, oldest first.
        origin: SHA-256 of the store's first manifest, which tells apart two stores at one address.
        store: the identity of the store, as soon as it has one.
        residual: SHA-256 of the file with what a lossy codec owed after that delta.
    """

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    session: Text
    seq: Natural
    step: Natural
    samples: Natural
    tokens: Natural
    sessions: tuple[Text, ...]
    origin: Hash | None
    store: StoreId | None = None  # absent, as the next, in ledgers of protocol 1
    residual: Hash | None = None

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
    def of(
        cls,
        last: DeltaId | None,
        covered: Position,
        sessions: tuple[str, ...],
        *,
        origin: str | None,
        store: str | None = None,
        residual: str | None = None,
    ) -> Ledger:
        session, seq = ("", 0) if last is None else (last.session, last.seq)
        known = sessions if last is None else tuple(dict.fromkeys((*sessions, session)))
        return cls(
            session=session,
            seq=seq,
            **covered._asdict(),
            sessions=known[-_MOST_SESSIONS:],
            origin=origin,
            store=store,
            residual=residual,
        )
