"""Named tensors as a safetensors stream, written and read in one pass over the data.

The format (huggingface.co/docs/safetensors): eight bytes with the little-endian length of a JSON header;
the header, which gives each name its dtype, shape and the range of its bytes; the bytes, without holes, to
the file's end. Doing it here lets checksums be taken on the way, lets a fault be put into any write, and
reads each tensor straight into memory of its own.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from speedtronic.errors import CheckpointError

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
    # Wide items first, so that each tensor starts at a multiple of its item size.
    names = sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))
    header: dict[str, Any] = {RESERVED_NAME: dict(metadata)}
    offset = 0
    for name in names:
        tensor = tensors[name]
        end = offset + tensor.numel() * tensor.itemsize
        header[name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode("ascii")
    text += b" " * (-len(text) % 8)
    yield struct.pack("<Q", len(text)) + text
    for name in names:
        yield _bytes_of(tensors[name].cpu().contiguous())


def read_tensors(read_into: Callable[[memoryview], None], size: int) -> dict[str, Tensor]:
    """Read the tensors of a safetensors stream onto the CPU.

    Args:
        read_into: fills the buffer that it is given with the stream's next bytes.
        size: bytes in the whole stream.

    Raises:
        CheckpointError: the header is not that of a safetensors file of this size.
    """
    length = struct.unpack("<Q", _read(read_into, min(8, size)).ljust(8, b"\xff"))[0]
    if length > min(_LONGEST_HEADER, size - 8):
        raise CheckpointError("not a safetensors file: its header is longer than the file")
    places = _places(_read(read_into, length), size - 8 - length)
    tensors = {}
    for place in places:
        tensor = _empty(place)
        if tensor.numel():
            read_into(_bytes_of(tensor))
        tensors[place.name] = tensor
    return tensors


class _Place(NamedTuple):
    begin: int
    end: int
    name: str
    dtype: torch.dtype
    shape: list[int]


def _places(header: bytes, data_size: int) -> list[_Place]:
    """Where each tensor lies, in the order of the data, when together they fill it exactly."""
    try:
        entries = json.loads(header)
        entries.pop(RESERVED_NAME, None)
        places = sorted(_place(name, entry) for name, entry in entries.items())
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"not a safetensors header: {type(error).__name__}: {error}") from error
    position = 0
    for place in places:
        if place.begin != position or place.end - place.begin != math.prod(place.shape) * place.dtype.itemsize:
            raise CheckpointError(f"safetensors header: {place.name} does not lie where its shape and dtype say")
        position = place.end
    if position != data_size:
        raise CheckpointError(f"safetensors header: {position} bytes of tensors in {data_size} bytes of data")
    return places


def _place(name: str, entry: dict[str, Any]) -> _Place:
    begin, end = entry["data_offsets"]
    shape = entry["shape"]
    if not all(type(number) is int and number >= 0 for number in (begin, end, *shape)):
        raise ValueError(f"{name} has a shape or offsets that are not counts")
    return _Place(begin, end, name, _DTYPES[entry["dtype"]], shape)


def _empty(place: _Place) -> Tensor:
    try:
        return torch.empty(place.shape, dtype=place.dtype)
    except (RuntimeError, TypeError, OverflowError) as error:
        raise CheckpointError(f"safetensors header: cannot make {place.name}: {error}") from error


def _read(read_into: Callable[[memoryview], None], count: int) -> bytes:
    buffer = bytearray(count)
    read_into(memoryview(buffer))
    return bytes(buffer)


def _bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data
