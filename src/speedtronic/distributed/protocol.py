"""What lies in the store, under which names, and how it is read and created. All machines must agree on this file.

    store.json                                    the identity of the store
    head/{version:08d}.json                       manifests; creating one commits a version
    w/{version:08d}-{nonce}.safetensors           global weights
    opt/{version:08d}-{nonce}.safetensors         state of the outer optimizer
    in/{node}/{session}/{seq:08d}.safetensors     deltas, numbered from 1 without gaps in a session
    place/{index:04d}.json                        which node reads which part of the data

Each object is created once and never changed, and no name is used again after a deletion: a request that was given up
may still take effect at any later time, and must then do no harm. Where something else lies under a name, the object
lies beside it, under the first free of its copies' names (`copy_name`). Readers try them in the same order.

Stores of protocol 1 are read too (`older_manifests.py`).
"""

from __future__ import annotations

import hashlib
import re
from types import EllipsisType
from typing import Annotated, NamedTuple, Self

from pydantic import BaseModel, Field, PrivateAttr, ValidationError

from speedtronic.distributed.older_manifests import read_older
from speedtronic.distributed.records import (
    BLOB_NAME,
    Amount,
    Blob,
    Component,
    Hash,
    Natural,
    NodeMark,
    Nonce,
    Outer,
    Record,
    Rejection,
    SessionMark,
    StoreId,
    Text,
    canonical_json,
    first_mistake,
)
from speedtronic.distributed.requests import Get, List, Procedure, Put
from speedtronic.distributed.stores.base import COMPONENT, Buffer, Entry
from speedtronic.errors import StoreContentError, StoreUnavailableError

PROTOCOL = 2

IDENTITY = "store.json"
HEADS, WEIGHTS, MOMENTUM, DELTAS, PLACES = "head/", "w/", "opt/", "in/", "place/"

MANIFEST_LIMIT = 8 * 2**20  # bytes; one of 1,000 nodes has less than 512 kB
MOST_COPIES = 9  # of one object: under its own name, and beside it
_IDENTITY_LIMIT = 4096  # bytes
_LAST_NUMBER = 99_999_999  # what eight digits hold

_NUMBER = "[0-9]{8}"
# Protocol 1 named copies with a '-' and up to four digits.
_DELTA = re.compile(rf"in/({COMPONENT})/({COMPONENT})/({_NUMBER})(?:\.[1-9]|-[0-9]{{1,4}})?\.safetensors")


# --- Names


class DeltaId(NamedTuple):
    """A delta by node, session and number. Deltas are added up in this order."""

    node: str
    session: str
    seq: int

    @property
    def name(self) -> str:
        """Where it lies in the store."""
        return f"{DELTAS}{self.node}/{self.session}/{self.seq:08d}.safetensors"


def parse_delta_name(name: str) -> DeltaId | None:
    """The delta of which an object of the store is a copy, or None for any other name."""
    match = _DELTA.fullmatch(name)
    if match is None or int(match[3]) == 0:
        return None
    return DeltaId(match[1], match[2], int(match[3]))


def head_name(version: int) -> str:
    if not 0 <= version <= _LAST_NUMBER:
        raise StoreContentError(f"version {version} has no name: the store has reached its last version")
    return f"{HEADS}{version:08d}.json"


def weights_name(version: int, nonce: str) -> str:
    return f"{WEIGHTS}{version:08d}-{nonce}.safetensors"


def momentum_name(version: int, nonce: str) -> str:
    return f"{MOMENTUM}{version:08d}-{nonce}.safetensors"


def parse_blob_version(name: str) -> int | None:
    """The version for which weights or momentum were written, or None for any other name."""
    match = BLOB_NAME.fullmatch(name)
    return int(match[1]) if match else None


def copy_name(name: str, copy: int) -> str:
    """Another name for the same object, used when something else lies under the first. Copy 0 is the name itself."""
    if copy == 0:
        return name
    stem, _, suffix = name.rpartition(".")
    return f"{stem}.{copy}.{suffix}"


# --- Manifests


