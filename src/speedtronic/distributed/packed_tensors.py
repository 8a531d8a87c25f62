"""Named tensors as one safetensors object, and how an object from the store is read without trusting it.

The format has no complex dtype: a complex tensor is stored as its real and imaginary parts, in a last dimension of 2.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Collection, Iterable, Iterator, Mapping
from copy import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor

from speedtronic.distributed.records import Blob
from speedtronic.distributed.schema import Tensors, TensorType
from speedtronic.distributed.stores.base import Buffer
from speedtronic.durable.files import DamagedFileError
from speedtronic.durable.tensor_file import (
    DTYPE_NAMES,
    RESERVED_NAME,
    bytes_of,
    check_tensor_bytes,
    file_order,
    parse_header,
    safetensors_header,
)
from speedtronic.errors import InputError, StoreContentError

METADATA_LIMIT = 64 * 2**10  # bytes of a header, beyond what the tensors take in it
LONGEST_HEADER = 16 * 2**20  # bytes; a tensor takes about 100

_COMPLEX_DTYPES = frozenset({torch.complex64, torch.complex128})
_COMPLEX = "complex"  # metadata: which tensors are complex, as a JSON list of names


class TensorFormatError(InputError, ValueError):
    """Bytes are not the safetensors data that they should be.

    Attributes:
        torn: whether an interrupted upload or write can have left them so.
    """

    def __init__(self, message: str, *, torn: bool = False) -> None:
        super().__init__(message)
        self.torn = torn


# --- Writing


def pack_tensors(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    """Tensors in the safetensors format. The bytes depend on names, values, dtypes and metadata alone.

    Args:
        tensors: dense tensors of any shape, strides and device.
        metadata: text that goes into the header.

    Raises:
        ValueError: a tensor or an entry of the metadata cannot be stored; the message names it.
    """
    for key, text in metadata.items():
        if not (isinstance(key, str) and isinstance(text, str)):
            raise ValueError(f"metadata {key!r}: the key and the value must be text, not {text!r}")
    complex_note = _complex_note(name for name, tensor in tensors.items() if tensor.is_complex())
    real = _as_real(tensors)
    header = safetensors_header(real, dict(sorted({**metadata, **complex_note}.items())))
    return b"".join([header, *_contents(real)])


def content_sha256(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 (hex) of what follows the header in `pack_tensors`. Raises ValueError as that does."""
    digest = hashlib.sha256()
    for part in _contents(_as_real(tensors)):
        digest.update(part)
    return digest.hexdigest()


def _contents(real: Tensors) -> Iterator[memoryview]:
    return (bytes_of(real[name].cpu().contiguous()) for name in file_order(real))


def _as_real(tensors: Mapping[str, Tensor]) -> Tensors:
    """The tensors as they are stored: complex ones as pairs of numbers."""
    real: Tensors = {}
    for name, tensor in tensors.items():
        resolved = tensor.detach().resolve_conj().resolve_neg()
        real[name] = torch.view_as_real(resolved) if resolved.dtype in _COMPLEX_DTYPES else resolved
        if real[name].dtype not in DTYPE_NAMES or resolved.layout != torch.strided or name == RESERVED_NAME:
            raise ValueError(f"{name}, a {resolved.layout} tensor of {resolved.dtype}, cannot be stored in this format")
    return real


def _complex_note(complex_names: Iterable[str]) -> dict[str, str]:
    names = sorted(complex_names)
    return {_COMPLEX: json.dumps(names)} if names else {}


# --- Sizes


def packed_size(expected: Mapping[str, TensorType]) -> int:
    """The most bytes that `pack_tensors` can need for tensors of these types."""
    return 8 + longest_header(expected) + sum(_size(_stored(type_)) for type_ in expected.values())


def longest_header(expected: Mapping[str, TensorType]) -> int:
    """The most bytes of JSON that `PackedTensors` reads where tensors of these types are expected."""
    return len(_canonical_header(expected, {})) + METADATA_LIMIT


def _size(type_: TensorType) -> int:
    return math.prod(type_.shape) * type_.dtype.itemsize


def _stored(type_: TensorType) -> TensorType:
    """How a tensor of this type is stored."""
    return TensorType(type_.dtype.to_real(), (*type_.shape, 2)) if type_.dtype.is_complex else type_


