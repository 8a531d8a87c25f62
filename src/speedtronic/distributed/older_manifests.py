"""Manifests of protocol 1. Their stores are read and continued; the next version is of the present protocol."""

from __future__ import annotations

from collections import defaultdict
from typing import Annotated, Any

from pydantic import Field, StringConstraints

from speedtronic.distributed.records import (
    MOST_OPEN,
    Amount,
    Blob,
    Hash,
    Natural,
    NodeMark,
    Nonce,
    Outer,
    Record,
    Rejection,
    SessionMark,
    Text,
    canonical_json,
    seconds_of,
)
from speedtronic.distributed.stores.base import COMPONENT
from speedtronic.errors import StoreContentError


class _Mark(Record):
    """How far the deltas of a session were processed. Marks of all sessions were kept for ever."""

    seq: Natural
    step: Natural
    samples: Natural
    tokens: Natural
    tokens_per_step: Amount
    seconds: Amount
    version: Natural
    rounds: Amount
    time: Text
    bytes: Natural
    rejected: Natural
    reason: Text | None


class _Manifest(Record):
    protocol: Natural
    version: Natural
    parent: Hash | None
    nonce: Nonce
    time: Text
    schema_id: Hash
    weights: Blob
    momentum: Blob | None
    outer: Outer
    marks: dict[Annotated[str, StringConstraints(pattern=rf"^{COMPONENT}/{COMPONENT}$")], _Mark]
    applied: tuple[Text, ...]
    rejected: tuple[Rejection, ...]
    fraction: Annotated[float, Field(ge=0, le=1)]
    rounds: Amount


def read_older(data: bytes) -> dict[str, Any]:
    """The fields of a `Manifest`, from the bytes of one of protocol 1.

    Of a node with many sessions the last are kept. Then nothing that is based on this version or one before opens a
    session any more: a late copy of what an older session sent does not enter twice.

    Raises:
        ValidationError, StoreContentError: it is not one.
    """
    older = _Manifest.model_validate_json(data)
    if canonical_json(older) != data:
        raise StoreContentError("the manifest is not in the canonical form that Speedtronic writes")
    marks: dict[str, list[tuple[str, _Mark]]] = defaultdict(list)
    for key, mark in older.marks.items():
        node, _, session = key.partition("/")
        marks[node].append((session, mark))
    dropped = any(len(sessions) > MOST_OPEN for sessions in marks.values())
    fields = {name: getattr(older, name) for name in _Manifest.model_fields if name != "marks"}
    return fields | {
        "store": None,
        "nodes": {node: _node_mark(sessions) for node, sessions in marks.items()},
        "horizon": older.version + 1 if dropped else 0,
    }


def _node_mark(sessions: list[tuple[str, _Mark]]) -> NodeMark:
    newest_last = sorted(sessions, key=lambda session: (session[1].version, session[0]))
    last = newest_last[-1][1]
    reasons = [mark.reason for _, mark in newest_last if mark.reason is not None]
    return NodeMark(
        closed_below=0,
        sessions={
            name: SessionMark(seq=mark.seq, last=None, position=(mark.step, mark.samples, mark.tokens))
            for name, mark in newest_last[-MOST_OPEN:]
        },
        tokens_per_step=last.tokens_per_step,
        steps=0,
        seconds=last.seconds,
        norm=None,
        version=last.version,
        rounds=last.rounds,
        time=seconds_of(last.time),
        bytes=sum(mark.bytes for _, mark in sessions),
        rejected=sum(mark.rejected for _, mark in sessions),
        reason=reasons[-1] if reasons else None,
    )
