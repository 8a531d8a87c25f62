"""What lies in the store, under which names, and how it is read and created. All machines must agree on this file.

    head/{version:08d}.json                       manifests; creating one commits a version
    w/{version:08d}-{nonce}.safetensors           global weights
    opt/{version:08d}-{nonce}.safetensors         state of the outer optimizer
    in/{node}/{session}/{seq:08d}.safetensors     deltas, numbered from 1 without gaps in a session
    place/{index:04d}.json                        which node reads which part of the data

Each object is created once and never changed, and no name is used again after a deletion: a request that was given up
may still take effect at any later time, and must then do no harm.
"""

from __future__ import annotations

import hashlib
import json
import re
from typing import Annotated, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from speedtronic.distributed.requests import Get, List, Procedure, Put
from speedtronic.distributed.stores.base import COMPONENT, Buffer, Entry
from speedtronic.errors import StoreContentError

PROTOCOL = 1

HEADS, WEIGHTS, MOMENTUM, DELTAS, PLACES = "head/", "w/", "opt/", "in/", "place/"

MANIFEST_LIMIT = 8 * 2**20  # bytes; a mark takes about 250
MOST_COPIES = 16
_LAST_NUMBER = 99_999_999  # what eight digits hold

_NUMBER = "[0-9]{8}"
_HEAD = re.compile(rf"head/({_NUMBER})\.json")
_BLOB = re.compile(rf"(?:w|opt)/({_NUMBER})-[A-Za-z0-9-]{{1,128}}\.safetensors")
_DELTA = re.compile(rf"in/({COMPONENT})/({COMPONENT})/({_NUMBER})(?:-[0-9]{{1,4}})?\.safetensors")
_SESSION_KEY = re.compile(rf"{COMPONENT}/{COMPONENT}")


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

    @property
    def session_key(self) -> str:
        """The key of its mark in a manifest."""
        return f"{self.node}/{self.session}"


class Position(NamedTuple):
    """How far a node's training has come: optimizer steps, samples and tokens since its run began."""

    step: int
    samples: int
    tokens: int

    def since(self, earlier: Position) -> Position:
        """What was trained between an earlier position and this one."""
        return Position(self.step - earlier.step, self.samples - earlier.samples, self.tokens - earlier.tokens)


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


def parse_head_name(name: str) -> int | None:
    match = _HEAD.fullmatch(name)
    return int(match[1]) if match else None


def weights_name(version: int, nonce: str) -> str:
    return f"{WEIGHTS}{version:08d}-{nonce}.safetensors"


def momentum_name(version: int, nonce: str) -> str:
    return f"{MOMENTUM}{version:08d}-{nonce}.safetensors"


def parse_blob_version(name: str) -> int | None:
    """The version for which weights or momentum were written, or None for any other name."""
    match = _BLOB.fullmatch(name)
    return int(match[1]) if match else None


def copy_name(name: str, copy: int) -> str:
    """Another name for the same object, used when the object under the first is torn. Copy 0 is the name itself."""
    if copy == 0:
        return name
    stem, _, suffix = name.rpartition(".")
    return f"{stem}-{copy}.{suffix}"


# --- Manifests

Natural = Annotated[int, Field(ge=0, lt=2**63)]
Amount = Annotated[float, Field(ge=0)]
Hash = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Text = Annotated[str, StringConstraints(max_length=1000)]


class _Record(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)


class Blob(_Record):
    """An object that a manifest names, and how to tell that it is whole. Size in bytes."""

    path: Annotated[str, StringConstraints(pattern=rf"^{_BLOB.pattern}$")]
    size: Natural
    sha256: Hash


class Mark(_Record):
    """How far the deltas of a session have been processed (a high-water mark).

    Attributes:
        seq: number of the last one; this and all before are in the weights or were refused.
        step, samples, tokens: the position that they cover.
        tokens_per_step: tokens (of data without them, samples) of one inner step, in the last one.
        seconds: how long its steps took.
        version: the version in which this mark moved last.
        rounds: what `Manifest.rounds` was then.
        time: when, UTC, ISO 8601, by the master's clock.
        bytes: size of all its deltas.
        rejected: how many of them were refused.
        reason: why the last of those was.
    """

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

    @property
    def position(self) -> Position:
        return Position(self.step, self.samples, self.tokens)


UNMARKED = Mark(
    seq=0,
    step=0,
    samples=0,
    tokens=0,
    tokens_per_step=0.0,
    seconds=0.0,
    version=0,
    rounds=0.0,
    time="",
    bytes=0,
    rejected=0,
    reason=None,
)
"""Of a session of which no version has processed a delta."""


class Rejection(_Record):
    """A delta that was refused: its name in the store, and why."""

    name: Text
    reason: Text


class Outer(_Record):
    """Which outer optimizer made a version, and the numbers of its state."""

    name: Text
    scalars: dict[str, int | float]


