"""Deltas: what a node sends, how it is packed, and what is admitted of what lies in the store.

A delta is a safetensors object. Its header's metadata hold a `DeltaHeader` as canonical JSON; its tensors are the
encoded pseudo-gradient of the trained parameters, and the values of the buffers, under the model's names.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import torch
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, ValidationError
from torch import Tensor

from speedtronic.distributed.codec import Codec
from speedtronic.distributed.protocol import PROTOCOL, Amount, DeltaId, Hash, Natural, Position
from speedtronic.distributed.stores.base import Buffer
from speedtronic.distributed.tensors import (
    LONGEST_HEADER,
    Form,
    PackedTensors,
    Schema,
    TensorFormatError,
    content_sha256,
    longest_header,
    metadata_of,
    pack_tensors,
    packed_size,
)

_KEY = "speedtronic_delta"  # of the metadata

LARGEST = 2.0**64
"""The largest value that is added up: no weighted sum of such values leaves float32, whatever the headers say."""

Component = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]


def _counts(position: Position) -> Position:
    if not all(0 <= count < 2**63 for count in position):
        raise ValueError("a position is of counts")
    return position


class DeltaHeader(BaseModel):
    """What a delta says of itself.

    Attributes:
        protocol: version of the layout and of these fields.
        node, session, seq: which one it is; must agree with the object's name.
        base_version: the global version that its base was made from.
        steps: optimizer steps that it holds.
        samples, tokens: what they were trained on.
        seconds: how long they took.
        position: what the node's training has covered, from its start to the end of this delta.
        schema_id: fingerprint of the model.
        codec: how the pseudo-gradient is encoded.
        sha256: of the bytes of all tensors, in hex; `pack_delta` fills it in.
        time: when it was made, UTC, ISO 8601, by the node's clock; only shown.
        signature: of a node whose key the master knows; not used yet.
    """

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)

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

    @property
    def id(self) -> DeltaId:
        return DeltaId(self.node, self.session, self.seq)

    def to_json(self) -> str:
        """Canonical JSON: the same header is the same text everywhere."""
        return json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"), allow_nan=False)


@dataclass(frozen=True)
class Delta:
    """A delta that was admitted.

    Attributes:
        header: what it says of itself.
        tensors: the decoded pseudo-gradient, float32 or complex64, by the names of the trained parameters. Each is made
            from the object's bytes when it is asked for.
        buffers: the values of the buffers that are averaged and of those of which the newest are taken, likewise.
    """

    header: DeltaHeader
    tensors: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]


class Refusal(NamedTuple):
    """Why an object is not admitted.

    Attributes:
        reason: for people; holds no more of the object than a log can bear.
        damaged: whether it may be what a broken upload left of a good one. Such an object counts as absent for now,
            since its node will send it again; any other is refused for good.
    """

    reason: str
    damaged: bool


def max_delta_bytes(schema: Schema, codec: Codec) -> int:
    """The most bytes that a delta of this model can have; what is larger need not be downloaded."""
    return packed_size(_forms(schema, codec))


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
    """What a delta says of itself, before anything was checked but the form of it.

    Args:
        data: the object, or its beginning.
        limit: the most bytes of JSON to read.

    Raises:
        TensorFormatError: it is no delta, or torn.
    """
    metadata = metadata_of(data, limit=limit)
    if metadata.keys() != {_KEY}:
        raise TensorFormatError("it is not a delta")
    text = metadata[_KEY]
    try:
        header = DeltaHeader.model_validate_json(text.encode("utf-8", "replace"))
    except ValidationError as error:
        first = error.errors()[0]
        where = ascii(".".join(str(part) for part in first["loc"]) or "JSON")[:80]
        raise TensorFormatError(f"the header of the delta: {where}: {first['type']}") from None
    if header.to_json() != text:
        raise TensorFormatError("the header of the delta is not written as it should be")
    return header


def admit(
    data: Buffer,
    id: DeltaId,
    schema: Schema,
    codec: Codec,
    *,
    max_base_version: int,
    averages: Mapping[str, Tensor] | None = None,
) -> Delta | Refusal:
    """Decide whether an object may enter the weights. Never raises, and takes no memory by what the object claims.

    The order: size, header, tensors' names, dtypes and shapes, checksum, identity, finite values.

    Args:
        data: the object.
        id: which delta its name says that it is.
        schema, codec: those of the run.
        max_base_version: the newest version that its base can have been made from.
        averages: the global values of the buffers that are averaged. A value that cannot be added up, as masks have,
            is admitted only where it is the same here and there.
    """
    try:
        delta = open_delta(data, schema, codec)
        _check_identity(delta.header, id, max_base_version)
        _check_finite(delta, averages or {})
    except TensorFormatError as error:
        return Refusal(str(error), damaged=error.torn)
    return delta


def open_delta(data: Buffer, schema: Schema, codec: Codec) -> Delta:
    """A delta that is whole and of this model, whatever its name, its base and its values.

    Raises:
        TensorFormatError: it is not.
    """
    if len(data) > max_delta_bytes(schema, codec):
        raise TensorFormatError(f"it has {len(data)} bytes; a delta of this model has less")
    forms = _forms(schema, codec)
    header = read_header(data, limit=longest_header(forms))
    _check_run(header, schema, codec)
    packed = PackedTensors(data, forms)
    if hashlib.sha256(packed.content).hexdigest() != header.sha256:
        raise TensorFormatError("its tensors do not match their checksum", torn=True)
    encoded = packed.only(codec.expected(schema))
    return Delta(header, codec.decode(encoded, schema), packed.only(schema.names("average", "newest")))


def _forms(schema: Schema, codec: Codec) -> dict[str, Form]:
    return codec.expected(schema) | schema.forms("average", "newest")


def _check_run(header: DeltaHeader, schema: Schema, codec: Codec) -> None:
    if header.protocol != PROTOCOL:
        raise TensorFormatError(f"it is of protocol {header.protocol}, not {PROTOCOL}: another version of Speedtronic")
    if header.schema_id != schema.fingerprint:
        raise TensorFormatError("it is of another model: names, shapes, dtypes or what is trained differ")
    if header.codec != codec.name:
        raise TensorFormatError(f"it is encoded by {header.codec}, not by {codec.name}: distributed.codec differs")


def _check_identity(header: DeltaHeader, id: DeltaId, max_base_version: int) -> None:
    if header.id != id:
        raise TensorFormatError(f"it is {header.id.name}, under another name")
    if header.base_version > max_base_version:
        raise TensorFormatError(f"its base is version {header.base_version}, which is not there yet")


def _check_finite(delta: Delta, averages: Mapping[str, Tensor]) -> None:
    for name, tensor in delta.tensors.items():
        if not _can_be_added(tensor):
            raise TensorFormatError(f"{name} has values that are not finite, or beyond 2^64")
    for name, tensor in delta.buffers.items():
        if not _can_be_averaged(tensor, averages.get(name)):
            raise TensorFormatError(
                f"{name} has values that are not finite, or beyond 2^64, where the global weights' are others"
            )


def _can_be_added(tensor: Tensor) -> bool:
    """Whether all values are at most `LARGEST`, without a mask as large as the tensor; of whole numbers, always.

    NaN is the least and the greatest of any values, and at most nothing.
    """
    values = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    if not values.is_floating_point() or values.numel() == 0:
        return True
    return all(abs(float(bound)) <= LARGEST for bound in values.aminmax())


def _can_be_averaged(tensor: Tensor, reference: Tensor | None) -> bool:
    """Whether the difference to the global values is one that can be added."""
    if reference is None or (_can_be_added(tensor) and _can_be_added(reference)):
        return _can_be_added(tensor)
    small = (tensor.abs() <= LARGEST) & (reference.abs() <= LARGEST)
    return bool((small | (tensor == reference)).all())
