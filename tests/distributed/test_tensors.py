from __future__ import annotations

import json
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from speedtronic.distributed.tensors import (
    METADATA_LIMIT,
    Form,
    PackedTensors,
    Schema,
    TensorFormatError,
    Tensors,
    average_deltas,
    compute_pseudo_gradient,
    content_sha256,
    cpu_state_dict,
    load_safetensors,
    pack_tensors,
    packed_size,
    rebase_,
    save_safetensors,
    snapshot,
    unpack_tensors,
)
from speedtronic.durable.tensor_file import DTYPE_NAMES
from tests.support.exchanged import TRAINED, Everything, everything


def assert_equal(left: Tensors, right: Tensors) -> None:
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert (tensor.dtype, tensor.shape) == (right[name].dtype, right[name].shape), name
        assert torch.equal(tensor, right[name]), name


def forms(tensors: Tensors) -> dict[str, Form]:
    return {name: Form(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}


def raw(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


class Compiled(nn.Module):
    """Has the names that `torch.compile` gives, without the seconds that its import takes."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self._orig_mod = inner


class TestSchema:
    def test_each_tensor_stands_once_under_its_kind(self) -> None:
        schema = Schema.of(everything())

        assert set(schema.names("trained")) == set(TRAINED)
        assert schema.names("frozen") == ("frozen",)
        assert schema.names("average") == ("mask", "empty", "norm.running_mean", "norm.running_var")
        assert schema.names("newest") == ("flags", "norm.num_batches_tracked")
        assert set(schema.names()) == set(schema.names("trained", "frozen", "average", "newest"))

    def test_the_dtypes_are_those_that_travel(self) -> None:
        model = everything().bfloat16()

        dtypes = {name: form.dtype for name, form in Schema.of(model).forms().items()}

        assert dtypes["first.weight"] == dtypes["norm.running_var"] == torch.float32
        assert dtypes["phase"] == torch.complex64
        assert dtypes["flags"] == torch.bool
        assert dtypes["norm.num_batches_tracked"] == torch.int64

    def test_a_compiled_model_has_the_names_of_the_plain_one(self) -> None:
        inside = nn.Sequential(Compiled(nn.Linear(2, 2)), Compiled(nn.BatchNorm1d(1, affine=False)))

        names = Schema.of(Compiled(inside)).names()

        assert names == ("0.weight", "0.bias", "1.running_mean", "1.running_var", "1.num_batches_tracked")

    def test_two_precisions_of_one_model_have_one_fingerprint(self) -> None:
        assert Schema.of(nn.Linear(3, 4)).fingerprint == Schema.of(nn.Linear(3, 4).double()).fingerprint

    def test_the_fingerprint_knows_no_order(self) -> None:
        schema = Schema.of(everything())

        assert Schema(dict(reversed(schema.entries.items()))).fingerprint == schema.fingerprint

    def test_a_name_a_shape_a_kind_or_a_dtype_changes_the_fingerprint(self) -> None:
        frozen, narrow = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
        frozen.bias.requires_grad_(False)
        assert narrow.num_batches_tracked is not None
        narrow.num_batches_tracked = narrow.num_batches_tracked.to(torch.int32)
        models = [nn.BatchNorm1d(4), nn.BatchNorm1d(5), nn.Sequential(nn.BatchNorm1d(4)), frozen, narrow]

        assert len({Schema.of(model).fingerprint for model in models}) == len(models)

    def test_a_buffer_that_two_modules_share_stands_once(self) -> None:
        model = nn.Sequential(nn.Identity(), nn.Identity())
        for module in model:
            module.register_buffer("table", torch.ones(2) if not dict(model.named_buffers()) else model[0].table)

        assert Schema.of(model).names() == ("0.table",)

    def test_a_tensor_that_cannot_be_exchanged_is_named(self) -> None:
        sparse = nn.Module()
        sparse.register_buffer("graph", torch.eye(2).to_sparse())
        models = {"weight": nn.LazyLinear(2), "graph": sparse, "bias": nn.Linear(2, 2, device="meta")}

        for name, model in models.items():
            with pytest.raises(ValueError, match=name if name != "bias" else "weight"):
                Schema.of(model)


class TestSnapshot:
    def test_a_snapshot_has_the_forms_of_the_schema(self) -> None:
        for model in (everything(), everything().half(), everything().double()):
            assert forms(snapshot(model)) == Schema.of(model).forms()

    def test_training_goes_on_without_changing_it(self) -> None:
        model = everything()
        before = snapshot(model)
        bias = before["first.bias"].clone()

        with torch.no_grad():
            model.first.bias += 1

        assert torch.equal(before["first.bias"], bias)

    def test_its_memory_is_used_again(self) -> None:
        model = everything()
        first = snapshot(model, names=TRAINED)
        places = {name: tensor.data_ptr() for name, tensor in first.items()}
        with torch.no_grad():
            model.phase += 1j

        second = snapshot(model, first, names=TRAINED)

        assert second is first
        assert {name: tensor.data_ptr() for name, tensor in second.items()} == places
        assert torch.equal(second["phase"], model.phase.detach())

    def test_some_names_are_enough(self) -> None:
        assert snapshot(everything(), names=["flags", "phase"]).keys() == {"flags", "phase"}


class TestRebase:
    @staticmethod
    def trained(model: Everything) -> Tensors:
        return snapshot(model, names=TRAINED)

    def test_without_progress_the_model_is_the_new_base_exactly(self) -> None:
        model, other = everything(0), everything(1)
        new_base = snapshot(other)

        rebase_(model, new_base, self.trained(model), adopt=False)

        assert_equal(snapshot(model), snapshot(other))

    def test_progress_since_the_old_base_is_kept(self) -> None:
        model, new_base = everything(0), snapshot(everything(1))
        base = self.trained(model)
        learnt = {name: torch.full_like(tensor, 0.25) for name, tensor in base.items()}
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name in learnt:
                    parameter.add_(learnt[name])

        rebase_(model, new_base, base, adopt=False)

        for name, value in self.trained(model).items():
            assert torch.allclose(value, new_base[name] + learnt[name], rtol=0, atol=1e-6)

    def test_adopting_drops_what_was_learnt(self) -> None:
        model, new_base = everything(0), snapshot(everything(1))
        base = self.trained(model)
        with torch.no_grad():
            model.first.weight += 1

        rebase_(model, new_base, base, adopt=True)

        assert_equal(snapshot(model), new_base)

    def test_what_is_not_in_the_base_is_overwritten(self) -> None:
        model = everything()
        new_base = snapshot(model)
        new_base["frozen"] = torch.tensor([7.0, 8.0, 9.0])
        new_base["norm.running_mean"] = torch.ones(4)
        new_base["norm.num_batches_tracked"] = torch.tensor(12)
        new_base["flags"] = torch.tensor([False, True])
        expected = {name: tensor.clone() for name, tensor in new_base.items()}

        rebase_(model, new_base, self.trained(model), adopt=False)

        assert_equal(snapshot(model), expected)

    def test_a_parameter_that_is_frozen_for_a_while_keeps_its_progress(self) -> None:
        model, new_base = everything(0), snapshot(everything(1))
        base = self.trained(model)
        with torch.no_grad():
            model.first.bias += 0.5
        model.first.bias.requires_grad_(False)

        rebase_(model, new_base, base, adopt=False)

        assert torch.allclose(model.first.bias, new_base["first.bias"] + 0.5)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_in_half_precision_rounding_is_no_progress(self, dtype: torch.dtype) -> None:
        model, new_base = nn.Linear(5, 5).to(dtype), snapshot(nn.Linear(5, 5))
        given = dict(new_base)
        values = {name: tensor.clone() for name, tensor in new_base.items()}

        rebase_(model, new_base, snapshot(model), adopt=False)

        assert_equal(snapshot(model), new_base)
        assert_equal(new_base, {name: tensor.to(dtype).float() for name, tensor in values.items()})
        assert_equal(given, values)  # entries are replaced; tensors that others may hold stay as they are

    def test_in_double_precision_no_bit_of_progress_is_lost(self) -> None:
        model = nn.Linear(1, 1, bias=False).double()
        base = {"weight": torch.tensor([[1.0]])}
        with torch.no_grad():
            model.weight.fill_(1.0 + 2.0**-40)

        rebase_(model, {"weight": torch.tensor([[2.0]])}, base, adopt=False)

        assert model.weight.item() == 2.0 + 2.0**-40

    def test_a_base_that_does_not_fit_changes_nothing(self) -> None:
        model = everything()
        before = snapshot(model)
        lacking = snapshot(everything(1))
        del lacking["flags"]
        misshapen = {**snapshot(everything(1)), "flags": torch.zeros(5, dtype=torch.bool)}

        for new_base in (lacking, misshapen):
            with pytest.raises(ValueError, match="flags"):
                rebase_(model, new_base, self.trained(model), adopt=False)

        assert_equal(snapshot(model), before)


class TestDifferences:
    def test_a_pseudo_gradient_points_back_to_the_baseline(self) -> None:
        baseline = {"w": torch.tensor([3.0, 1.0]), "z": torch.tensor([1 + 1j]), "n": torch.tensor([5])}
        current = {"w": torch.tensor([1.0, 2.0]), "z": torch.tensor([0 + 3j]), "n": torch.tensor([9])}

        delta = compute_pseudo_gradient(baseline, current)

        assert_equal(delta, {"w": torch.tensor([2.0, -1.0]), "z": torch.tensor([1 - 2j])})

    def test_halves_are_subtracted_in_float32(self) -> None:
        baseline = {"w": torch.tensor([256.0], dtype=torch.bfloat16)}
        current = {"w": torch.tensor([0.001], dtype=torch.bfloat16)}

        delta = compute_pseudo_gradient(baseline, current)

        assert_equal(delta, {"w": baseline["w"].float() - current["w"].float()})

    @pytest.mark.parametrize("current", [{"w": torch.ones(3)}, {"w": torch.ones(2), "v": torch.ones(1)}, {}])
    def test_other_names_or_shapes_are_refused(self, current: Tensors) -> None:
        with pytest.raises(ValueError, match="[vw] "):
            compute_pseudo_gradient({"w": torch.ones(2)}, current)

    def test_the_average_is_the_mean_in_float32(self) -> None:
        deltas: list[Tensors] = [{"w": torch.tensor([value], dtype=torch.float16)} for value in (1.0, 2.0, 60000.0)]

        mean = average_deltas(deltas)

        assert_equal(mean, {"w": torch.tensor([60003.0]) / 3})

    def test_averaging_changes_no_delta(self) -> None:
        deltas = [{"w": torch.tensor([1.0])}, {"w": torch.tensor([3.0])}]

        average_deltas(deltas)

        assert_equal(deltas[0], {"w": torch.tensor([1.0])})

    def test_nothing_has_no_average(self) -> None:
        with pytest.raises(ValueError, match="no delta"):
            average_deltas([])

    def test_deltas_of_different_shapes_have_no_average(self) -> None:
        with pytest.raises(ValueError, match="shape"):
            average_deltas([{"w": torch.ones(2)}, {"w": torch.ones(3)}])

    def test_a_state_is_copied_to_the_cpu_in_its_own_dtypes(self) -> None:
        model = everything().half()

        state = cpu_state_dict(Compiled(model))

        assert_equal(state, dict(model.state_dict()))
        assert not {tensor.data_ptr() for tensor in state.values() if tensor.numel()} & {
            tensor.data_ptr() for tensor in model.state_dict().values() if tensor.numel()
        }
        assert_equal(cpu_state_dict({"a": torch.ones(2, 3).t(), "step": 3}), {"a": torch.ones(3, 2)})


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

        found, metadata = unpack_tensors(pack_tensors(tensors, {"a": "b"}), forms(tensors) if expects else None)

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

    def test_of_a_writable_buffer_tensors_are_views(self) -> None:
        data = bytearray(pack_tensors({"a": torch.zeros(4)}, {}))

        found, _ = unpack_tensors(data, {"a": Form(torch.float32, (4,))})
        data[-4:] = struct.pack("<f", 5.0)

        assert found["a"].tolist() == [0.0, 0.0, 0.0, 5.0]

    def test_of_bytes_tensors_are_copies_made_when_asked_for(self) -> None:
        data = pack_tensors({"a": torch.zeros(4)}, {})

        packed = PackedTensors(data, {"a": Form(torch.float32, (4,))})
        packed["a"].add_(1)

        assert packed["a"].tolist() == [0.0] * 4

    def test_any_byte_but_zero_is_true(self) -> None:
        data = bytearray(pack_tensors({"a": torch.tensor([True, False, True])}, {}))
        data[-1] = 0x7F

        assert unpack_tensors(data)[0]["a"].view(torch.uint8).tolist() == [1, 0, 1]

    def test_no_packed_object_is_larger_than_foretold(self) -> None:
        tensors = snapshot(everything())

        size = len(pack_tensors(tensors, {"m": "x" * (METADATA_LIMIT - 200)}))

        assert packed_size(forms(tensors)) - METADATA_LIMIT < size <= packed_size(forms(tensors))

    def test_a_tensor_that_the_format_lacks_is_named(self) -> None:
        for tensor in (torch.eye(2).to_sparse(), torch.zeros(2, dtype=torch.float8_e8m0fnu)):
            with pytest.raises(ValueError, match="odd"):
                pack_tensors({"odd": tensor}, {})
        with pytest.raises(ValueError, match="__metadata__"):
            pack_tensors({"__metadata__": torch.ones(1)}, {})

    @pytest.mark.parametrize("metadata", [{"epoch": 1}, {1: "epoch"}, {"epoch": None}])
    def test_metadata_that_no_reader_would_take_is_named(self, metadata: Any) -> None:
        with pytest.raises(ValueError, match="epoch"):
            pack_tensors({"a": torch.ones(1)}, metadata)


def entry(dtype: str = "F32", shape: Any = (2,), begin: Any = 0, end: Any = 8) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


EXPECTED = {"a": Form(torch.float32, (2,)), "z": Form(torch.complex64, ())}
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
            (raw({**GOOD, "z": entry()}, DATA), "not written as it should"),
            (raw({**GOOD, "a": entry(begin=8, end=16)}, DATA), "not written as it should"),
            (raw({**GOOD, "a": entry(begin=-8, end=0)}, DATA), "not written as it should"),
            (raw({**GOOD, "__metadata__": {"k": 1}}, DATA), "metadata"),
            (raw({**GOOD, "__metadata__": "text"}, DATA), "metadata"),
            (raw([GOOD], DATA), "not a JSON object"),
            (pack_tensors({"a": torch.zeros(2), "z": torch.tensor(0j)}, {}) + b"more", "4 bytes follow"),
            (
                raw(b'{"a":{},' + json.dumps({"a": entry(), "z": entry()}).encode()[1:], DATA),
                "not written as it should",
            ),
            (struct.pack("<Q", 10 * 2**30) + DATA, "claims a header of 10737418240 bytes"),
            (struct.pack("<Q", 2**64 - 1) + DATA, "claims a header"),
            (b"\x80\x04\x95\x20\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94\x93\x94.", "claims"),
        ],
    )
    def test_what_is_no_upload_of_ours_is_refused_with_its_reason(self, data: bytes, reason: str) -> None:
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

    def test_a_key_that_stands_twice_is_refused(self) -> None:
        data = pack_tensors({"a": torch.zeros(2)}, {})
        text = data[8 : data.rindex(b"}") + 1]
        twice = text[:-1] + b"," + text[text.index(b'"a"') :]

        with pytest.raises(TensorFormatError, match="not written as it should"):
            unpack_tensors(raw(twice, bytes(8)), {"a": EXPECTED["a"]})

    @pytest.mark.parametrize("expected", [EXPECTED, None])
    @pytest.mark.parametrize("text", [b"[" * 60_000, b'{"a":' * 12_000, b"[" + b"0," * 30_000 + b"0]", b"9" * 60_000])
    def test_nested_or_endless_json_costs_little(self, text: bytes, expected: dict[str, Form] | None) -> None:
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
    def test_a_file_that_is_no_safetensors_is_refused(self, data: bytes, tmp_path: Path) -> None:
        path = tmp_path / "weights.safetensors"
        path.write_bytes(data)

        with pytest.raises(TensorFormatError, match=r"weights\.safetensors"):
            load_safetensors(path)

    @pytest.mark.parametrize("text", ['"a"', "[1", "[[]]", '["b"]', '["a"]', "[" * 5000, "null", '{"a": 1}'])
    def test_a_false_word_on_complex_tensors_makes_none(self, text: str) -> None:
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
    def test_what_cannot_be_parts_of_complex_numbers_stays_as_it_is(self, shape: list[int], dtype: torch.dtype) -> None:
        tensors = {"a": torch.ones(shape, dtype=dtype)}

        assert_equal(unpack_tensors(pack_tensors(tensors, {"complex": '["a"]'}))[0], tensors)


class TestFiles:
    def test_a_state_with_tied_weights_comes_back_whole(self, tmp_path: Path) -> None:
        state = everything().state_dict()

        save_safetensors(state, tmp_path / "w.safetensors", {"step": "3"})
        found = load_safetensors(str(tmp_path / "w.safetensors"))

        assert_equal(found, dict(state))
        assert found["tied.weight"].data_ptr() != found["first.weight"].data_ptr()

    def test_the_model_takes_what_was_saved(self, tmp_path: Path) -> None:
        model, other = everything(0), everything(1)

        save_safetensors(cpu_state_dict(model), tmp_path / "w.safetensors")
        other.load_state_dict(load_safetensors(tmp_path / "w.safetensors"))

        assert_equal(snapshot(other), snapshot(model))

    def test_a_failed_write_leaves_the_file_that_was_there(self, tmp_path: Path) -> None:
        path = tmp_path / "w.safetensors"
        save_safetensors({"a": torch.ones(1)}, path)

        with pytest.raises(ValueError, match="odd"):
            save_safetensors({"odd": torch.eye(2).to_sparse()}, path)

        assert_equal(load_safetensors(path), {"a": torch.ones(1)})
        assert list(tmp_path.iterdir()) == [path]


def test_a_tensor_is_exact_through_any_round(tmp_path: Path) -> None:
    values: Tensor = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, 1e-45, 3.4e38])

    save_safetensors({"a": values}, tmp_path / "a.safetensors")

    assert torch.equal(load_safetensors(tmp_path / "a.safetensors")["a"].view(torch.int32), values.view(torch.int32))


# ---------------------------------------------------------------------- on a GPU


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gpu_gives_copies_away_and_takes_a_new_base_as_the_cpu_does(dtype: torch.dtype) -> None:
    here, there = nn.Linear(64, 48).to(dtype), nn.Linear(64, 48).to(dtype).cuda()
    there.load_state_dict(here.state_dict())
    base = snapshot(here)
    assert_equal(snapshot(there), base)
    reused = snapshot(there)
    for model in (here, there):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.5)
    assert snapshot(there, reused) is reused
    assert_equal(reused, snapshot(here))
    new_base = {name: value + 0.25 for name, value in base.items()}
    on_device = dict(new_base)
    rebase_(here, new_base, base, adopt=False)
    rebase_(there, on_device, base, adopt=False)
    assert_equal(on_device, new_base)
    assert_equal(snapshot(there), snapshot(here))
