"""What the store knows of a node's earlier sessions. The node asks when it cannot trust its disk to know them all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from speedtronic.distributed.codec import Codec
from speedtronic.distributed.delta import can_be_added, max_delta_bytes, open_delta
from speedtronic.distributed.ledger import START
from speedtronic.distributed.packed_tensors import TensorFormatError
from speedtronic.distributed.protocol import (
    DELTAS,
    MOST_COPIES,
    DeltaId,
    Manifest,
    copy_name,
    list_all,
    parse_delta_name,
)
from speedtronic.distributed.records import Position, session_number
from speedtronic.distributed.requests import Get, Procedure
from speedtronic.distributed.schema import Schema

# A listed session with a number further ahead is nobody's: no master opens one that is more than 1,000 ahead, and the
# node's own next one must be among these.
_FURTHEST_AHEAD = 999


class EarlierSessions(NamedTuple):
    """What a store has of a node.

    Attributes:
        covered: the position up to which its work is in the store, in a version or outstanding.
        outstanding: its deltas that are whole and in no version yet.
        last_seq: by session, the greatest number in a mark or of an outstanding delta. Without the closed sessions.
    """

    covered: Position
    outstanding: frozenset[DeltaId]
    last_seq: Mapping[str, int]


def look_back(
    node: str, manifest: Manifest, schema: Schema, codec: Codec, sessions: Iterable[str]
) -> Procedure[EarlierSessions]:
    """Ask a store for the work of a node that the node's disk does not know.

    Marks alone are not enough: a delta that is uploaded and in no version yet covers data as well, which must not be
    trained on again. What the master processes meanwhile is in a newer version, so the answer holds only if there is
    none afterwards.

    Args:
        sessions: of the node, as far as they are known.
    """
    mark = manifest.nodes.get(node)
    marks = {} if mark is None else mark.sessions
    covered = START if mark is None else mark.position
    furthest = max([0 if mark is None else mark.closed_below, *map(session_number, marks)]) + _FURTHEST_AHEAD

    # A listing may lag behind. It only adds sessions that nothing else names.
    found = [parse_delta_name(entry.name) for entry in (yield from list_all(f"{DELTAS}{node}/"))]
    listed = {delta.session for delta in found if delta is not None and delta.node == node}
    known = {*sessions, *marks, *(session for session in listed if session_number(session) <= furthest)}
    asked = {session for session in known if mark is None or not mark.has_closed(session)}

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
    """The position that an outstanding delta covers; None if it is missing, torn, not finite, or of another model."""
    for copy in range(MOST_COPIES):
        data = yield from Get(copy_name(delta.name, copy), limit=max_delta_bytes(schema, codec))
        if data is None:
            return None
        try:
            found = open_delta(data, schema, codec)
        except TensorFormatError:
            continue
        # No node sends what is not finite, and no master takes it.
        if found.header.id == delta and all(can_be_added(tensor) for tensor in found.tensors.values()):
            return found.header.position
    return None