def _canonical_header(expected: Mapping[str, TensorType], metadata: Mapping[str, str]) -> bytes:
    """The header that `pack_tensors` writes for tensors of these types."""
    return safetensors_header(_without_values(expected), metadata)


def _without_values(expected: Mapping[str, TensorType]) -> Tensors:
    stored = {name: _stored(type_) for name, type_ in expected.items()}
    return {name: torch.empty(type_.shape, dtype=type_.dtype, device="meta") for name, type_ in stored.items()}


# --- Reading


class _StoredTensor(NamedTuple):
    begin: int  # byte of the object
    type: TensorType  # as it is stored
    is_complex: bool


class PackedTensors(Mapping[str, Tensor]):
    """The tensors in the bytes of `pack_tensors`, each made when it is asked for.

    From a writable buffer they are views, which keep it alive; from `bytes`, copies.

    Args:
        data: the whole object.
        expected: the type of every tensor. If given, exactly what `pack_tensors` writes for these is accepted and
            nothing else, and of a hostile header no more is read than these and `METADATA_LIMIT` allow. Without it,
            any safetensors data is accepted.

    Attributes:
        metadata: the text in the header.
        content: the bytes after it.

    Raises:
        TensorFormatError: the bytes are anything else; no tensor was made.
    """

    def __init__(self, data: Buffer, expected: Mapping[str, TensorType] | None = None) -> None:
        self._data = memoryview(data)
        found, metadata = _read_any(self._data) if expected is None else _read_expected(self._data, expected)
        self._found = found
        self.metadata = _without_note(metadata)
        self.content = self._data[min((stored.begin for stored in found.values()), default=len(data)) :]

    def only(self, names: Collection[str]) -> Mapping[str, Tensor]:
        """Some of the tensors, each still made when it is asked for."""
        chosen = copy(self)
        chosen._found = {name: self._found[name] for name in names}
        return chosen

    def __getitem__(self, name: str) -> Tensor:
        stored = self._found[name]
        dtype, shape = stored.type
        size = _size(stored.type)
        if size == 0:
            tensor = torch.empty(shape, dtype=dtype)
        else:
            # A view where the memory is writable and aligned; else a copy.
            part = self._data[stored.begin : stored.begin + size]
            if part.readonly or stored.begin % dtype.itemsize:
                part = memoryview(bytearray(part))
            if dtype == torch.bool:  # in a file any byte but 0 is true; in the memory of a bool tensor only 1 is
                tensor = torch.frombuffer(part, dtype=torch.uint8).ne(0).view(shape)
            else:
                tensor = torch.frombuffer(part, dtype=dtype).view(shape)
        return torch.view_as_complex(tensor) if stored.is_complex else tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)


def unpack_tensors(data: Buffer, expected: Mapping[str, TensorType] | None = None) -> tuple[Tensors, dict[str, str]]:
    """All tensors of `PackedTensors(data, expected)`, and the metadata. Raises TensorFormatError as that does."""
    packed = PackedTensors(data, expected)
    return dict(packed), packed.metadata


def metadata_of(data: Buffer, *, limit: int) -> dict[str, str]:
    """The text in the header of safetensors data. Nothing else of the data is checked.

    Args:
        data: the object, or its beginning.
        limit: the most bytes of JSON to read.

    Raises:
        TensorFormatError: the header is malformed or longer.
    """
    return _without_note(_read_header(memoryview(data), limit)[2])


def _without_note(metadata: Mapping[str, str]) -> dict[str, str]:
    return {key: text for key, text in metadata.items() if key != _COMPLEX}


