from __future__ import annotations

import hashlib
import json
import pickle
import struct
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from speedtronic.distributed.codec import make_codec
from speedtronic.distributed.delta import (
    Delta,
    DeltaHeader,
    Refusal,
    admit,
    average_deltas,
    compute_pseudo_gradient,
    max_delta_bytes,
    open_delta,
    pack_delta,
    read_header,
)
from speedtronic.distributed.packed_tensors import TensorFormatError, content_sha256, pack_tensors
from speedtronic.distributed.protocol import PROTOCOL, DeltaId
from speedtronic.distributed.records import Position
from speedtronic.distributed.schema import Schema, Tensors
from tests.support.exchanged import TRAINED, assert_equal, buffers_of, delta_bytes, everything, header_of

MODEL = everything()
SCHEMA = Schema.of(MODEL)
FP32 = make_codec("fp32")
ID = DeltaId("ann", "s1", 3)
AVERAGES = buffers_of(MODEL)


def some_delta(seed: int = 0) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    forms = SCHEMA.types("trained")
    return {name: torch.randn(form.shape, dtype=form.dtype, generator=generator) for name, form in forms.items()}


GOOD = delta_bytes(MODEL, some_delta())


def judged(data: bytes | bytearray, **changes: Any) -> Delta | Refusal:
    arguments: dict[str, Any] = {"id": ID, "schema": SCHEMA, "codec": FP32, "averages": AVERAGES}
    return admit(data, **{**arguments, **changes})


def refused(data: bytes | bytearray, **changes: Any) -> Refusal:
    refusal = judged(data, **changes)
    assert isinstance(refusal, Refusal)
    assert refusal.reason.isprintable()
    assert 0 < len(refusal.reason) < 250
    return refusal


def with_tensors(change: Callable[[Tensors], None]) -> bytes:
    """A delta that an attacker made: other tensors, under a header and a checksum that are right for them."""
    tensors = {**some_delta(), **buffers_of(MODEL)}
    change(tensors)
    return pack_delta(header_of(SCHEMA), tensors, {})


def with_header(**changes: Any) -> bytes:
    """A delta whose JSON header says what no `DeltaHeader` could."""
    tensors = {**some_delta(), **buffers_of(MODEL)}
    header = {**json.loads(header_of(SCHEMA, sha256=content_sha256(tensors)).to_json()), **changes}
    text = json.dumps({k: v for k, v in header.items() if v != "gone"}, sort_keys=True, separators=(",", ":"))
    return pack_tensors(tensors, {"speedtronic_delta": text})


def content_at(data: bytes) -> int:
    return 8 + int(struct.unpack_from("<Q", data)[0])


class TestAdmission:
    @pytest.mark.parametrize("name", ["fp32", "bf16"])
    def test_a_delta_comes_back_as_it_was_encoded(self, name: str) -> None:
        codec = make_codec(name)
        encoded = codec.encode(some_delta(), None)
        data = pack_delta(header_of(SCHEMA, codec=name), encoded.tensors, buffers_of(MODEL))

        delta = judged(data, codec=codec)

        assert isinstance(delta, Delta)
        assert delta.header.position == Position(30, 240, 1920)
        assert delta.tensors.keys() == set(TRAINED)
        assert all(torch.equal(delta.tensors[key], tensor) for key, tensor in encoded.decoded.items())
        assert delta.buffers.keys() == AVERAGES.keys()
        assert all(torch.equal(delta.buffers[key], tensor) for key, tensor in AVERAGES.items())

    def test_packing_the_same_delta_twice_gives_the_same_bytes(self) -> None:
        assert delta_bytes(everything(), dict(reversed(some_delta().items()))) == GOOD

    def test_the_header_is_read_from_the_beginning_of_the_object(self) -> None:
        header = read_header(GOOD[: content_at(GOOD)])

        assert header.id == ID
        assert header == header_of(SCHEMA, sha256=hashlib.sha256(GOOD[content_at(GOOD) :]).hexdigest())

    @pytest.mark.parametrize("name", ["fp32", "bf16"])
    def test_every_delta_of_a_model_is_within_its_size_limit(self, name: str) -> None:
        codec = make_codec(name)
        longest = header_of(
            SCHEMA, codec=name, node="n" * 128, session="s" * 128, seq=99_999_999, base_version=2**63 - 1,
            steps=2**63 - 1, samples=2**63 - 1, tokens=2**63 - 1, seconds=1.2345678901234567e300,
            position=Position(2**63 - 1, 2**63 - 1, 2**63 - 1), time="\x01" * 64, signature="\u1234" * 1024,
        )  # fmt: skip

        size = len(pack_delta(longest, codec.encode(some_delta(), None).tensors, buffers_of(MODEL)))

        assert size <= max_delta_bytes(SCHEMA, codec)

    def test_a_mask_of_infinities_is_admitted_where_the_global_one_has_them(self) -> None:
        assert isinstance(judged(GOOD), Delta)
        assert refused(GOOD, averages=None) == Refusal(
            "mask has values that are not finite, or beyond 2^64, and differ from the global ones",
            damaged=False,
            lasting=True,
        )

    def test_a_nodes_own_delta_is_opened_without_judging_its_values(self) -> None:
        delta = open_delta(with_tensors(lambda t: t["first.bias"].fill_(torch.nan)), SCHEMA, FP32)

        assert delta.tensors["first.bias"].isnan().all()

    def test_a_model_without_buffers_sends_none(self) -> None:
        model = nn.Linear(2, 1)
        gradient: dict[str, Tensor] = {"weight": torch.ones(1, 2), "bias": torch.ones(1)}

        delta = admit(delta_bytes(model, gradient), ID, Schema.of(model), FP32)

        assert isinstance(delta, Delta)
        assert not delta.buffers


