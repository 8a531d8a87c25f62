from __future__ import annotations

import json
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

from speedtronic.distributed.packed_tensors import (
    METADATA_LIMIT,
    PackedTensors,
    TensorFormatError,
    content_sha256,
    pack_tensors,
    packed_size,
    unpack_tensors,
)
from speedtronic.distributed.schema import TensorType, snapshot
from speedtronic.distributed.tensors import (
    load_safetensors,
)
from speedtronic.durable.tensor_file import DTYPE_NAMES
from tests.support.exchanged import assert_equal, everything, types_of


def raw(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


ALL_DTYPES = [*DTYPE_NAMES, torch.complex64, torch.complex128]


class TestBytes:
    @pytest.mark.parametrize("dtype", ALL_DTYPES)
    @pytest.mark.parametrize("expects", [True, False])
    def test_every_dtype_and_shape_comes_back(self, dtype: torch.dtype, expects: bool) -> None:
        values = torch.tensor([[0, 1, 2], [3, 0, 5]]).to(dtype)
        tensors = {"matrix": values, "turned": values.t(), "part": values[:, 1:2], "scalar": values[0, 1]}
        tensors["empty"] = torch.empty(0, 3, dtype=dtype)
        if dtype.is_complex:
            tensors["conjugate"] = (values * 1j).conj()

        found, metadata = unpack_tensors(pack_tensors(tensors, {"a": "b"}), types_of(tensors) if expects else None)

        assert metadata == {"a": "b"}
        assert_equal({n: t.view(torch.uint8) if t.ndim and t.dtype.itemsize == 1 else t for n, t in found.items()},
                     {n: t.contiguous().view(torch.uint8) if t.ndim and t.dtype.itemsize == 1 else t.resolve_conj()
                      for n, t in tensors.items()})  # fmt: skip

    def test_the_bytes_depend_on_contents_alone(self) -> None:
        one = {"a": torch.arange(6.0).reshape(2, 3).t(), "b": torch.ones(2, dtype=torch.int8)}
        other = {"b": nn.Parameter(torch.ones(3, dtype=torch.int8)[:2], requires_grad=False),
                 "a": nn.Parameter(torch.tensor([[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]))}  # fmt: skip

        assert pack_tensors(one, {"x": "1", "y": "2"}) == pack_tensors(other, {"y": "2", "x": "1"})
        assert content_sha256(one) == content_sha256(other)

    def test_the_safetensors_library_reads_them(self) -> None:
        tensors = {"a": torch.arange(6.0).reshape(2, 3), "flags": torch.tensor([True, False]), "z": torch.tensor([1j])}

        found = safetensors.torch.load(pack_tensors(tensors, {}))

        assert_equal({**found, "z": torch.view_as_complex(found["z"])}, tensors)

    def test_what_the_safetensors_library_writes_is_read(self) -> None:
        tensors = {"a": torch.arange(6.0).reshape(2, 3), "half": torch.ones(3, dtype=torch.bfloat16)}

        found, metadata = unpack_tensors(safetensors.torch.save(tensors, {"format": "pt"}))

        assert_equal(found, tensors)
        assert metadata == {"format": "pt"}

    def test_tensors_are_views_of_a_writable_buffer(self) -> None:
        data = bytearray(pack_tensors({"a": torch.zeros(4)}, {}))

        found, _ = unpack_tensors(data, {"a": TensorType(torch.float32, (4,))})
        data[-4:] = struct.pack("<f", 5.0)

        assert found["a"].tolist() == [0.0, 0.0, 0.0, 5.0]

    def test_tensors_of_bytes_are_copies_made_on_access(self) -> None:
        data = pack_tensors({"a": torch.zeros(4)}, {})

        packed = PackedTensors(data, {"a": TensorType(torch.float32, (4,))})
        packed["a"].add_(1)

        assert packed["a"].tolist() == [0.0] * 4

    def test_any_byte_but_zero_is_true(self) -> None:
        data = bytearray(pack_tensors({"a": torch.tensor([True, False, True])}, {}))
        data[-1] = 0x7F

        assert unpack_tensors(data)[0]["a"].view(torch.uint8).tolist() == [1, 0, 1]

    def test_no_packed_object_exceeds_the_computed_size(self) -> None:
        tensors = snapshot(everything())

        size = len(pack_tensors(tensors, {"m": "x" * (METADATA_LIMIT - 200)}))

        assert packed_size(types_of(tensors)) - METADATA_LIMIT < size <= packed_size(types_of(tensors))

    def test_an_unsupported_tensor_is_named(self) -> None:
        for tensor in (torch.eye(2).to_sparse(), torch.zeros(2, dtype=torch.float8_e8m0fnu)):
            with pytest.raises(ValueError, match="odd"):
                pack_tensors({"odd": tensor}, {})
        with pytest.raises(ValueError, match="__metadata__"):
            pack_tensors({"__metadata__": torch.ones(1)}, {})

    @pytest.mark.parametrize("metadata", [{"epoch": 1}, {1: "epoch"}, {"epoch": None}])
    def test_invalid_metadata_is_named(self, metadata: Any) -> None:
        with pytest.raises(ValueError, match="epoch"):
            pack_tensors({"a": torch.ones(1)}, metadata)


def entry(dtype: str = "F32", shape: Any = (2,), begin: Any = 0, end: Any = 8) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


EXPECTED = {"a": TensorType(torch.float32, (2,)), "z": TensorType(torch.complex64, ())}
GOOD = {"__metadata__": {"complex": '["z"]'}, "a": entry(), "z": entry(begin=8, end=16)}
DATA = bytes(16)


class TestHostileBytes:
    def test_the_good_example_is_good(self) -> None:
        found, metadata = unpack_tensors(pack_tensors({"a": torch.zeros(2), "z": torch.tensor(0j)}, {}), EXPECTED)

        assert metadata == {}
        assert found["z"].dtype == torch.complex64

    @pytest.mark.parametrize(
        ("data", "reason"),
        [
            (raw({**GOOD, "a": entry(dtype="F64")}, DATA), "a is not of torch.float32"),
            (raw({**GOOD, "a": entry(shape=[1, 2])}, DATA), "a does not have shape"),
            (raw({**GOOD, "a": entry(shape=[2**62, 2**62])}, DATA), "a does not have shape"),
            (raw({**GOOD, "a": 7}, DATA), "a is not of"),
            (raw({**GOOD, "../../etc/passwd": entry()}, DATA), "'../../etc/passwd', which does not belong"),
            (raw({**GOOD, "\ud800" * 900: entry()}, DATA), "does not belong"),
            (raw({"a": entry()}, DATA), "lacks the tensor z"),
            (raw({**GOOD, "z": entry()}, DATA), "not in the canonical form"),
            (raw({**GOOD, "a": entry(begin=8, end=16)}, DATA), "not in the canonical form"),
            (raw({**GOOD, "a": entry(begin=-8, end=0)}, DATA), "not in the canonical form"),
            (raw({**GOOD, "__metadata__": {"k": 1}}, DATA), "metadata"),
            (raw({**GOOD, "__metadata__": "text"}, DATA), "metadata"),
            (raw([GOOD], DATA), "not a JSON object"),
            (pack_tensors({"a": torch.zeros(2), "z": torch.tensor(0j)}, {}) + b"more", "4 bytes follow"),
            (
                raw(b'{"a":{},' + json.dumps({"a": entry(), "z": entry()}).encode()[1:], DATA),
                "not in the canonical form",
            ),
            (struct.pack("<Q", 10 * 2**30) + DATA, "claims a header of 10737418240 bytes"),
            (struct.pack("<Q", 2**64 - 1) + DATA, "claims a header"),
            (b"\x80\x04\x95\x20\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94\x93\x94.", "claims"),
        ],
    )
    def test_a_foreign_object_is_refused_with_a_reason(self, data: bytes, reason: str) -> None:
        with pytest.raises(TensorFormatError, match=reason) as caught:
            unpack_tensors(data, EXPECTED)
        assert not caught.value.torn
        assert str(caught.value).isprintable()
        assert len(str(caught.value)) < 200

    def test_every_beginning_of_an_object_may_be_a_torn_upload(self) -> None:
        data = pack_tensors({"a": torch.ones(2), "z": torch.tensor(1j)}, {"k": "v"})

        for length in range(len(data)):
            with pytest.raises(TensorFormatError) as caught:
                unpack_tensors(data[:length], EXPECTED)
            assert caught.value.torn

    def test_zeros_in_place_of_bytes_may_be_a_torn_upload(self) -> None:
        data = pack_tensors({"a": torch.ones(2), "z": torch.tensor(1j)}, {"k": "v"})

        for length in range(8, len(data) - 24):
            with pytest.raises(TensorFormatError) as caught:
                unpack_tensors(data[:length] + bytes(len(data) - length), EXPECTED)
            assert caught.value.torn

    def test_a_repeated_key_is_refused(self) -> None:
        data = pack_tensors({"a": torch.zeros(2)}, {})
        text = data[8 : data.rindex(b"}") + 1]
        twice = text[:-1] + b"," + text[text.index(b'"a"') :]

        with pytest.raises(TensorFormatError, match="not in the canonical form"):
            unpack_tensors(raw(twice, bytes(8)), {"a": EXPECTED["a"]})

    @pytest.mark.parametrize("expected", [EXPECTED, None])
    @pytest.mark.parametrize("text", [b"[" * 60_000, b'{"a":' * 12_000, b"[" + b"0," * 30_000 + b"0]", b"9" * 60_000])
    def test_nested_or_endless_json_costs_little(self, text: bytes, expected: dict[str, TensorType] | None) -> None:
        data = raw(text, DATA)
        tracemalloc.start()
        try:
            with pytest.raises(TensorFormatError):
                unpack_tensors(data, expected)
            assert tracemalloc.get_traced_memory()[1] < 8 * 2**20
        finally:
            tracemalloc.stop()

    @pytest.mark.parametrize(
        "data",
        [
            b"",
            b"\x00" * 8,
            raw({"a": entry(shape=[2**62, 2**62], end=2**60)}, DATA),
            raw({"a": entry(), "b": entry(begin=4, end=12)}, bytes(12)),
            raw({"a": entry(end=100, shape=[25])}, DATA),
            raw({"a": entry(dtype="C64")}, bytes(8)),
            raw({"a": entry(shape=[-2])}, bytes(8)),
            raw({"a": entry(shape=[True, 2])}, bytes(8)),
        ],
    )
    def test_a_file_of_another_format_is_refused(self, data: bytes, tmp_path: Path) -> None:
        path = tmp_path / "weights.safetensors"
        path.write_bytes(data)

        with pytest.raises(TensorFormatError, match=r"weights\.safetensors"):
            load_safetensors(path)

    @pytest.mark.parametrize("text", ['"a"', "[1", "[[]]", '["b"]', '["a"]', "[" * 5000, "null", '{"a": 1}'])
    def test_false_metadata_about_complex_tensors_is_ignored(self, text: str) -> None:
        data = raw({"__metadata__": {"complex": text}, "a": entry(shape=[1, 1, 2])}, bytes(8))

        found, _ = unpack_tensors(data)

        assert found["a"].is_complex() == (text == '["a"]')

    @pytest.mark.parametrize(
        ("shape", "dtype"),
        [
            ([2], torch.int32),
            ([2], torch.float16),
            ([2, 1], torch.float32),
            ([1, 3], torch.float32),
            ([], torch.float32),
        ],
    )
    def test_tensors_that_cannot_be_complex_stay_real(self, shape: list[int], dtype: torch.dtype) -> None:
        tensors = {"a": torch.ones(shape, dtype=dtype)}

        assert_equal(unpack_tensors(pack_tensors(tensors, {"complex": '["a"]'}))[0], tensors)