def _read_header(data: memoryview, limit: int) -> tuple[memoryview, dict[str, Any], dict[str, str]]:
    """The header's text, its JSON and its metadata, if the text has at most `limit` bytes."""
    if len(data) < 8:
        raise TensorFormatError(f"it ends after {len(data)} bytes", torn=True)
    (length,) = struct.unpack_from("<Q", data)
    if length > limit:
        raise TensorFormatError(f"it claims a header of {length} bytes, where at most {limit} are possible")
    if 8 + length > len(data):
        raise TensorFormatError("it ends within its header", torn=True)
    text = data[8 : 8 + length]
    try:
        entries = json.loads(bytes(text))
    except (ValueError, RecursionError) as error:
        # A torn write may leave zeros where its bytes should be.
        raise TensorFormatError(f"its header is not JSON ({type(error).__name__})", torn=True) from error
    if not isinstance(entries, dict):
        raise TensorFormatError("its header is not a JSON object")
    metadata = entries.get(RESERVED_NAME, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise TensorFormatError("the metadata of its header is not a mapping from text to text")
    return text, entries, metadata


def _read_expected(
    data: memoryview, expected: Mapping[str, TensorType]
) -> tuple[dict[str, _StoredTensor], dict[str, str]]:
    """Read an object that must be what `pack_tensors` writes for tensors of these types.

    The header is not interpreted: it must equal, byte for byte, the one that `pack_tensors` writes. Offsets that
    overlap, keys that repeat and numbers beyond measure need no checks of their own.
    """
    text, entries, metadata = _read_header(data, longest_header(expected))
    complex_note = _complex_note(name for name, type_ in expected.items() if type_.dtype.is_complex)
    canonical = dict(sorted({**_without_note(metadata), **complex_note}.items()))
    if bytes(text) != _canonical_header(expected, canonical)[8:]:
        raise TensorFormatError(_first_difference(entries, expected))

    # The header is the expected one, so the tensors lie one after the other in the order of the file.
    begin = 8 + len(text)
    found: dict[str, _StoredTensor] = {}
    for name in file_order(_without_values(expected)):
        found[name] = _StoredTensor(begin, _stored(expected[name]), expected[name].dtype.is_complex)
        begin += _size(found[name].type)
    if len(data) < begin:
        raise TensorFormatError(f"it has {len(data)} of its {begin} bytes", torn=True)
    if len(data) > begin:
        raise TensorFormatError(f"{len(data) - begin} bytes follow its tensors")
    return found, metadata


def _first_difference(entries: Mapping[str, Any], expected: Mapping[str, TensorType]) -> str:
    """Why a header is not the expected one. Foreign names are cut to a length that suits a log."""
    names = entries.keys() - {RESERVED_NAME}
    if missing := sorted(expected.keys() - names):
        return f"it lacks the tensor {missing[0]}"
    if extra := sorted(names - expected.keys()):
        return f"it has a tensor {ascii(extra[0])[:80]}, which does not belong there"
    for name, type_ in sorted(expected.items()):
        entry, (dtype, shape) = entries[name], _stored(type_)
        if not isinstance(entry, dict) or entry.get("dtype") != DTYPE_NAMES[dtype]:
            return f"{name} is not of {dtype}"
        if entry.get("shape") != list(shape):
            return f"{name} does not have shape {list(shape)}"
    return "its header is not in the canonical form: offsets overlap, keys repeat or are unknown, or the order differs"


def _read_any(data: memoryview) -> tuple[dict[str, _StoredTensor], dict[str, str]]:
    """Read safetensors data from any writer. A tensor is complex if the metadata says so and its type allows it."""
    try:
        check_tensor_bytes(bytes(data))
        header = parse_header(bytes(_read_header(data, len(data))[0]))
    except DamagedFileError as error:
        raise TensorFormatError(str(error)) from error
    try:
        complex_names = json.loads(header.metadata.get(_COMPLEX, "[]"))
    except (ValueError, RecursionError):
        complex_names = []
    found: dict[str, _StoredTensor] = {}
    for place in header.places:
        type_ = TensorType(place.dtype, tuple(place.shape))
        is_complex = (
            isinstance(complex_names, list)
            and place.name in complex_names
            and type_.dtype in {torch.float32, torch.float64}
            and type_.shape[-1:] == (2,)
        )
        found[place.name] = _StoredTensor(header.size + place.begin, type_, is_complex)
    return found, header.metadata


def unpack_blob(blob: Blob, data: bytes, expected: Mapping[str, TensorType]) -> PackedTensors:
    """The tensors of an object that a manifest names. Raises StoreContentError if it holds anything else."""
    try:
        return PackedTensors(data, expected)
    except TensorFormatError as error:
        raise StoreContentError(f"{blob.path}: {error}") from error
