"""The gradients of one update: accumulation over micro batches, and gradient clipping.

Nothing here reads a number from the device: the loss and the norm stay tensors until the trainer logs them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from speedtronic.ranks import Group
from speedtronic.scheduling import StageStreamScheduler
from speedtronic.trainer.loss import count_labels
from speedtronic.trainer.profiling import phase


def micro_batch_divisors(micro_batches: int, group: Group) -> list[float | None]:
    """What each mean loss is divided by where every micro batch of every rank counts alike."""
    return [micro_batches * group.size] * micro_batches


def token_divisors(batches: Sequence[Any], group: Group) -> list[float | None]:
    """What each mean loss is divided by where every target counts alike; None for a micro batch without a target.

    The gradient of the update, summed over the ranks, is then that of one batch which holds all their micro batches.
    The labels are counted on the host, where the loader put them, so that counting does not wait for the device.
    """
    counts: list[int] = torch.stack([count_labels(batch) for batch in batches]).tolist()
    # A mean over n of N targets, times n / N, is their part of the mean over all N.
    total = group.reduce(sum(counts))
    return [total / count if count else None for count in counts]


def accumulate(
    forward: Callable[[Any], Tensor],
    batches: Sequence[Any],
    divisors: Sequence[float | None],
    *,
    scaler: torch.amp.GradScaler,
    stages: StageStreamScheduler | None = None,
) -> Tensor:
    """Run forward and backward over the micro batches of one update.

    Args:
        forward: from a batch to its scalar mean loss.
        batches: the micro batches.
        divisors: what each mean loss is divided by. None leaves the micro batch out of the backward pass: the mean
            over no target may be NaN.
        scaler: scales a loss before its backward pass.
        stages: puts off weight gradients within each backward pass.

    Returns:
        The loss of the update, which is the sum of the divided losses: a detached 0-dim tensor on the device.
    """
    total: Tensor | None = None
    for batch, divisor in zip(batches, divisors, strict=True):
        with phase("forward"):
            loss = forward(batch)
        if divisor is None:
            loss = torch.zeros_like(loss)
        else:
            loss = loss / divisor
            # Backward at once, so that the graph of only one micro batch is alive.
            with phase("backward"):
                if stages is not None:
                    stages.begin()
                scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
                if stages is not None:
                    stages.finish()
        total = loss.detach() if total is None else total + loss.detach()
    assert total is not None, "an update has at least one micro batch"
    return total


def clip_gradients(parameters: Sequence[nn.Parameter], max_norm: float | None) -> Tensor:
    """Return the 2-norm of all gradients together, a 0-dim tensor, from before the clipping.

    Where the norm exceeds `max_norm`, all gradients are scaled down by one factor, so that it is `max_norm`. With None
    they stay as they are.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if len({(type(g), g.dtype, g.device, g.layout) for g in gradients}) == 1 and _are_plain(gradients[0]):
        return _clip_alike(gradients, max_norm)
    norm = nn.utils.get_total_norm([g.coalesce().values() if g.is_sparse else g for g in gradients])
    if max_norm is not None:
        nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm


def _are_plain(gradient: Tensor) -> bool:
    """Whether torch computes with a list of such tensors at once."""
    return type(gradient) is Tensor and not gradient.is_sparse and gradient.device.type in ("cpu", "cuda")


@torch.no_grad()
def _clip_alike(gradients: list[Tensor], max_norm: float | None) -> Tensor:
    """What torch's functions do, to the last bit. They sort the gradients by device and dtype, twice in an update."""
    norm: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
    if max_norm is not None:
        torch._foreach_mul_(gradients, torch.clamp(max_norm / (norm + 1e-6), max=1.0))
    return norm