class Manifest(Record):
    """A version of the global weights, and everything that became true together with it.

    Attributes:
        protocol: of the layout and these fields; 1 if it was read from an older manifest.
        version: counts from 0; also the number of outer steps.
        parent: SHA-256 of the manifest before this; None for version 0.
        nonce: of the master's attempt that created it.
        time: when it was made, UTC, ISO 8601, by the master's clock.
        store: the identity of the store; None in protocol 1.
        schema_id: fingerprint of the model's names, shapes and dtypes.
        weights: where they lie. The same as before when no delta entered.
        momentum: where the outer optimizer's tensors lie; None when it has none yet.
        outer: the outer optimizer.
        nodes: by name, what was taken from each node.
        horizon: a session that is not open can be opened only by a delta whose base is this version or a newer one.
            0 unless nodes that were away for long were dropped from `nodes`.
        applied: names of the deltas that entered with this version.
        rejected: those that were refused with it, of sessions that are open.
        fraction: f, the part of a round that this version is, from 0 to 1.
        rounds: the sum of f over all versions up to this.
        fragment, downlink, signature: kept for parts of the model, compressed weights, and signed manifests; None yet.
    """

    protocol: Natural
    version: Annotated[int, Field(ge=0, le=_LAST_NUMBER)]
    parent: Hash | None
    nonce: Nonce
    time: Text
    store: StoreId | None
    schema_id: Hash
    weights: Blob
    momentum: Blob | None
    outer: Outer
    nodes: dict[Component, NodeMark]
    horizon: Natural
    applied: tuple[Text, ...]
    rejected: tuple[Rejection, ...]
    fraction: Annotated[float, Field(ge=0, le=1)]
    rounds: Amount
    fragment: None = None
    downlink: None = None
    signature: None = None

    _bytes: bytes | None = PrivateAttr(None)  # as they were read, if that is not what `to_bytes` would write

    def to_bytes(self) -> bytes:
        """Canonical JSON: the same manifest has the same bytes everywhere."""
        if self._bytes is not None:
            return self._bytes
        return canonical_json(self)

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.to_bytes()).hexdigest()

    @classmethod
    def from_bytes(cls, data: Buffer) -> Self:
        """Read a manifest of this protocol or of the one before.

        Raises:
            StoreContentError: it is not one.
        """
        raw = bytes(data)
        try:
            if _AnyProtocol.model_validate_json(raw).protocol == 1:
                manifest = cls(**read_older(raw))
                manifest._bytes = raw
            else:
                manifest = cls.model_validate_json(raw)
        except ValidationError as error:
            raise StoreContentError(f"not a manifest of Speedtronic: {first_mistake(error)}") from None
        if manifest.protocol not in {1, PROTOCOL}:
            raise StoreContentError(f"a manifest of protocol {manifest.protocol}")
        if manifest.to_bytes() != raw:
            raise StoreContentError("the manifest is not in the canonical form that Speedtronic writes")
        return manifest

    def session(self, node: str, session: str) -> SessionMark | None:
        """The mark of an open session."""
        mark = self.nodes.get(node)
        return None if mark is None else mark.sessions.get(session)

    def has_processed(self, delta: DeltaId) -> bool:
        """Whether a delta is in the weights of this version, was refused, or is of a closed session: it never enters
        again."""
        mark = self.nodes.get(delta.node)
        if mark is None:
            return False
        session = mark.sessions.get(delta.session)
        return mark.has_closed(delta.session) if session is None else delta.seq <= session.seq


class _AnyProtocol(BaseModel):
    """What a manifest of any protocol says."""

    protocol: Natural
    version: Natural
    parent: Hash | None


# --- The identity of a store


class _Identity(Record):
    protocol: Natural
    id: StoreId


def read_identity() -> Procedure[str | None]:
    """The id of the store; None if it has none, as an empty store and one of protocol 1.

    Raises:
        StoreContentError: something else lies under its name.
    """
    data = yield from Get(IDENTITY, limit=_IDENTITY_LIMIT, partial=True)
    if data is None:
        return None
    try:
        return _Identity.model_validate_json(data).id
    except ValidationError:
        raise StoreContentError(
            f"{IDENTITY} does not hold the identity of a store: another program wrote it; restore it, or "
            "use another distributed.repo_id"
        ) from None


def create_identity(id: str) -> Procedure[str]:
    """Give the store an identity, unless it has one, and return the one that it has.

    Args:
        id: 32 random hexadecimal digits.
    """
    yield from Put(IDENTITY, canonical_json(_Identity(protocol=PROTOCOL, id=id)))
    standing = yield from read_identity()
    if standing is None:
        raise StoreUnavailableError(f"{IDENTITY} cannot be read after it was created")
    return standing


def check_identity(id: str | None, *, or_another: bool = False) -> Procedure[None]:
    """Make sure that this is still the store of an id; without one, there is nothing to check.

    A mount that is away leaves an empty folder in its place. What is written there is lost when it returns.

    Args:
        or_another: whether another store will do: only what is no store will not.

    Raises:
        StoreUnavailableError: the store has no identity (any more).
        StoreContentError: it has another one.
    """
    if id is None:
        return
    standing = yield from read_identity()
    if standing is None:
        raise StoreUnavailableError(f"{IDENTITY} is gone, so this is not the store that it was; is the folder mounted?")
    if standing != id and not or_another:
        raise StoreContentError(
            f"another store lies at this address now (its {IDENTITY} differs): restore the former one, or restart to "
            "join this one"
        )


# --- Heads