class TestRefusal:
    @pytest.mark.parametrize(
        ("change", "reason"),
        [
            (lambda t: t["first.weight"].__setitem__((0, 0), torch.nan), "first.weight has values that are not finite"),
            (lambda t: t["first.bias"].fill_(torch.inf), "first.bias has values that are not finite"),
            (lambda t: t["phase"].fill_(complex(0, -torch.inf)), "phase has values that are not finite"),
            (lambda t: t["norm.running_var"].fill_(torch.nan), "norm.running_var has values that are not finite"),
            (lambda t: t["mask"].fill_(torch.inf), "mask has values that are not finite"),
            (lambda t: t["mask"].fill_(-torch.inf), "mask has values that are not finite"),
            (lambda t: t.update(phase=torch.ones(3, dtype=torch.complex64)), "phase does not have shape"),
            (lambda t: t.update({"first.bias": torch.ones(4, dtype=torch.float64)}), "first.bias is not of"),
            (lambda t: t.update({"first.bias": torch.ones(4, dtype=torch.int32)}), "first.bias is not of"),
            (lambda t: t.update({"flags": torch.ones(2, dtype=torch.uint8)}), "flags is not of torch.bool"),
            (lambda t: t.pop("first.weight"), "lacks the tensor first.weight"),
            (lambda t: t.pop("norm.running_mean"), "lacks the tensor norm.running_mean"),
            (lambda t: t.update(frozen=torch.zeros(3)), "'frozen', which does not belong there"),
            (lambda t: t.update({"../../../etc/cron.d/x": torch.zeros(3)}), "does not belong there"),
            (lambda t: t.update({"\n\x1b[2Jx" * 500: torch.zeros(3)}), "does not belong there"),
        ],
    )
    def test_tensors_of_another_model_are_refused_for_good(
        self, change: Callable[[Tensors], None], reason: str
    ) -> None:
        refusal = refused(with_tensors(change))

        assert reason in refusal.reason
        assert not refusal.damaged

    @pytest.mark.parametrize(
        ("changes", "reason"),
        [
            ({"protocol": PROTOCOL + 1}, "protocol 3"),
            ({"schema_id": "0" * 64}, "another model"),
            ({"codec": "int4"}, "its codec is int4, not fp32: distributed.codec differs"),
            ({"codec": "\u2028" * 64}, "codec"),
            ({"node": "eve"}, "it is in/eve/s1/00000003.safetensors, under another name"),
            ({"session": "s2"}, "under another name"),
            ({"seq": 4}, "under another name"),
            ({"node": "../../x"}, "node"),
            ({"node": ".."}, "node"),
            ({"node": "a/b"}, "node"),
            ({"seq": 0}, "seq"),
            ({"seq": True}, "seq"),
            ({"seq": "3"}, "seq"),
            ({"seq": 3.0}, "seq"),
            ({"seq": 10**400}, "seq"),
            ({"steps": 0}, "steps"),
            ({"samples": -1}, "samples"),
            ({"tokens": 2**63}, "tokens"),
            ({"seconds": -1.0}, "seconds"),
            ({"seconds": float("nan")}, "header of the delta"),
            ({"seconds": float("inf")}, "header of the delta"),
            ({"position": [1, 2]}, "position"),
            ({"position": [1, -2, 3]}, "position"),
            ({"position": [1, 2, 2**63]}, "position"),
            ({"position": {"step": 1, "samples": 2, "tokens": 3}}, "header of the delta"),
            ({"sha256": "0" * 63}, "sha256"),
            ({"time": "t" * 65}, "time"),
            ({"signature": 5}, "signature"),
            ({"tokens": "gone"}, "tokens"),
            ({"signature": "gone"}, "not in the canonical form"),
            ({"more": 1}, "more"),
            ({"\u2028" * 300: 1}, "header of the delta"),
        ],
    )
    def test_a_header_of_another_delta_is_refused_for_good(self, changes: dict[str, Any], reason: str) -> None:
        refusal = refused(with_header(**changes))

        assert reason in refusal.reason
        assert not refusal.damaged

    def test_a_replay_under_another_name_is_refused_for_good(self) -> None:
        for replayed in (ID._replace(seq=4), ID._replace(session="s2"), ID._replace(node="bob")):
            refusal = refused(GOOD, id=replayed)
            assert refusal == Refusal(
                "it is in/ann/s1/00000003.safetensors, under another name", damaged=False, lasting=True
            )

    def test_a_header_that_is_not_canonical_is_refused(self) -> None:
        tensors = {**some_delta(), **buffers_of(MODEL)}
        text = header_of(SCHEMA, sha256=content_sha256(tensors)).to_json()

        for other in (text.replace(":", ": "), text.replace('"seq":3', '"seq":9,"seq":3'), text + " "):
            assert "not in the canonical form" in refused(pack_tensors(tensors, {"speedtronic_delta": other})).reason
        assert refused(pack_tensors(tensors, {"speedtronic_delta": text, "more": "x"})).reason == "it is not a delta"

    def test_another_safetensors_object_is_not_a_delta(self) -> None:
        assert refused(pack_tensors({**some_delta(), **AVERAGES}, {})) == Refusal(
            "it is not a delta", damaged=False, lasting=True
        )

    def test_every_beginning_of_a_delta_counts_as_damaged(self) -> None:
        for length in range(0, len(GOOD), 7):
            assert refused(GOOD[:length]).damaged

    def test_a_changed_byte_among_the_tensors_counts_as_damaged(self) -> None:
        for place in range(content_at(GOOD), len(GOOD), 5):
            data = bytearray(GOOD)
            data[place] ^= 0x10
            assert refused(data) == Refusal("its tensors do not match their checksum", damaged=True)

    def test_bytes_after_a_delta_are_refused(self) -> None:
        assert refused(GOOD + b"\x00") == Refusal("1 bytes follow its tensors", damaged=False, lasting=True)

    def test_an_object_larger_than_any_delta_is_refused_unread(self) -> None:
        refusal = refused(bytes(max_delta_bytes(SCHEMA, FP32) + 1))

        assert "a delta of this model has less" in refusal.reason

    @pytest.mark.parametrize(
        ("data", "reason"),
        [
            (struct.pack("<Q", 10 * 2**30) + b'{"a":' * 10, "claims a header of 10737418240 bytes"),
            (pickle.dumps({"first.weight": [1.0] * 100}), "claims a header"),
            (struct.pack("<Q", 60_000) + b"[" * 60_000, "not JSON"),
            (struct.pack("<Q", 60_000) + b'{"a":' * 12_000, "not JSON"),
            (struct.pack("<Q", 60_001) + b"[" + b"0," * 29_999 + b"0]", "not a JSON object"),
        ],
    )
    def test_a_hostile_object_costs_little_memory(self, data: bytes, reason: str) -> None:
        max_delta_bytes(SCHEMA, FP32)
        tracemalloc.start()
        try:
            refusal = refused(data)
            assert tracemalloc.get_traced_memory()[1] < 4 * 2**20
        finally:
            tracemalloc.stop()
        assert reason in refusal.reason

    def test_a_header_nested_in_the_metadata_costs_little_memory(self) -> None:
        tensors = {**some_delta(), **buffers_of(MODEL)}
        data = pack_tensors(tensors, {"speedtronic_delta": "[" * 60_000})

        assert "JSON" in refused(data).reason

    @pytest.mark.parametrize("data", [b"", b"\x00" * 7, b"\x00" * 4096, struct.pack("<Q", 40) + b"{" + b" " * 39])
    def test_an_invalid_header_is_refused(self, data: bytes) -> None:
        with pytest.raises(TensorFormatError):
            read_header(data)


