from __future__ import annotations

import json
import os
import struct
from functools import partial
from io import FileIO
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import pytest
import safetensors.torch
import torch

from speedtronic.durable.files import DamagedFileError, fill
from speedtronic.durable.tensor_file import (
    DTYPE_NAMES,
    check_tensor_bytes,
    read_header,
    read_tensor,
    read_tensors,
    tensor_chunks,
)

TENSORS = {
    "weight": torch.arange(6, dtype=torch.float32).reshape(2, 3).t(),
    "half": torch.ones(3, dtype=torch.bfloat16),
    "flag": torch.tensor(True),
    "empty": torch.empty(0, 4),
    "naïve": torch.tensor([1, 2]),
}


def written(tensors: dict[str, torch.Tensor], **metadata: str) -> bytes:
    return b"".join(bytes(chunk) for chunk in tensor_chunks(tensors, metadata))


def read(data: bytes) -> dict[str, torch.Tensor]:
    with NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        with FileIO(file.name) as opened:
            return read_tensors(Path(file.name), partial(fill, opened), len(data))


def raw(header: Any, data: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def assert_equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert tensor.dtype == right[name].dtype
        assert torch.equal(tensor, right[name])


def test_the_safetensors_library_reads_what_we_write() -> None:
    assert_equal(safetensors.torch.load(written(TENSORS, format="pt")), TENSORS)


def test_we_read_what_the_safetensors_library_writes() -> None:
    tensors = {name: tensor.contiguous() for name, tensor in TENSORS.items()}
    assert_equal(read(safetensors.torch.save(tensors, {"format": "pt"})), tensors)


@pytest.mark.parametrize("dtype", list(DTYPE_NAMES))
def test_every_dtype_comes_back(dtype: torch.dtype) -> None:
    tensor = torch.arange(5, dtype=torch.float32).to(dtype)
    back = read(written({"x": tensor, "odd": torch.ones(3, dtype=torch.uint8)}))["x"]
    assert back.dtype == dtype
    assert back.view(torch.uint8).equal(tensor.view(torch.uint8))


def test_each_tensor_starts_at_a_multiple_of_its_item_size() -> None:
    data = written({"byte": torch.ones(3, dtype=torch.uint8), "double": torch.ones(2, dtype=torch.float64)})
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    assert (8 + length + header["double"]["data_offsets"][0]) % 8 == 0


def test_tensors_that_were_read_have_memory_of_their_own() -> None:
    back = read(written({"a": torch.zeros(2), "b": torch.zeros(2)}))
    back["a"].add_(1)
    assert back["b"].sum() == 0
    assert back["a"].untyped_storage().nbytes() == 8


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"123",
        struct.pack("<Q", 2**60),
        struct.pack("<Q", 100) + b"{}",
        raw([1]),
        raw({"x": 1}),
        raw({"x": {"dtype": "F32", "shape": [1]}}),
        raw({"x": {"dtype": "PICKLE", "shape": [1], "data_offsets": [0, 4]}}, b"1234"),
        raw({"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, b"1234"),
        raw({"x": {"dtype": "F32", "shape": [-1], "data_offsets": [0, -4]}}),
        raw({"x": {"dtype": "F32", "shape": [1.0], "data_offsets": [0, 4]}}, b"1234"),
        raw({"x": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}, b"12341234"),
        raw({"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, b"12345"),
        raw({"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, b"12"),
        raw({"x": {"dtype": "F32", "shape": [0, 2**62, 2**62], "data_offsets": [0, 0]}}),
        raw({name: {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]} for name in "ab"}, b"12"),
        raw({"x": {"dtype": "F32", "shape": {}, "data_offsets": [0, 4]}}, b"1234"),
        raw({"x": {"dtype": "F32", "shape": "", "data_offsets": [0, 4]}}, b"1234"),
        raw({"x": {"dtype": "F32", "shape": [10**4000] * 2_000, "data_offsets": [0, 4]}}, b"1234"),
        raw({"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 2**70]}}, b"1234"),
        raw({"__metadata__": {"tied": ["x"]}}),
        raw({"__metadata__": 5}),
        raw({"x": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}}, b"1"),
        struct.pack("<Q", 3) + b"\xff\xfe\xfd",
    ],
    ids=range(24),
)
def test_what_is_not_a_safetensors_file_is_an_error(data: bytes) -> None:
    with pytest.raises(DamagedFileError):
        read(data)


def test_a_file_that_is_cut_after_its_header_was_read_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(written({"a": torch.zeros(1000)}))
    header = read_header(path)
    os.truncate(path, header.size + 100)
    with FileIO(path) as file:
        file.seek(header.size)
        with pytest.raises(DamagedFileError, match="ends too early"):
            read_tensor(partial(fill, file), header.places[0])


def test_bytes_in_memory_are_checked_as_a_file_is() -> None:
    check_tensor_bytes(written(TENSORS))
    with pytest.raises(DamagedFileError, match="not safetensors data"):
        check_tensor_bytes(written(TENSORS)[:-1])
