"""What is known of a node's earlier lives: to the store, where the disk that they left is gone, and to the spool."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from speedtronic.distributed.codec import Codec
from speedtronic.distributed.delta import DeltaHeader, max_delta_bytes, open_delta, read_header
from speedtronic.distributed.ledger import START
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
from speedtronic.distributed.requests import Procedure, get
from speedtronic.distributed.tensors import PackedTensors, Schema, TensorFormatError

RECENT_SESSIONS = 64


class Past(NamedTuple):
    """What a store has of a node.

    Attributes:
        covered: the position up to which its work is in the store, in a version or on the way into one.
        whole: its deltas that are on the way, and not torn.
        seen: by session, the greatest number in a mark or a name.
    """

    covered: Position
    whole: frozenset[DeltaId]
    seen: Mapping[str, int]


def look_back(
    node: str,
    manifest: Manifest,
    schema: Schema,
    codec: Codec,
    sessions: Iterable[str],
    on_disk: Collection[str],
) -> Procedure[Past]:
    """Ask a store for what it has of a node that the node's disk does not know.

    Marks alone are not enough: a delta that is uploaded and in no version yet is covered as well, and its data must not
    be trained on again. Sessions have no gaps, so strong reads from the mark on find all of one; a listing, which may
    lag behind, only adds sessions that nothing else tells of. What the master takes in meanwhile is in a newer version:
    the answer holds if there is none afterwards.

    Of sessions that only marks tell of, the last `RECENT_SESSIONS` are read: a node without a disk of its own has one
    more at each start, and what older ones had on the way is listed, refused or gone.

    Args:
        sessions: of the node, as far as they are known.
        on_disk: those of which the disk knows all, and nothing needs to be read.
    """
    marks = {
        lineage.partition("/")[2]: mark for lineage, mark in manifest.marks.items() if lineage.partition("/")[0] == node
    }
    covered = max((mark.position for mark in marks.values()), default=START)
    listed = yield from _listed_sessions(node)
    recent = sorted(marks, key=lambda session: (marks[session].version, session))[-RECENT_SESSIONS:]
    asked = {*sessions, *listed, *recent} - set(on_disk)
    seen = dict.fromkeys(asked, 0) | {session: mark.seq for session, mark in marks.items()}
    whole: set[DeltaId] = set()
    for session in sorted(asked):
        while True:
            delta = DeltaId(node, session, seen[session] + 1)
            position = yield from _position_in(delta, schema, codec)
            if position is None:
                break
            covered = max(covered, position)
            whole.add(delta)
            seen[session] = delta.seq
    return Past(covered, frozenset(whole), seen)


def _listed_sessions(node: str) -> Procedure[list[str]]:
    entries = yield from list_all(f"{DELTAS}{node}/")
    deltas = [parse_delta_name(entry.name) for entry in entries]
    return sorted({delta.session for delta in deltas if delta is not None and delta.node == node})


def _position_in(delta: DeltaId, schema: Schema, codec: Codec) -> Procedure[Position | None]:
    """The position that a delta on its way covers; None when it is not there, or will not enter: torn, or of another
    model."""
    for copy in range(MOST_COPIES):
        data = yield from get(copy_name(delta.name, copy), limit=max_delta_bytes(schema, codec))
        if data is None:
            return None
        try:
            header = open_delta(data, schema, codec).header
        except TensorFormatError:
            continue
        if header.id == delta:
            return header.position
    return None


def spooled_delta(data: bytes) -> DeltaHeader | None:
    """The header of the delta in a spool, of whatever model; None when its tensors are not as they were written."""
    try:
        header = read_header(data)
        content = PackedTensors(data).content
    except TensorFormatError:
        return None
    return header if hashlib.sha256(content).hexdigest() == header.sha256 else None
