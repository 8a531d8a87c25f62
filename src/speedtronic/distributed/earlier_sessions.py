"""What the store knows of a node's earlier sessions. The node asks when it cannot trust its disk to know them all."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from speedtronic.distributed.codec import Codec
from speedtronic.distributed.delta import max_delta_bytes, open_delta
from speedtronic.distributed.ledger import START
from speedtronic.distributed.packed_tensors import TensorFormatError
from speedtronic.distributed.protocol import (
    DELTAS,
    MOST_COPIES,
    DeltaId,
    Manifest,
    Position,
    copy_name,
    list_all,
    parse_delta_name,
)
from speedtronic.distributed.requests import Get, Procedure
from speedtronic.distributed.schema import Schema

RECENT_SESSIONS = 64


class EarlierSessions(NamedTuple):
    """What a store has of a node.

    Attributes:
        covered: the position up to which its work is in the store, in a version or outstanding.
        outstanding: its deltas that are whole and in no version yet.
        last_seq: by session, the greatest number in a mark or of an outstanding delta.
    """

    covered: Position
    outstanding: frozenset[DeltaId]
    last_seq: Mapping[str, int]


def look_back(
    node: str,
    manifest: Manifest,
    schema: Schema,
    codec: Codec,
    sessions: Iterable[str],
    on_disk: Collection[str],
) -> Procedure[EarlierSessions]:
    """Ask a store for the work of a node that the node's disk does not know.

    Marks alone are not enough: a delta that is uploaded and in no version yet covers data as well, which must not be
    trained on again. What the master processes meanwhile is in a newer version, so the answer holds only if there is
    none afterwards.

    Args:
        sessions: of the node, as far as they are known.
        on_disk: sessions that the disk knows completely, so that nothing needs to be read of them.
    """
    marks = {key.partition("/")[2]: mark for key, mark in manifest.marks.items() if key.partition("/")[0] == node}
    covered = max((mark.position for mark in marks.values()), default=START)

    # A listing may lag behind. It only adds sessions that nothing else names.
    listed = [parse_delta_name(entry.name) for entry in (yield from list_all(f"{DELTAS}{node}/"))]
    # Of sessions known by their marks alone, the recent ones are enough: a node without a disk has one more at each
    # start, and the outstanding deltas of older ones are listed, refused or gone.
    recent = sorted(marks, key=lambda session: (marks[session].version, session))[-RECENT_SESSIONS:]
    asked = {*sessions, *(delta.session for delta in listed if delta and delta.node == node), *recent} - set(on_disk)

    # Sessions have no gaps: strong reads from the mark on find every outstanding delta.
    last_seq = dict.fromkeys(asked, 0) | {session: mark.seq for session, mark in marks.items()}
    outstanding: set[DeltaId] = set()
    for session in sorted(asked):
        while True:
            delta = DeltaId(node, session, last_seq[session] + 1)
            position = yield from _position_of(delta, schema, codec)
            if position is None:
                break
            covered = max(covered, position)
            outstanding.add(delta)
            last_seq[session] = delta.seq
    return EarlierSessions(covered, frozenset(outstanding), last_seq)


def _position_of(delta: DeltaId, schema: Schema, codec: Codec) -> Procedure[Position | None]:
    """The position that an outstanding delta covers; None if it is missing, torn, or of another model."""
    for copy in range(MOST_COPIES):
        data = yield from Get(copy_name(delta.name, copy), limit=max_delta_bytes(schema, codec))
        if data is None:
            return None
        try:
            header = open_delta(data, schema, codec).header
        except TensorFormatError:
            continue
        if header.id == delta:
            return header.position
    return None