def read_manifest(
    version: int, parent: str | EllipsisType | None = ..., store: str | None = None, *, beside: bool = True
) -> Procedure[Manifest | None]:
    """The manifest of a version, or None if there is no such version. Strong reads.

    What lies under the name of the version and is another thing is junk: the manifest lies beside it. A failed read is
    not junk: it raises.

    Args:
        parent: SHA-256 of the version before it, if that is known.
        store: identity of the store, if it is known.
        beside: whether to look beside a free name too; see `_look_for`.

    Raises:
        StoreContentError: with `parent`, a later version of Speedtronic wrote it, or there is no name left for it.
    """
    manifest, _ = yield from _look_for(version, parent, store, beside=beside)
    return manifest


def read_past(version: int) -> Procedure[Manifest | None]:
    """The manifest of a version that is not the newest one; None if there is none. Strong reads.

    What lies under its name may be a manifest of another history: that one has no successor here.
    """
    copy = 0
    while copy < MOST_COPIES:
        manifest, copy = yield from _look_for(version, ..., start=copy)
        if manifest is None:
            return None
        if (yield from read_manifest(version + 1, manifest.sha256)) is not None:
            return manifest
        copy += 1
    return None


def _look_for(
    version: int,
    parent: str | EllipsisType | None,
    store: str | None = None,
    *,
    start: int = 0,
    beside: bool = True,
) -> Procedure[tuple[Manifest | None, int]]:
    """The manifest of a version, and behind how many pieces of junk it lies, or the first free name.

    Args:
        start: behind how many pieces the look begins.
        beside: look beside a free name too, by one listing: the manifest was put beside junk that was removed since.
    """
    free: int | None = None
    listed: set[str] = set()
    for copy in range(start, MOST_COPIES):
        name = copy_name(head_name(version), copy)
        if free is not None and name not in listed:
            continue
        data = yield from Get(name, limit=MANIFEST_LIMIT, partial=True)
        if data is None:
            if not beside:
                return None, copy
            if free is None:
                free, listed = copy, {entry.name for entry in (yield from list_all(f"{HEADS}{version:08d}."))}
            continue
        if len(data) > MANIFEST_LIMIT:
            continue
        try:
            manifest = Manifest.from_bytes(data)
        except StoreContentError:
            _refuse_newer(name, bytes(data), version, parent)
            continue
        if manifest.version == version and parent in {..., manifest.parent} and store in {None, manifest.store}:
            return manifest, copy
    if free is not None:
        return None, free
    if parent is ...:
        return None, MOST_COPIES
    raise StoreContentError(
        f"{head_name(version)} and the {MOST_COPIES - 1} names beside it hold something else than version {version}; "
        "remove these files"
    )


def _refuse_newer(name: str, data: bytes, version: int, parent: str | EllipsisType | None) -> None:
    """Raise StoreContentError for the version of a later protocol, which is no junk."""
    try:
        later = _AnyProtocol.model_validate_json(data)
    except ValidationError:
        return
    if later.protocol > PROTOCOL and later.version == version and later.parent == parent:
        raise StoreContentError(
            f"{name}: the store is kept by a newer Speedtronic (protocol {later.protocol}, here {PROTOCOL}); "
            "let all nodes run the same version, or use another distributed.repo_id"
        )


def create_manifest(manifest: Manifest, parent: Manifest | None) -> Procedure[bool]:
    """Create a manifest, and so the version; false if another master was faster.

    The answer to the creation decides nothing: it may be lost, or belong to the repetition of a request that had
    succeeded. The nonce of the manifest that stands there afterwards tells which master created it.

    The version before it is read again, before and afterwards: where a mount is away there is none.

    Raises:
        StoreUnavailableError: the version before it is gone, or this one cannot be read after it was created.
        StoreContentError: the manifest is too large, there is no free name, or the history is another one.
    """
    data = manifest.to_bytes()
    if len(data) > MANIFEST_LIMIT:
        raise StoreContentError(f"a manifest of {len(data)} bytes is too large to read; use a new distributed.repo_id")
    yield from _check_standing(manifest, parent)
    standing, copy = yield from _look_for(manifest.version, manifest.parent)
    while standing is None:
        yield from Put(copy_name(head_name(manifest.version), copy), data)
        yield from _check_standing(manifest, parent)
        standing, free = yield from _look_for(manifest.version, manifest.parent)
        if standing is None and free <= copy:
            raise StoreUnavailableError(f"{head_name(manifest.version)} cannot be read after it was created")
        copy = free
    return standing.nonce == manifest.nonce


def _check_standing(manifest: Manifest, parent: Manifest | None) -> Procedure[None]:
    if parent is None:
        yield from check_identity(manifest.store)
    else:
        yield from check_head(parent)