# --- Any bytes at all

VALUES = st.sampled_from(
    [None, True, -1, 0, 3, 2**64, 10**30, 1e308, "", "x", "../x", "ann", "F32", "\ud800", [], [0, 4], [2**62] * 3, {}]
)  # fmt: skip
CHANGES = st.one_of(
    st.tuples(st.just("byte"), st.integers(0, len(GOOD) - 1), st.integers(0, 255)),
    st.tuples(st.just("cut"), st.integers(0, len(GOOD)), st.integers(0, 64)),
    st.tuples(st.just("insert"), st.integers(0, len(GOOD)), st.binary(min_size=1, max_size=16)),
    st.tuples(st.just("entry"), st.integers(0, 100), VALUES),
    st.tuples(st.just("header"), st.integers(0, 100), VALUES),
)


def changed(data: bytearray, change: tuple[str, int, Any]) -> bytearray:
    kind, place, value = change
    match kind:
        case "byte":
            if data:
                data[place % len(data)] = value
        case "cut":
            del data[place : place + value]
        case "insert":
            data[place:place] = value
        case _:
            return with_changed_json(data, kind, place, value)
    return data


def with_changed_json(data: bytearray, kind: str, place: int, value: Any) -> bytearray:
    """Change one value of the JSON, as somebody who writes headers does; of no effect where it is no JSON any more."""
    if len(data) < 8:
        return data
    end = content_at(bytes(data))
    try:
        entries = json.loads(bytes(data[8:end]))
        name = sorted(entries)[place % len(entries)]
        if kind == "entry" and name != "__metadata__":
            key = ("dtype", "shape", "data_offsets")[place % 3]
            entries[name][key] = value
        else:
            header = json.loads(entries["__metadata__"]["speedtronic_delta"])
            header[sorted(header)[place % len(header)]] = value
            text = json.dumps(header, sort_keys=True, separators=(",", ":"))
            entries["__metadata__"]["speedtronic_delta"] = text
    except (ValueError, LookupError, TypeError, AttributeError):
        return data
    text_bytes = json.dumps(entries, separators=(",", ":")).encode("ascii")
    text_bytes += b" " * (-len(text_bytes) % 8)
    return bytearray(struct.pack("<Q", len(text_bytes)) + text_bytes + bytes(data[end:]))


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.lists(CHANGES, min_size=1, max_size=4))
def test_whatever_the_bytes_the_answer_is_a_delta_or_a_refusal(changes: list[tuple[str, int, Any]]) -> None:
    data = bytearray(GOOD)
    for change in changes:
        data = changed(data, change)

    answer = judged(bytes(data))

    if isinstance(answer, Refusal):
        assert 0 < len(answer.reason) < 250
        assert answer.reason.isprintable()
    else:  # nothing but free facts of the header can have changed
        assert bytes(data[content_at(bytes(data)) :]) == GOOD[content_at(GOOD) :]
        assert answer.header.id == ID
        assert answer.header.base_version <= 2
        assert all(tensor.isfinite().all() for tensor in answer.tensors.values())


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.binary(max_size=400))
def test_random_bytes_are_refused(data: bytes) -> None:
    refused(data)


def test_a_header_made_by_hand_is_checked_as_well() -> None:
    with pytest.raises(ValueError, match="seq"):
        header_of(SCHEMA, seq=0)
    with pytest.raises(ValueError, match="node"):
        header_of(SCHEMA, node="a/../b")
    assert isinstance(header_of(SCHEMA), DeltaHeader)


# --- Pseudo-gradients


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

    def test_zero_deltas_have_no_average(self) -> None:
        with pytest.raises(ValueError, match="no delta"):
            average_deltas([])

    def test_deltas_of_different_shapes_have_no_average(self) -> None:
        with pytest.raises(ValueError, match="shape"):
            average_deltas([{"w": torch.ones(2)}, {"w": torch.ones(3)}])
