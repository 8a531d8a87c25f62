from __future__ import annotations

import pytest
import torch

from speedtronic.distributed.codec import make_codec
from speedtronic.distributed.packed_tensors import pack_tensors, unpack_tensors
from speedtronic.distributed.schema import Schema, Tensors, TensorType
from tests.support.exchanged import TRAINED, everything

SCHEMA = Schema.of(everything())


def random_delta(seed: int, scale: float = 1.0) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: scale * torch.randn(form.shape, dtype=form.dtype, generator=generator)
        for name, form in SCHEMA.types("trained").items()
    }


def copied(tensors: Tensors) -> Tensors:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def assert_equal(left: Tensors, right: Tensors) -> None:
    assert left.keys() == right.keys()
    assert all(torch.equal(tensor, right[name]) for name, tensor in left.items())


@pytest.mark.parametrize("name", ["fp32", "bf16"])
class TestEveryCodec:
    def test_encoded_tensors_have_the_expected_types(self, name: str) -> None:
        codec = make_codec(name)

        sent = codec.encode(random_delta(0), None).tensors

        assert {n: TensorType(t.dtype, tuple(t.shape)) for n, t in sent.items()} == codec.expected(SCHEMA)
        assert codec.name == name

    def test_the_receiver_decodes_what_the_sender_keeps_as_decoded(self, name: str) -> None:
        codec = make_codec(name)
        encoded = codec.encode(random_delta(0), None)

        received, _ = unpack_tensors(pack_tensors(encoded.tensors, {}), codec.expected(SCHEMA))

        assert_equal(dict(codec.decode(received, SCHEMA)), encoded.decoded)
        assert set(encoded.decoded) == set(TRAINED)

    def test_decoded_plus_residual_is_the_pseudo_gradient(self, name: str) -> None:
        codec = make_codec(name)
        delta, residual = random_delta(0), random_delta(1, scale=1e-3)

        encoded = codec.encode(delta, residual)

        for parameter, value in delta.items():
            lost = 0 if encoded.residual is None else encoded.residual[parameter]
            assert torch.equal(encoded.decoded[parameter] + lost, value + residual[parameter])

    def test_encoding_changes_neither_delta_nor_residual(self, name: str) -> None:
        delta, residual = random_delta(0), random_delta(1)
        before = copied(delta), copied(residual)

        encoded = make_codec(name).encode(delta, residual)
        for tensor in [*encoded.decoded.values(), *(encoded.residual or {}).values()]:
            tensor.zero_()

        assert_equal(delta, before[0])
        assert_equal(residual, before[1])

    def test_a_residual_of_another_model_is_refused(self, name: str) -> None:
        with pytest.raises(ValueError, match="phase"):
            make_codec(name).encode(random_delta(0), {k: v for k, v in random_delta(1).items() if k != "phase"})


def test_bf16_rounds_to_the_nearest() -> None:
    delta = {"a": torch.tensor([1.0 + 2**-9, 1.0 + 3 * 2**-9, -1e-30, 0.0])}

    encoded = make_codec("bf16").encode(delta, None)

    assert encoded.tensors["a"].dtype == torch.bfloat16
    assert encoded.decoded["a"][:2].tolist() == [1.0, 1.0 + 2**-7]


def test_with_bf16_small_values_are_sent_sooner_or_later() -> None:
    codec = make_codec("bf16")
    received = torch.zeros(1, dtype=torch.float64)
    residual: Tensors | None = None
    for step in range(200):
        sent = codec.encode({"a": torch.tensor([1.0 if step == 0 else 1e-5])}, residual)
        residual = sent.residual
        received += sent.decoded["a"].double()

    assert residual is not None
    assert abs(received.item() + residual["a"].item() - (1.0 + 199e-5)) < 1e-5


def test_fp32_sends_the_residual_of_another_codec_once() -> None:
    rest = make_codec("bf16").encode(random_delta(0), None).residual

    encoded = make_codec("fp32").encode(random_delta(1), rest)

    assert rest is not None
    assert torch.equal(encoded.tensors["phase"], random_delta(1)["phase"] + rest["phase"])
    assert encoded.residual is None


def test_bf16_takes_half_the_bytes() -> None:
    assert sum(t.nbytes for t in make_codec("bf16").encode(random_delta(0), None).tensors.values()) * 2 == sum(
        t.nbytes for t in random_delta(0).values()
    )


def test_an_unknown_codec_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="'int4'; there are fp32, bf16"):
        make_codec("int4")
