"""Named tensors in the safetensors format.

The format (huggingface.co/docs/safetensors): eight bytes with the little-endian length of a JSON header; the header,
which gives each name its dtype, shape and the range of its bytes; the bytes, without holes, to the file's end.

Reading: the safetensors library decides whether a file has this format. After that its header is trusted, and our code
reads the bytes. The library cannot take a checksum in the same pass, and it maps files into memory, where a file that
is cut meanwhile ends the process. Writing is our own, so that checksums are taken on the way and a test can let any
write fail.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple

import safetensors
import torch
from torch import Tensor

from speedtronic.durable.files import DamagedFileError, fill

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


def tensor_chunks(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Iterator[bytes | memoryview]:
    """The bytes of a safetensors file. Each tensor is copied from its device just before its bytes are returned.

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
    """The beginning of the file. The data of the tensors in `file_order` follows it."""
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


class TensorPlace(NamedTuple):
    """A tensor's range of bytes, counted from the end of the header, with its name, dtype and shape."""

    begin: int
    end: int
    name: str
    dtype: torch.dtype
    shape: list[int]


class StoredTensor(NamedTuple):
    """A tensor in a safetensors file. Its bytes start at `begin`, counted from the start of the file."""

    file: Path
    begin: int
    place: TensorPlace


class TensorHeader(NamedTuple):
    """The header of a safetensors file.

    Attributes:
        places: the tensors in the order of the data, which they fill without holes.
        metadata: the free text in the header.
        size: bytes before the data.
    """

    places: list[TensorPlace]
    metadata: dict[str, str]
    size: int

    def stored(self, file: Path) -> dict[str, StoredTensor]:
        """The tensors of `file`, which has this header, by name."""
        return {place.name: StoredTensor(file, self.size + place.begin, place) for place in self.places}


def check_tensor_file(path: Path) -> None:
    """Raise DamagedFileError unless it is a safetensors file, and its tensors fill its data as their shapes say."""
    try:
        with safetensors.safe_open(path, framework="numpy"):
            pass
    except safetensors.SafetensorError as error:
        raise DamagedFileError(f"not a safetensors file: {error}") from error


def check_tensor_bytes(data: bytes) -> None:
    """Raise DamagedFileError unless these are the bytes of a safetensors file. The check needs memory for a copy."""
    try:
        safetensors.deserialize(data)  # type: ignore[no-untyped-call]  # the library has no types for it
    except safetensors.SafetensorError as error:
        raise DamagedFileError(f"not safetensors data: {error}") from error


def parse_header(text: bytes) -> TensorHeader:
    """Read the JSON of a header. The safetensors library must have accepted the data before.

    Raises:
        DamagedFileError: a tensor has a dtype that is not in `DTYPE_NAMES`.
    """
    try:
        entries: dict[str, Any] = json.loads(text)
        metadata = entries.pop(RESERVED_NAME, None) or {}
        places = []
        for name, entry in entries.items():
            begin, end = entry["data_offsets"]
            places.append(TensorPlace(begin, end, name, _DTYPES[entry["dtype"]], entry["shape"]))
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise DamagedFileError(f"not a safetensors header: {type(error).__name__}: {error}") from error
    return TensorHeader(sorted(places), metadata, 8 + len(text))


def read_header(path: Path) -> TensorHeader:
    """Check a safetensors file and read its header.

    Raises:
        DamagedFileError: it is not a safetensors file, or has a dtype that is not in `DTYPE_NAMES`.
        OSError: it cannot be read.
    """
    with FileIO(path) as file:
        check_tensor_file(path)
        return _read_header(partial(fill, file), os.fstat(file.fileno()).st_size)


def read_tensors(path: Path, read_into: Callable[[memoryview], None], size: int) -> dict[str, Tensor]:
    """Read all tensors of a safetensors file in one pass over its bytes, onto the CPU.

    Args:
        path: the file, for the check.
        read_into: fills a buffer with the next bytes of the same file.
        size: bytes in the file.

    Raises:
        DamagedFileError: as `read_header`.
    """
    check_tensor_file(path)
    header = _read_header(read_into, size)
    return {place.name: read_tensor(read_into, place) for place in header.places}


def _read_header(read_into: Callable[[memoryview], None], size: int) -> TensorHeader:
    prefix = bytearray(8)
    read_into(memoryview(prefix))
    # The library has checked the length. If the file has changed since, this still allocates no more than its size.
    text = bytearray(min(struct.unpack("<Q", prefix)[0], size))
    read_into(memoryview(text))
    return parse_header(bytes(text))


def read_tensor(read_into: Callable[[memoryview], None], place: TensorPlace) -> Tensor:
    """Read a tensor into memory of its own. The next bytes must be those of the tensor."""
    try:
        tensor = torch.empty(place.shape, dtype=place.dtype)
        data = bytes_of(tensor)
    except (RuntimeError, TypeError, ValueError, OverflowError) as error:
        # The library accepts lengths of any size beside a zero.
        raise DamagedFileError(f"safetensors header: cannot make {place.name!r}: {error}") from error
    if tensor.numel():
        read_into(data)
    return tensor


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data
