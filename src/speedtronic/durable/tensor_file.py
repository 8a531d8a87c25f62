"""Named tensors as a safetensors stream, written and read in one pass over the data.

The format (huggingface.co/docs/safetensors): eight bytes with the little-endian length of a JSON header;
the header, which gives each name its dtype, shape and the range of its bytes; the bytes, without holes, to
the file's end. Doing it here lets checksums be taken on the way, lets a fault be put into any write, and
reads each tensor straight into memory of its own.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from speedtronic.durable.files import DamagedFileError

DTYPE_NAMES: Mapping[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}

RESERVED_NAME = "__metadata__"
_LONGEST_HEADER = 100_000_000  # bytes; the limit of the safetensors library


def tensor_chunks(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Iterator[bytes | memoryview]:
    """The bytes of a safetensors file. Each tensor is copied from its device when its turn comes.

    Args:
        tensors: real dense tensors of the dtypes in `DTYPE_NAMES`, any shape, strides and device.
        metadata: text that goes into the header.
    """
    yield safetensors_header(tensors, metadata)
    for name in file_order(tensors):
        yield bytes_of(tensors[name].cpu().contiguous())


def file_order(tensors: Mapping[str, Tensor]) -> list[str]:
    """Wide items first, so that each tensor starts at a multiple of its item size."""
    return sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))


def safetensors_header(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    """What stands in the file before the data, which is that of the tensors in `file_order`."""
    header: dict[str, Any] = {RESERVED_NAME: dict(metadata)}
    offset = 0
    for name in file_order(tensors):
        tensor = tensors[name]
        end = offset + tensor.nbytes
        header[name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode("ascii")
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def read_tensors(read_into: Callable[[memoryview], None], size: int) -> dict[str, Tensor]:
    """Read the tensors of a safetensors stream onto the CPU.

    Args:
        read_into: fills the buffer that it is given with the stream's next bytes.
        size: bytes in the whole stream.

    Raises:
        DamagedFileError: the header is not that of a safetensors file of this size.
    """
    header = read_header(read_into, size)
    return {place.name: read_tensor(read_into, place) for place in header.places}


class TensorPlace(NamedTuple):
    """Where a tensor lies in a safetensors stream, in bytes from the end of the header, and what it is."""

    begin: int
    end: int
    name: str
    dtype: torch.dtype
    shape: list[int]


class StoredTensor(NamedTuple):
    """A tensor in a safetensors file; `begin` is where its bytes begin, from the start of the file."""

    file: Path
    begin: int
    place: TensorPlace


class TensorHeader(NamedTuple):
    """What a safetensors stream says of itself.

    Attributes:
        places: of the tensors, in the order of the data, which they fill without holes.
        metadata: the free text in the header.
        size: bytes of the header, after which the data begins.
    """

    places: list[TensorPlace]
    metadata: dict[str, str]
    size: int

    def stored(self, file: Path) -> dict[str, StoredTensor]:
        """The tensors by name, where `file` holds the stream."""
        return {place.name: StoredTensor(file, self.size + place.begin, place) for place in self.places}


def read_header(read_into: Callable[[memoryview], None], size: int) -> TensorHeader:
    """Read what stands before the data. Arguments and errors as in `read_tensors`."""
    length = struct.unpack("<Q", _read(read_into, min(8, size)).ljust(8, b"\xff"))[0]
    if length > min(_LONGEST_HEADER, size - 8):
        raise DamagedFileError("not a safetensors file: its header is longer than the file")
    text = _read(read_into, length)
    try:
        entries = json.loads(text)
        metadata = _metadata(entries.pop(RESERVED_NAME, None) or {})
        places = sorted(_place(name, entry) for name, entry in entries.items())
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise DamagedFileError(f"not a safetensors header: {type(error).__name__}: {error}") from error
    _check_places(places, size - 8 - length)
    return TensorHeader(places, metadata, 8 + length)


def read_tensor(read_into: Callable[[memoryview], None], place: TensorPlace) -> Tensor:
    """Read the tensor at which a stream stands into memory of its own."""
    try:
        tensor = torch.empty(place.shape, dtype=place.dtype)
        data = bytes_of(tensor)
    except (RuntimeError, TypeError, ValueError, OverflowError) as error:
        raise DamagedFileError(f"safetensors header: cannot make {place.name!r}: {error}") from error
    if tensor.numel():
        read_into(data)
    return tensor


def element_count(shape: Sequence[int], most: int) -> int:
    """How many elements a shape from a file has. Beyond `most` it is not the exact number, which may be absurd.

    Raises:
        ValueError: these are not counts.
    """
    if not isinstance(shape, list) or not all(type(length) is int and length >= 0 for length in shape):
        raise ValueError("a shape is a list of counts")
    count = int(0 not in shape)
    for length in shape:
        count *= length
        if count > most:
            break
    return count


def _check_places(places: list[TensorPlace], data_size: int) -> None:
    """Raise DamagedFileError unless the tensors together fill the data exactly."""
    position = 0
    for place in places:
        size = element_count(place.shape, data_size) * place.dtype.itemsize
        if place.begin != position or place.end - position != size:
            raise DamagedFileError(f"safetensors header: {place.name!r} does not lie where its shape and dtype say")
        position = place.end
    if position != data_size:
        raise DamagedFileError(f"safetensors header: {position} bytes of tensors in {data_size} bytes of data")


def _place(name: str, entry: dict[str, Any]) -> TensorPlace:
    begin, end = entry["data_offsets"]
    if not all(type(offset) is int and offset >= 0 for offset in (begin, end)):
        raise ValueError(f"{name!r} has offsets that are not counts")
    element_count(entry["shape"], 0)
    return TensorPlace(begin, end, name, _DTYPES[entry["dtype"]], entry["shape"])


def _metadata(held: Any) -> dict[str, str]:
    if not isinstance(held, dict) or not all(isinstance(text, str) for text in held.values()):
        raise TypeError(f"{RESERVED_NAME} is not a mapping from text to text")
    return held


def _read(read_into: Callable[[memoryview], None], count: int) -> bytes:
    buffer = bytearray(count)
    read_into(memoryview(buffer))
    return bytes(buffer)


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data
