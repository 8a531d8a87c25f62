"""The parts of manifests and of deltas' headers: plain data, checked field by field."""

from __future__ import annotations

import json
import re
from datetime import datetime
from typing import Annotated, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from speedtronic.distributed.stores.base import COMPONENT

MOST_OPEN = 16  # sessions of one node; of more, the oldest is closed

BLOB_NAME = re.compile(r"(?:w|opt)/([0-9]{8})-[A-Za-z0-9-]{1,128}(?:\.[1-9])?\.safetensors")
_SESSION_NAME = re.compile(r"([0-9]{8})-[0-9a-f]{8}")

Natural = Annotated[int, Field(ge=0, lt=2**63)]
Amount = Annotated[float, Field(ge=0)]
Hash = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
StoreId = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$")]
Text = Annotated[str, StringConstraints(max_length=1000)]
Component = Annotated[str, StringConstraints(pattern=rf"^{COMPONENT}$")]
Nonce = Annotated[str, StringConstraints(min_length=1, max_length=128)]


class Position(NamedTuple):
    """How far a node's training has come: optimizer steps, samples and tokens since its run began."""

    step: int
    samples: int
    tokens: int

    def since(self, earlier: Position) -> Position:
        """What was trained between an earlier position and this one."""
        return Position(self.step - earlier.step, self.samples - earlier.samples, self.tokens - earlier.tokens)


def session_name(number: int, nonce: str) -> str:
    """The name of a node's session. A node counts its sessions from 1.

    Args:
        nonce: eight hexadecimal digits, which tell apart two sessions of one number.
    """
    return f"{number:08d}-{nonce}"


def session_number(session: str) -> int:
    """The number in a session's name; 0 for a session of protocol 1, which had none."""
    match = _SESSION_NAME.fullmatch(session)
    return int(match[1]) if match else 0


class Record(BaseModel):
    """A part of what lies in a store: exactly these fields, of exactly these types."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)


class Blob(Record):
    """An object that a manifest names, and how to tell that it is whole. Size in bytes."""

    path: Annotated[str, StringConstraints(pattern=rf"^{BLOB_NAME.pattern}$")]
    size: Natural
    sha256: Hash


class SessionMark(Record):
    """How far the deltas of an open session have been processed (a high-water mark).

    Attributes:
        seq: number of the last one; this and all before are in the weights or were refused.
        last: number of the last one that the session has sent, as the session after it says; None until then. The
            session is closed when `seq` is there.
        position: what the processed ones cover.
    """

    seq: Natural
    last: Natural | None
    position: tuple[Natural, Natural, Natural]


class NodeMark(Record):
    """What the versions so far have taken from a node.

    Attributes:
        closed_below: sessions with smaller numbers that are not in `sessions` are closed: nothing of them enters again.
        sessions: the open ones, by name.
        tokens_per_step: tokens (of data without them, samples) of one inner step, in its last admitted delta.
        steps, seconds: inner steps of that delta, and how long they took.
        norm: Euclidean norm of that delta as it was added up. None if its store was of protocol 1 then.
        version: the version in which a delta of it entered last.
        rounds: what `Manifest.rounds` was then.
        time: when a delta of it was processed last, in seconds since 1970 (UTC), by the master's clock.
        bytes: size of all its deltas.
        rejected: how many of them were refused.
        reason: why the last of those was.
    """

    closed_below: Natural
    sessions: Annotated[dict[Component, SessionMark], Field(max_length=MOST_OPEN)]
    tokens_per_step: Amount
    steps: Natural
    seconds: Amount
    norm: Amount | None
    version: Natural
    rounds: Amount
    time: Natural
    bytes: Natural
    rejected: Natural
    reason: Text | None

    def has_closed(self, session: str) -> bool:
        """Whether nothing of a session enters any more."""
        return session not in self.sessions and session_number(session) < self.closed_below

    @property
    def position(self) -> Position:
        """What the open sessions cover: the position of the one that is furthest."""
        return max((Position(*mark.position) for mark in self.sessions.values()), default=Position(0, 0, 0))


class Rejection(Record):
    """A delta that was refused: its name in the store, and why."""

    name: Text
    reason: Text


class Outer(Record):
    """Which outer optimizer made a version, and the numbers of its state."""

    name: Text
    scalars: dict[str, int | float]


def canonical_json(record: BaseModel, *, without: frozenset[str] = frozenset()) -> bytes:
    text = json.dumps(
        record.model_dump(mode="json", exclude=set(without)), sort_keys=True, separators=(",", ":"), allow_nan=False
    )
    return text.encode("ascii")


def seconds_of(time: str) -> int:
    """Seconds since 1970 of a time that was written for people, in ISO 8601; 0 for another text."""
    try:
        return max(0, int(datetime.fromisoformat(time).timestamp()))
    except (ValueError, OverflowError):
        return 0


def first_mistake(error: ValidationError) -> str:
    """Where foreign data is wrong first, and how; short enough for a log."""
    first = error.errors()[0]
    where = ascii(".".join(str(part) for part in first["loc"]) or "JSON")[:80]
    return f"{where}: {first['type']}"
