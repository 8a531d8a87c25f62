"""Deltas: how a pseudo-gradient is computed, how it is packed, and which objects of the store are admitted.

A delta is a safetensors object. Its header's metadata hold a `DeltaHeader` as canonical JSON. Its tensors are the
encoded pseudo-gradient of the trained parameters, and the values of the buffers, under the model's names.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import torch
from pydantic import AfterValidator, Field, StringConstraints, ValidationError
from torch import Tensor

from speedtronic.distributed.codec import Codec
from speedtronic.distributed.packed_tensors import (
    LONGEST_HEADER,
    PackedTensors,
    TensorFormatError,
    content_sha256,
    longest_header,
    metadata_of,
    pack_tensors,
    packed_size,
)
from speedtronic.distributed.protocol import PROTOCOL, DeltaId
from speedtronic.distributed.records import (
    Amount,
    Component,
    Hash,
    Natural,
    Position,
    Record,
    canonical_json,
    first_mistake,
)
from speedtronic.distributed.schema import Schema, Tensors, TensorType, check_same, exchanged_dtype, has_fractions
from speedtronic.distributed.stores.base import Buffer

_KEY = "speedtronic_delta"  # of the metadata
_SINCE_PROTOCOL_2 = frozenset({"predecessor", "residual", "fragment"})

LARGEST = 2.0**64
"""The largest value that is added up: no weighted sum of such values leaves float32, whatever the headers say."""

_PIECE = 2**16  # values


# --- Pseudo-gradients


def compute_pseudo_gradient(baseline: Mapping[str, Tensor], current: Mapping[str, Tensor]) -> Tensors:
    """Baseline minus current, of the floating-point (in float32) and the complex entries (in complex64).

    Integers and bools have no gradient and are left out.

    Raises:
        ValueError: the two differ in their names or in a shape.
    """
    check_same(baseline, current)
    return {
        name: start.detach().to(exchanged_dtype(start.dtype)) - current[name].detach().to(exchanged_dtype(start.dtype))
        for name, start in baseline.items()
        if has_fractions(start.dtype)
    }


def average_deltas(deltas: Iterable[Mapping[str, Tensor]]) -> Tensors:
    """The mean of deltas, in float32 or complex64, added up in the order in which they come.

    Raises:
        ValueError: there are none, or two differ in their names or in a shape.
    """
    total: Tensors = {}
    count = 0
    for delta in deltas:
        if count == 0:
            total = {
                name: tensor.detach().to(exchanged_dtype(tensor.dtype), copy=True) for name, tensor in delta.items()
            }
        else:
            check_same(total, delta)
            for name, tensor in delta.items():
                total[name] += tensor.detach()
        count += 1
    if count == 0:
        raise ValueError("there is no delta to average")
    return {name: tensor.div_(count) for name, tensor in total.items()}


# --- The object


def _counts(position: Position) -> Position:
    if not all(0 <= count < 2**63 for count in position):
        raise ValueError("the numbers of a position must be counts")
    return position


class Predecessor(Record):
    """The session of a node before its present one, and the number of its last delta."""

    session: Component
    last: Natural


class DeltaHeader(Record):
    """What a delta says of itself.

    Attributes:
        protocol: version of the layout and of these fields.
        node, session, seq: its identity; must agree with the object's name.
        base_version: the global version that its base was made from.
        steps: inner steps that it holds.
        samples, tokens: what they were trained on.
        seconds: how long they took.
        position: what the node's training has covered, from its start to the end of this delta.
        schema_id: fingerprint of the model.
        codec: how the pseudo-gradient is encoded.
        sha256: of the bytes of all tensors, in hex; `pack_delta` fills it in.
        time: when it was made, UTC, ISO 8601, by the node's clock; only shown.
        predecessor: the session before; None in a node's first one.
        residual: SHA-256 of what a lossy codec still owes after this delta (see `node.py`); None without one.
        fragment, signature: kept for parts of the model, and for nodes with a key; None yet.
    """

    protocol: Natural = PROTOCOL
    node: Component
    session: Component
    seq: Annotated[int, Field(ge=1, le=99_999_999)]
    base_version: Natural
    steps: Annotated[int, Field(ge=1, lt=2**63)]
    samples: Natural
    tokens: Natural
    seconds: Amount
    position: Annotated[Position, AfterValidator(_counts)]
    schema_id: Hash
    codec: Annotated[str, StringConstraints(pattern=r"^[a-z0-9_]{1,64}$")]
    sha256: Hash | None = None
    time: Annotated[str, StringConstraints(max_length=64)]
    signature: Annotated[str, StringConstraints(max_length=1024)] | None = None
    predecessor: Predecessor | None = None
    residual: Hash | None = None
    fragment: None = None

    @property
    def id(self) -> DeltaId:
        return DeltaId(self.node, self.session, self.seq)

    def to_json(self) -> str:
        """Canonical JSON: the same header is the same text everywhere."""
        return canonical_json(self, without=_SINCE_PROTOCOL_2 if self.protocol == 1 else frozenset()).decode()


@dataclass(frozen=True)
class Delta:
    """A delta that was admitted.

    Attributes:
        header: what it says of itself.
        tensors: the decoded pseudo-gradient, float32 or complex64, by the names of the trained parameters. Each tensor
            is made from the object's bytes when it is asked for.
        buffers: the values of the averaged and the newest buffers, likewise.
    """

    header: DeltaHeader
    tensors: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]


class Refusal(NamedTuple):
    """Why an object is not admitted.

    Attributes:
        reason: for people; what it quotes of the object is cut to a length that suits a log.
        damaged: whether a broken upload may have left the object so. It then counts as absent for now, since its node
            will send it again. Any other object is refused for good.
        lasting: whether no master of this model would admit it, whatever its settings: nobody needs the object.
    """

    reason: str
    damaged: bool
    lasting: bool = False


class _OtherSettingsError(TensorFormatError):
    """A master with other settings, or of a later version, would read the object."""


def max_delta_bytes(schema: Schema, codec: Codec) -> int:
    """The most bytes that a delta of this model can have; anything larger need not be downloaded."""
    return packed_size(_expected(schema, codec))


def header_limit(schema: Schema, codec: Codec) -> int:
    """The most bytes of JSON in the header of a delta of this model."""
    return longest_header(_expected(schema, codec))


def pack_delta(header: DeltaHeader, encoded: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> bytes:
    """The bytes of a delta; the same arguments give the same bytes.

    Args:
        header: its `sha256` is filled in.
        encoded: what the codec gave for the pseudo-gradient.
        buffers: values of all buffers, in the dtypes of the schema.
    """
    tensors = {**encoded, **buffers}
    complete = header.model_copy(update={"sha256": content_sha256(tensors)})
    return pack_tensors(tensors, {_KEY: complete.to_json()})


def read_header(data: Buffer, *, limit: int = LONGEST_HEADER) -> DeltaHeader:
    """What a delta says of itself. Only its form is checked.

    Args:
        data: the object, or its beginning.
        limit: the most bytes of JSON to read.

    Raises:
        TensorFormatError: it is not a delta, or torn.
    """
    metadata = metadata_of(data, limit=limit)
    if metadata.keys() != {_KEY}:
        raise TensorFormatError("it is not a delta")
    text = metadata[_KEY]
    try:
        header = DeltaHeader.model_validate_json(text.encode("utf-8", "replace"))
    except ValidationError as error:
        raise TensorFormatError(f"the header of the delta: {first_mistake(error)}") from None
    if header.to_json() != text:
        raise TensorFormatError("the header of the delta is not in the canonical form")
    return header


def spooled_header(data: bytes) -> DeltaHeader | None:
    """The header of the delta in a spool, of any model; None if its tensors are not as they were written."""
    try:
        header = read_header(data)
        content = PackedTensors(data).content
    except TensorFormatError:
        return None
    return header if hashlib.sha256(content).hexdigest() == header.sha256 else None


# --- Admission


def admit(
    data: Buffer,
    id: DeltaId,
    schema: Schema,
    codec: Codec,
    *,
    averages: Mapping[str, Tensor] | None = None,
) -> Delta | Refusal:
    """Decide by an object alone whether it may enter the weights. Never raises, and takes no memory because the object
    claims it.

    The order: size, header, tensors' names, dtypes and shapes, checksum, identity, finite values.

    Args:
        data: the object.
        id: the delta that the object's name stands for.
        schema, codec: those of the run.
        averages: the global values of the averaged buffers. A value that cannot be added up, as masks have, is admitted
            only where it equals the global one.
    """
    try:
        delta = open_delta(data, schema, codec)
        if delta.header.id != id:
            raise TensorFormatError(f"it is {delta.header.id.name}, under another name")
        for name, tensor in delta.tensors.items():
            if not can_be_added(tensor):
                raise TensorFormatError(f"{name} has values that are not finite, or beyond 2^64")
        for name, tensor in delta.buffers.items():
            if not _can_be_averaged(tensor, (averages or {}).get(name)):
                raise TensorFormatError(
                    f"{name} has values that are not finite, or beyond 2^64, and differ from the global ones"
                )
    except TensorFormatError as error:
        return Refusal(
            str(error), damaged=error.torn, lasting=not (error.torn or isinstance(error, _OtherSettingsError))
        )
    return delta


def open_delta(data: Buffer, schema: Schema, codec: Codec) -> Delta:
    """A delta that is whole and of this model. Its name, its base and its values are not checked.

    Raises:
        TensorFormatError: it is torn, or not of this model.
    """
    if len(data) > max_delta_bytes(schema, codec):
        raise _OtherSettingsError(f"it has {len(data)} bytes; a delta of this model has less")
    header = read_header(data, limit=header_limit(schema, codec))
    if not 1 <= header.protocol <= PROTOCOL:
        raise _OtherSettingsError(
            f"it is of protocol {header.protocol}, not {PROTOCOL}: another version of Speedtronic"
        )
    if header.schema_id != schema.fingerprint:
        raise TensorFormatError("it is of another model: names, shapes, dtypes or the trained parameters differ")
    if header.codec != codec.name:
        raise _OtherSettingsError(f"its codec is {header.codec}, not {codec.name}: distributed.codec differs")
    packed = PackedTensors(data, _expected(schema, codec))
    if hashlib.sha256(packed.content).hexdigest() != header.sha256:
        raise TensorFormatError("its tensors do not match their checksum", torn=True)
    encoded = packed.only(codec.expected(schema))
    return Delta(header, codec.decode(encoded, schema), packed.only(schema.names("average", "newest")))


def norm(tensors: Mapping[str, Tensor]) -> float:
    """The Euclidean norm of all values together, each tensor taken up once; in float64, in pieces that fit a cache."""
    squares = 0.0
    for name in tensors:
        tensor = tensors[name]
        values = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        for piece in torch.split(values.flatten(), _PIECE):
            squares += float(torch.linalg.vector_norm(piece, dtype=torch.float64)) ** 2
    return math.sqrt(squares)


def _expected(schema: Schema, codec: Codec) -> dict[str, TensorType]:
    return codec.expected(schema) | schema.types("average", "newest")


def can_be_added(tensor: Tensor) -> bool:
    """Whether all values are at most `LARGEST`, without a mask as large as the tensor; always true for integers.

    Where any value is NaN both bounds are NaN, and no comparison with NaN holds.
    """
    values = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    if not values.is_floating_point() or values.numel() == 0:
        return True
    return all(abs(float(bound)) <= LARGEST for bound in values.aminmax())


def _can_be_averaged(tensor: Tensor, reference: Tensor | None) -> bool:
    """Whether the difference to the global values is one that can be added."""
    if reference is None or (can_be_added(tensor) and can_be_added(reference)):
        return can_be_added(tensor)
    small = (tensor.abs() <= LARGEST) & (reference.abs() <= LARGEST)
    return bool((small | (tensor == reference)).all())