def check_head(known: Manifest) -> Procedure[None]:
    """Make sure that a version is still in the store as it was.

    Raises:
        StoreUnavailableError: there is no such version, or this is not the store.
        StoreContentError: there is another one.
    """
    standing = yield from read_manifest(known.version, known.parent)
    if standing is None:
        raise StoreUnavailableError(f"{head_name(known.version)} is gone; is the folder mounted?")
    if standing.sha256 != known.sha256:
        yield from check_identity(known.store)  # a folder below a mount keeps what it was given while that was away
        raise StoreContentError(
            f"{head_name(known.version)} is not what it was: the store was restored to an older state or mixed with "
            "another; use a new distributed.repo_id"
        )


def find_head(known: Manifest | None, *, beside: bool = True) -> Procedure[Manifest | None]:
    """The newest manifest, or None if there is none newer than `known`.

    Versions have no gaps and manifests are never deleted, so one strong read of the next version tells whether there is
    anything new: an idle look is one request, whatever the history. From n versions behind it is about 2·log2(n). The
    identity is read last: where a mount is away there is none, and what lies there is no version.

    Args:
        beside: if nothing lies under the name of the next version, look beside it too, which takes a second request.

    Raises:
        StoreContentError: the store has another history than `known` belongs to, or is of a later protocol.
    """
    head = yield from _successor(known, beside=beside)
    if head is None:
        return None
    while (newer := (yield from _successor(head, beside=True))) is not None:
        head = yield from _furthest(newer)
    yield from check_identity(head.store)
    return head


def _furthest(known: Manifest, *, sure: bool = False) -> Procedure[Manifest]:
    """The newest version, or one on the way there: names may lead astray.

    Args:
        sure: go to no version that does not follow the one before it.
    """
    # Forward in doubling strides until there is no version, then halve the gap.
    head, before = known, known
    stride, end = 1, _LAST_NUMBER + 1
    while end - head.version > 1:
        goal = min(head.version + stride, (head.version + end) // 2)
        found = yield from read_manifest(goal, store=known.store, beside=False)
        if found is None or (sure and not (yield from _follows(found, head))):
            end = goal
        else:
            head, before, stride = found, head, 2 * stride
    if sure or head is known or (yield from _follows(head, before)):
        return head
    # A stray manifest led astray. Each step is worth a second request now.
    return (yield from _furthest(known, sure=True))


def _follows(manifest: Manifest, known: Manifest) -> Procedure[bool]:
    """Whether a version follows the one before it in the store. `known` is a version before, perhaps that one."""
    before: Manifest | None = known
    if known.version != manifest.version - 1:
        before = yield from read_manifest(manifest.version - 1, store=manifest.store)
    return before is not None and manifest.parent == before.sha256


def _successor(manifest: Manifest | None, *, beside: bool) -> Procedure[Manifest | None]:
    """The version after a manifest; without one, version 0. For `beside` see `_look_for`."""
    if manifest is None:
        return (yield from read_manifest(0, None, beside=beside))
    if manifest.version == _LAST_NUMBER:
        return None
    following, junk = yield from _look_for(manifest.version + 1, manifest.sha256, beside=beside)
    if following is None and junk:
        yield from check_head(manifest)  # is it junk, or the next version of another history?
    return following


# --- Objects


def list_all(prefix: str, marker: str = "") -> Procedure[list[Entry]]:
    """All pages of a listing."""
    entries: list[Entry] = []
    while True:
        page = yield from List(prefix, marker)
        entries += page.entries
        if not page.more or not page.entries:
            return entries
        marker = page.entries[-1].name


def read_blob(blob: Blob) -> Procedure[bytes | None]:
    """The bytes of an object that a manifest names; None if it is missing or damaged."""
    return (yield from Get(blob.path, limit=blob.size, size=blob.size, sha256=blob.sha256))


def put_own(name: str, data: Buffer, store: str | None) -> Procedure[str]:
    """Create an object that nobody else creates, and make sure that it is whole.

    If the name is taken, an earlier attempt with a lost acknowledgement took it: it holds the same bytes, or a part of
    them. A torn object stays where it is, and the bytes go beside it under a copy's name. Deleting it would be unsafe:
    the deletion could happen a second time, late, and hit the object that replaced it.

    Args:
        store: identity of the store, which is read again afterwards: where a mount is away, nothing is kept.

    Returns:
        The name under which the bytes lie.

    Raises:
        StoreUnavailableError: the store is not there.
        StoreContentError: other bytes lie under all names that it could have, or it is another store.
    """
    digest: str | None = None
    for copy in range(MOST_COPIES):
        tried = copy_name(name, copy)
        whole = yield from Put(tried, data)
        if not whole:
            digest = digest or hashlib.sha256(data).hexdigest()
            whole = (yield from Get(tried, limit=len(data), size=len(data), sha256=digest)) is not None
        if whole:
            yield from check_identity(store)
            return tried
    raise StoreContentError(f"{name}: the store did not keep what was written to it, {MOST_COPIES} times")
