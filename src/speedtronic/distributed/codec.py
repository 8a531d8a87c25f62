"""How a pseudo-gradient is encoded for the store. All codecs are in this file, and are pure.

A lossy codec returns what it lost as a residual, which is added to the next pseudo-gradient (error feedback: Seide et
al., "1-Bit Stochastic Gradient Descent", Interspeech 2014):

    e = residual + delta        q = Q(e)        residual = e - q
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from speedtronic.distributed.schema import Schema, Tensors, TensorType, check_same


class Encoded(NamedTuple):
    """An encoded pseudo-gradient.

    Attributes:
        tensors: what is sent.
        decoded: what the receiver decodes. May share memory with `tensors` or with the pseudo-gradient, or be made of
            `tensors` when it is asked for.
        residual: what was lost; None if nothing was.
    """

    tensors: Tensors
    decoded: Mapping[str, Tensor]
    residual: Tensors | None


class Codec(Protocol):
    """Encodes the trained parameters' pseudo-gradient: float32 and complex64 tensors on the CPU."""

    @property
    def name(self) -> str:
        """What `distributed.codec` calls it."""

    def encode(self, delta: Tensors, residual: Tensors | None) -> Encoded:
        """Encode residual + delta. Neither is changed, so a caller that cannot send the result still has them.

        Raises:
            ValueError: the residual has other names or shapes than the pseudo-gradient.
        """

    def decode(self, encoded: Mapping[str, Tensor], schema: Schema) -> Mapping[str, Tensor]:
        """The decoded pseudo-gradient, by the names of the schema's trained parameters.

        Each tensor is decoded when it is asked for, so that memory holds one at a time.
        """

    def expected(self, schema: Schema) -> dict[str, TensorType]:
        """Names, dtypes and shapes of the tensors that `encode` gives for a model of this schema."""


class Fp32Codec:
    """Sends a pseudo-gradient as it is."""

    name = "fp32"

    def encode(self, delta: Tensors, residual: Tensors | None) -> Encoded:
        total = dict(_sums(delta, residual))
        return Encoded(total, total, None)

    def decode(self, encoded: Mapping[str, Tensor], schema: Schema) -> Mapping[str, Tensor]:
        return encoded

    def expected(self, schema: Schema) -> dict[str, TensorType]:
        return schema.types("trained")


class Bf16Codec:
    """Sends the upper half of each float32, rounded to nearest even; of a complex number, of both its parts."""

    name = "bf16"

    def encode(self, delta: Tensors, residual: Tensors | None) -> Encoded:
        encoded: Tensors = {}
        lost: Tensors = {}
        dtypes = {name: tensor.dtype for name, tensor in delta.items()}
        decoded = _Decoded(encoded, lambda name, sent: _widened(sent, dtypes[name].is_complex))
        for name, total in _sums(delta, residual):  # one at a time: only what is kept takes memory
            real = torch.view_as_real(total) if total.is_complex() else total
            encoded[name] = real.to(torch.bfloat16)
            lost[name] = total - decoded[name]
        return Encoded(encoded, decoded, lost)

    def decode(self, encoded: Mapping[str, Tensor], schema: Schema) -> Mapping[str, Tensor]:
        return _Decoded(encoded, lambda name, sent: _widened(sent, schema.entries[name].dtype.is_complex))

    def expected(self, schema: Schema) -> dict[str, TensorType]:
        return {
            name: TensorType(torch.bfloat16, (*sent.shape, 2) if sent.dtype.is_complex else sent.shape)
            for name, sent in schema.types("trained").items()
        }


_CODECS: Mapping[str, type[Fp32Codec] | type[Bf16Codec]] = {codec.name: codec for codec in (Fp32Codec, Bf16Codec)}


def make_codec(name: str) -> Codec:
    """The codec of this name. Raises ValueError for any but `fp32` and `bf16`."""
    if name not in _CODECS:
        raise ValueError(f"there is no codec {name!r}; there are {', '.join(_CODECS)}")
    return _CODECS[name]()


class _Decoded(Mapping[str, Tensor]):
    """Tensors that are decoded when they are asked for."""

    def __init__(self, encoded: Mapping[str, Tensor], decode: Callable[[str, Tensor], Tensor]) -> None:
        self._encoded = encoded
        self._decode = decode

    def __getitem__(self, name: str) -> Tensor:
        return self._decode(name, self._encoded[name])

    def __contains__(self, name: object) -> bool:
        return name in self._encoded

    def __iter__(self) -> Iterator[str]:
        return iter(self._encoded)

    def __len__(self) -> int:
        return len(self._encoded)


def _sums(delta: Tensors, residual: Tensors | None) -> Iterator[tuple[str, Tensor]]:
    if residual is not None:
        check_same(delta, residual)
    for name, tensor in delta.items():
        yield name, tensor if residual is None else tensor + residual[name]


def _widened(sent: Tensor, is_complex: bool) -> Tensor:
    wide = sent.to(torch.float32)
    return torch.view_as_complex(wide) if is_complex else wide