class Manifest(_Record):
    """A version of the global weights, and everything that became true together with it.

    Attributes:
        protocol: of the layout and these fields.
        version: counts from 0; also the number of outer steps.
        parent: SHA-256 of the manifest before this; None for version 0.
        nonce: of the master's attempt that created it.
        time: when it was made, UTC, ISO 8601, by the master's clock.
        schema_id: fingerprint of the model's names, shapes and dtypes.
        weights: where they lie. The same as before when no delta entered.
        momentum: where the outer optimizer's tensors lie; None when it has none yet.
        outer: the outer optimizer.
        marks: by `node/session`, how far its deltas are processed.
        applied: names of the deltas that entered with this version.
        rejected: those that were refused with it.
        fraction: f, the part of a round that this version is, from 0 to 1.
        rounds: the sum of f over all versions up to this.
    """

    protocol: Natural
    version: Annotated[int, Field(ge=0, le=_LAST_NUMBER)]
    parent: Hash | None
    nonce: Annotated[str, StringConstraints(min_length=1, max_length=128)]
    time: Text
    schema_id: Hash
    weights: Blob
    momentum: Blob | None
    outer: Outer
    marks: dict[Annotated[str, StringConstraints(max_length=257)], Mark]
    applied: tuple[Text, ...]
    rejected: tuple[Rejection, ...]
    fraction: Annotated[float, Field(ge=0, le=1)]
    rounds: Amount

    def to_bytes(self) -> bytes:
        """Canonical JSON: the same manifest has the same bytes everywhere."""
        text = json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"), allow_nan=False)
        return text.encode("ascii")

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.to_bytes()).hexdigest()

    @classmethod
    def from_bytes(cls, data: Buffer) -> Manifest:
        """Read a manifest.

        Raises:
            StoreContentError: it is not one, or is of another protocol version.
        """
        try:
            manifest = cls.model_validate_json(bytes(data))
        except ValidationError as error:
            # If the protocol differs, that explains it better than the first wrong field.
            try:
                protocol = _AnyProtocol.model_validate_json(bytes(data)).protocol
            except ValidationError:
                raise StoreContentError(f"not a manifest of Speedtronic ({error.error_count()} mistakes)") from None
            _check_protocol(protocol)
            raise StoreContentError(f"not a manifest of Speedtronic: {first_mistake(error)}") from None
        _check_protocol(manifest.protocol)
        if not all(_SESSION_KEY.fullmatch(key) for key in manifest.marks):
            raise StoreContentError("a mark of the manifest does not belong to a session of a node")
        if manifest.to_bytes() != data:
            raise StoreContentError("the manifest is not in the canonical form that Speedtronic writes")
        return manifest

    def mark(self, delta: DeltaId) -> Mark:
        """The mark of a delta's session."""
        return self.marks.get(delta.session_key, UNMARKED)

    def has_processed(self, delta: DeltaId) -> bool:
        """Whether a delta is in the weights of this version, or was refused: it never enters again."""
        return delta.seq <= self.mark(delta).seq


class _AnyProtocol(BaseModel):
    protocol: Natural


def _check_protocol(protocol: int) -> None:
    if protocol != PROTOCOL:
        age = "a newer" if protocol > PROTOCOL else "an older"
        raise StoreContentError(
            f"the store is kept by {age} Speedtronic (protocol {protocol}, here {PROTOCOL}); "
            "let all nodes run the same version, or use another distributed.repo_id"
        )


def first_mistake(error: ValidationError) -> str:
    """Where foreign data is wrong first, and how; short enough for a log."""
    first = error.errors()[0]
    where = ascii(".".join(str(part) for part in first["loc"]) or "JSON")[:80]
    return f"{where}: {first['type']}"


# --- Procedures


def read_manifest(version: int) -> Procedure[Manifest | None]:
    """The manifest of a version, or None if there is no such version. A strong read."""
    name = head_name(version)
    data = yield from Get(name, limit=MANIFEST_LIMIT)
    if data is None:
        return None
    try:
        manifest = Manifest.from_bytes(data)
    except StoreContentError as error:
        raise StoreContentError(f"{name}: {error}") from None
    if manifest.version != version:
        raise StoreContentError(f"{name} holds version {manifest.version}: another program changed the store")
    return manifest


def find_head(known: Manifest | None) -> Procedure[Manifest | None]:
    """The newest manifest, or None if there is none newer than `known`.

    Versions have no gaps and manifests are never deleted, so one strong read of the next version tells whether there is
    anything new: an idle look is one request, whatever the history.

    Raises:
        StoreContentError: a manifest cannot be read, or does not follow the one before it.
    """
    head = known
    if known is not None:
        head = yield from _successor(known)
        if head is None:
            return None

    # A listing shortens the way to a head that is far ahead. It decides nothing, since it may lag behind.
    listed = yield from list_all(HEADS, "" if head is None else head_name(head.version))
    versions = [version for entry in listed if (version := parse_head_name(entry.name)) is not None]
    if versions:
        head = (yield from read_manifest(max(versions))) or head

    # Strong reads find the rest.
    while (following := (yield from _successor(head))) is not None:
        head = following
    return head


def _successor(manifest: Manifest | None) -> Procedure[Manifest | None]:
    """The version after a manifest; without one, version 0."""
    following = yield from read_manifest(0 if manifest is None else manifest.version + 1)
    if following is not None and following.parent != (None if manifest is None else manifest.sha256):
        raise StoreContentError(
            f"{head_name(following.version)} does not follow the version before it: the store was restored to an "
            "older state or mixed with another; use a new distributed.repo_id"
        )
    return following


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


def put_own(name: str, data: Buffer) -> Procedure[str]:
    """Create an object that nobody else creates, and make sure that it is whole.

    If the name is taken, an earlier attempt with a lost acknowledgement took it: it holds the same bytes, or a part of
    them. A torn object stays where it is, and the bytes go beside it under a copy's name. Deleting it would be unsafe:
    the deletion could happen a second time, late, and hit the object that replaced it.

    Returns:
        The name under which the bytes lie.

    Raises:
        StoreContentError: other bytes lie under all names that it could have.
    """
    digest: str | None = None
    for copy in range(MOST_COPIES):
        tried = copy_name(name, copy)
        if (yield from Put(tried, data)):
            return tried
        digest = digest or hashlib.sha256(data).hexdigest()
        if (yield from Get(tried, limit=len(data), size=len(data), sha256=digest)) is not None:
            return tried
    raise StoreContentError(f"{name}: the store did not keep what was written to it, {MOST_COPIES} times")
