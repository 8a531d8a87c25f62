"""States that go from one rank to another: as JSON and tensors, as they are written, and never pickled."""

from __future__ import annotations

import base64
from typing import Any

import torch
from torch import Tensor

from speedtronic.checkpoint.tree import decode, encode
from speedtronic.durable.tensor_file import DTYPE_NAMES
from speedtronic.ranks import Group

_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


def gather_states(group: Group, state: dict[str, Any]) -> list[dict[str, Any]]:
    """The states of all ranks, in rank order. They are small: all their tensors travel as text.

    Args:
        group: all ranks call this.
        state: a tree that a checkpoint can hold.
    """
    if group.size == 1:
        return [state]
    tree, tensors, _ = encode(state)
    packed = {name: [DTYPE_NAMES[t.dtype], list(t.shape), _to_text(t)] for name, t in tensors.items()}
    return [
        decode(tree, {name: _from_text(*tensor) for name, tensor in packed.items()})
        for tree, packed in group.gather([tree, packed])
    ]


def broadcast_state(group: Group, state: dict[str, Any] | None) -> dict[str, Any] | None:
    """The state of rank 0, on the CPU of every rank; None where it has none. Only rank 0 needs to read any file."""
    if group.size == 1:
        return state
    tensors: dict[str, Tensor] = {}
    tree: Any = None
    shapes: Any = None
    if state is not None:
        tree, tensors, _ = encode(state)
        shapes = {name: [DTYPE_NAMES[t.dtype], list(t.shape)] for name, t in tensors.items()}
    tree, shapes = group.broadcast([tree, shapes])
    if shapes is None:
        return None
    received = {}
    for name, (dtype, shape) in shapes.items():
        tensor = tensors[name] if group.rank == 0 else torch.empty(shape, dtype=_DTYPES[dtype])
        received[name] = group.broadcast(tensor)
    return state if group.rank == 0 else decode(tree, received)


def _to_text(tensor: Tensor) -> str:
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return base64.b64encode(data.numpy().tobytes()).decode("ascii")


def _from_text(dtype: str, shape: list[int], text: str) -> Tensor:
    if not text:
        return torch.empty(shape, dtype=_DTYPES[dtype])
    data = torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
    return data.view(_DTYPES[dtype]).reshape(shape)
