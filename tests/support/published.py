"""Stores in which a master has published, written down by hand."""

from __future__ import annotations

import hashlib
import struct

from speedtronic.distributed.protocol import PROTOCOL, Manifest, create_identity, head_name, weights_name
from speedtronic.distributed.records import Blob, NodeMark, Outer, SessionMark, seconds_of
from speedtronic.distributed.requests import perform
from speedtronic.distributed.stores.base import Store

STORE = "0" * 32
TIME = "2031-05-06T07:09:00+00:00"
OLD = SessionMark(seq=3, last=None, position=(75, 1200, 153_600))
MARK = NodeMark(
    closed_below=0,
    sessions={"00000001-0000aaaa": OLD},
    tokens_per_step=2048.0,
    steps=25,
    seconds=4.0,
    norm=0.5,
    version=1,
    rounds=1.0,
    time=seconds_of("2031-05-06T07:08:09+00:00"),
    bytes=3000,
    rejected=1,
    reason="stale",
)


def weights_of(version: int) -> bytes:
    """A safetensors file with one number, which is the version."""
    header = b'{"number":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    header += b" " * (-len(header) % 8)
    return struct.pack("<Q", len(header)) + header + struct.pack("<f", version)


def publish(
    store: Store,
    after: Manifest | None = None,
    *,
    nodes: dict[str, NodeMark] | None = None,
    rounds: float | None = None,
    time: str = TIME,
) -> Manifest:
    """Create the version after `after`, or version 0, and return its manifest."""
    version = 0 if after is None else after.version + 1
    data = weights_of(version)
    weights = Blob(path=weights_name(version, "n"), size=len(data), sha256=hashlib.sha256(data).hexdigest())
    manifest = Manifest(
        protocol=PROTOCOL,
        version=version,
        parent=after and after.sha256,
        nonce=f"n{version}",
        time=time,
        store=STORE,
        schema_id="0" * 64,
        weights=weights,
        momentum=None,
        outer=Outer(name="nesterov", scalars={}),
        nodes=nodes or {},
        horizon=0,
        applied=(),
        rejected=(),
        fraction=0.5,
        rounds=float(version) if rounds is None else rounds,
    )
    perform(create_identity(STORE), store)
    store.put_if_absent(weights.path, data)
    store.put_if_absent(head_name(version), manifest.to_bytes())
    return manifest


def publish_two_versions(store: Store) -> Manifest:
    """Versions 0 to 2, which differ by half a round at last: `a` had a delta in version 1, `b` in version 2."""
    one = publish(store, publish(store), nodes={"a": MARK})
    of_b = MARK.model_copy(update={"version": 2, "rounds": 1.5, "rejected": 0, "reason": None})
    return publish(store, one, nodes={"a": MARK, "b": of_b}, rounds=1.5)
