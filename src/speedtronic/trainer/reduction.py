"""What the ranks sum in an update: their gradients, in buckets, and their running statistics.

The gradients are summed once, behind the last backward pass, and not by hooks inside it. So no rank waits for another
one while user code runs: a batch may use other weights on each rank, a rank may have no batch at all, compiled code may
fail on one, and every rank still makes the same calls. All buckets are on their way at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from speedtronic.errors import ModelError
from speedtronic.ranks import Group

# As large as those of torch's DistributedDataParallel: large enough to use the whole connection.
_BUCKET_BYTES = 25 * 2**20
# Elements that each gradient's place in a bucket is a multiple of, since kernels are fastest on aligned memory.
_ALIGNMENT = 64


@dataclass(frozen=True)
class _Bucket:
    """Parameters whose gradients travel together, each at its place in one flat tensor of `size` elements."""

    parameters: list[nn.Parameter]
    places: list[int]
    size: int


def sum_gradients(
    parameters: Sequence[nn.Parameter], group: Group, numbers: Tensor, dtype: torch.dtype | None = None
) -> Tensor:
    """Sum the gradients of all ranks; each rank gets the sums as its gradients.

    Where a parameter has no gradient on any rank, it has none afterwards. Where some ranks have one, it counts as zero
    on the others.

    Args:
        parameters: the same on every rank, in the same order.
        numbers: of this rank (N,), on the device; they are summed beside.
        dtype: in which the gradients are summed; their own where it is None.

    Returns:
        The sums of `numbers`.

    Raises:
        ModelError: a gradient is sparse.
    """
    if any(p.grad is not None and p.grad.is_sparse for p in parameters):
        raise ModelError(
            "a gradient is sparse, as of nn.Embedding(sparse=True), and ranks sum dense ones: use sparse=False"
        )
    missing = [p for p in parameters if p.grad is None]
    # Of a mixed list there must be a copy, for which the host would wait; most often there is no need for it.
    mixed = [float(p.grad is not None) for p in parameters] if missing else None
    present = numbers.new_ones(len(parameters)) if mixed is None else numbers.new_tensor(mixed)
    sums = group.reduce_later(torch.cat([numbers, present]))
    flying = []
    for bucket in _buckets(parameters):
        flat = _fill(bucket, dtype)
        # The originals go now, so that the buckets take their place in memory.
        for parameter in bucket.parameters:
            parameter.grad = None
        flying.append((bucket, group.reduce_later(flat)))
    for bucket, wait in flying:
        _give_back(bucket, wait())
    everything = sums()
    summed, ranks_with = everything[: len(numbers)], everything[len(numbers) :]
    if missing:
        # Only a rank that lacks a gradient has to know who has one, and waits for the device.
        unused = {id(p) for p, ranks in zip(parameters, ranks_with.tolist(), strict=True) if not ranks}
        for parameter in missing:
            if id(parameter) in unused:
                parameter.grad = None
    return summed


def _buckets(parameters: Iterable[nn.Parameter]) -> list[_Bucket]:
    """In the reverse order of the parameters, as their gradients are computed; each of one device and dtype."""
    buckets: list[_Bucket] = []
    open_ones: dict[tuple[torch.device, torch.dtype], tuple[list[nn.Parameter], list[int], int]] = {}
    for parameter in reversed(list(parameters)):
        kind = (parameter.device, parameter.dtype)
        members, places, size = open_ones.pop(kind, ([], [], 0))
        members.append(parameter)
        places.append(size)
        size += -(-parameter.numel() // _ALIGNMENT) * _ALIGNMENT
        if size * parameter.element_size() >= _BUCKET_BYTES:
            buckets.append(_Bucket(members, places, size))
        else:
            open_ones[kind] = (members, places, size)
    return buckets + [_Bucket(*rest) for rest in open_ones.values()]


@torch.no_grad()
def _fill(bucket: _Bucket, dtype: torch.dtype | None) -> Tensor:
    first = bucket.parameters[0]
    flat = first.new_zeros(bucket.size, dtype=dtype or first.dtype)
    pairs = [
        (flat[place : place + p.numel()].view(p.shape), p.grad)
        for p, place in zip(bucket.parameters, bucket.places, strict=True)
        if p.grad is not None
    ]
    if pairs:
        torch._foreach_copy_([place for place, _ in pairs], [gradient for _, gradient in pairs])
    return flat


def _give_back(bucket: _Bucket, flat: Tensor) -> None:
    for parameter, place in zip(bucket.parameters, bucket.places, strict=True):
        gradient = flat[place : place + parameter.numel()].view(parameter.shape)
        if gradient.dtype != parameter.dtype or gradient.stride() != parameter.stride():
            gradient = torch.empty_like(parameter, requires_grad=False).copy_(gradient)
        parameter.grad = gradient


@torch.no_grad()
def average_buffers(buffers: Sequence[Tensor], group: Group) -> None:
    """Let the running statistics of all ranks be their mean; counts, which are integers, their largest."""
    means = [buffer for buffer in buffers if buffer.is_floating_point()]
    counts = [buffer for buffer in buffers if not buffer.is_floating_point()]
    if means:
        flat = torch.cat([buffer.reshape(-1).to(torch.float32) for buffer in means]) / group.size
        parts = torch.split(group.reduce(flat), [buffer.numel() for buffer in means])
        for buffer, part in zip(means, parts, strict=True):
            buffer.copy_(part.view(buffer.shape))
    if counts:
        flat = torch.cat([buffer.reshape(-1).to(torch.int64) for buffer in counts])
        parts = torch.split(group.reduce(flat, "max"), [buffer.numel() for buffer in counts])
        for buffer, part in zip(counts, parts, strict=True):
            buffer.copy_(part.view(buffer.shape))
