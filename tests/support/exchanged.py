"""A small model with every kind of tensor that nodes exchange, and deltas of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from speedtronic.distributed.codec import make_codec
from speedtronic.distributed.delta import DeltaHeader, pack_delta
from speedtronic.distributed.records import Position
from speedtronic.distributed.schema import Schema, Tensors, TensorType, snapshot

TRAINED = ("first.weight", "first.bias", "phase", "norm.weight", "norm.bias")


class Everything(nn.Module):
    """Trained, frozen, complex and tied parameters; averaged, integer, bool, masked and unsaved buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.tied = self.first
        self.phase = nn.Parameter(torch.tensor([1 + 2j, 3 - 4j]))
        self.norm = nn.BatchNorm1d(4)
        self.frozen = nn.Parameter(torch.arange(3.0), requires_grad=False)
        self.register_buffer("mask", torch.tensor([0.0, -torch.inf]))
        self.register_buffer("flags", torch.tensor([True, False]))
        self.register_buffer("empty", torch.empty(0, 2))
        self.register_buffer("scratch", torch.zeros(7), persistent=False)
        self.register_buffer("nothing", None)


def everything(seed: int = 0) -> Everything:
    torch.manual_seed(seed)
    return Everything()


def header_of(schema: Schema, **changes: Any) -> DeltaHeader:
    facts: dict[str, Any] = {
        "node": "ann",
        "session": "s1",
        "seq": 3,
        "base_version": 2,
        "steps": 10,
        "samples": 80,
        "tokens": 640,
        "seconds": 1.5,
        "position": Position(30, 240, 1920),
        "schema_id": schema.fingerprint,
        "codec": "fp32",
        "time": "2026-01-02T03:04:05Z",
    }
    return DeltaHeader(**{**facts, **changes})


def buffers_of(model: nn.Module) -> Tensors:
    return snapshot(model, names=Schema.of(model).names("average", "newest"))


def delta_bytes(model: nn.Module, delta: dict[str, Tensor], **changes: Any) -> bytes:
    """A delta as a node sends it, whose header says what `changes` say."""
    header = header_of(Schema.of(model), **changes)
    return pack_delta(header, make_codec(header.codec).encode(delta, None).tensors, buffers_of(model))


class Compiled(nn.Module):
    """Has the names that `torch.compile` gives, without the seconds that its import takes."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self._orig_mod = inner


def assert_equal(left: Tensors, right: Tensors) -> None:
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert (tensor.dtype, tensor.shape) == (right[name].dtype, right[name].shape), name
        assert torch.equal(tensor, right[name]), name


def types_of(tensors: Tensors) -> dict[str, TensorType]:
    return {name: TensorType(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
