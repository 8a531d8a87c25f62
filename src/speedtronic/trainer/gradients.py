"""The gradients of one update: accumulation over micro batches, and gradient clipping.

Nothing here reads a number from the device: the loss and the norm stay tensors until the trainer logs them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from speedtronic.errors import ModelError
from speedtronic.ranks import Group
from speedtronic.scheduling import StageStreamScheduler
from speedtronic.trainer.loss import MeanLoss
from speedtronic.trainer.merging import Merged
from speedtronic.trainer.profiling import phase
from speedtronic.trainer.reduction import sum_gradients


def accumulate(
    forward: Callable[[Any], MeanLoss],
    batches: Sequence[Any],
    parameters: Iterable[nn.Parameter],
    *,
    targets: Sequence[int] | None = None,
    group: Group,
    scaler: torch.amp.GradScaler,
    stages: StageStreamScheduler | None = None,
    expected: Callable[[], int] | None = None,
    reduce_dtype: torch.dtype | None = None,
) -> Tensor:
    """Run forward and backward over the micro batches of one update.

    Args:
        forward: from a batch to its mean loss.
        batches: the micro batches. None stands for one that only other ranks have, and has no part in the update.
        parameters: those that get gradients, which were cleared before.
        targets: the number of targets of each micro batch, where each value of a loss counts alike. The gradient of
            the update, summed over the ranks, is then that of one batch which holds all their micro batches. A micro
            batch without any has no part in it: the mean over no target may be NaN. None where every micro batch of
            every rank counts alike.
        group: sums the gradients once, when all micro batches are done.
        scaler: scales a loss before its backward pass.
        stages: puts off weight gradients within each backward pass.
        expected: waits for the sum of the targets, or else of the micro batches, of all ranks. It is known before the
            first backward pass, and asked for then. Without it the ranks find it out now.
        reduce_dtype: in which the gradients of the ranks are summed.

    Returns:
        The loss of the update, which is the weighted mean of the losses: a detached 0-dim tensor on the device.

    Raises:
        ModelError: a loss has no gradient.
    """
    parameters = list(parameters)
    weights: list[int | Tensor] = list(map(_micro_batches_in, batches)) if targets is None else list(targets)
    everything = max(1, group.reduce(sum(map(int, weights)))) if expected is None else None
    counts_differ = False
    total: Tensor | None = None
    for number, batch in enumerate(batches):
        if batch is None:
            continue
        with phase("forward"):
            loss, weight = forward(batch)
        if everything is None and expected is not None:
            everything = max(1, expected())
        assert everything is not None, "one of the two tells"
        if targets is not None and weight is not None:
            # Without a target it may be the mean of nothing, and NaN. Only then is a weight on the device read.
            weights[number], counts_differ = weight if targets[number] else int(weight), True
        weight = weights[number]
        if isinstance(weight, Tensor) or weight:
            if not loss.requires_grad or loss.is_complex():
                raise ModelError(
                    f"the loss ({loss.dtype}) has no gradient: it was detached or computed without gradients, it is "
                    "made of integers or complex numbers, or every weight behind it is frozen; return a real loss that "
                    "is computed from what the model returned"
                )
            # A mean over n of N values, times n / N, is their part of the mean over all N.
            loss = loss / (everything / weight)
            # Backward at once, so that the graph of only one micro batch is alive.
            with phase("backward"):
                if stages is not None:
                    stages.begin()
                scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
                if stages is not None:
                    stages.finish()
        else:
            loss = torch.zeros_like(loss)
        total = loss.detach() if total is None else total + loss.detach()
    counted: Tensor | None = None
    if group.size > 1:
        with phase("update"):
            if everything is None and expected is not None:
                everything = max(1, expected())
            total = parameters[0].new_zeros((), dtype=torch.float32) if total is None else total
            # The last of these says whether any rank's counts differ.
            own = [_as_number(value, total) for value in (total, sum(weights), counts_differ)]
            numbers = torch.stack(own)
            summed_loss, counted, differ = sum_gradients(parameters, group, numbers, reduce_dtype).unbind()
            total = summed_loss.to(total.dtype)
            # Whoever has no batch does not know whether counts differ. A device is not asked for it.
            counts_differ = targets is not None and (total.device.type != "cpu" or bool(differ))
    assert total is not None, "an update has at least one micro batch"
    assert everything is not None
    if not counts_differ:
        return total
    # Some losses were means of other numbers of values than there are targets, as only they themselves tell.
    if counted is None:
        counted = torch.as_tensor(sum(weights), device=total.device)
    correction = (everything / counted.clamp(min=1)).to(total.dtype)
    with torch.no_grad():
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(correction)
    return total * correction


def _as_number(value: int | Tensor, like: Tensor) -> Tensor:
    """A 0-dim float64 tensor on the device of another one. To copy one there, the host would have to wait."""
    if isinstance(value, Tensor):
        return value.to(like.device, torch.float64)
    return like.new_full((), value, dtype=torch.float64)


def _micro_batches_in(part: Any) -> int:
    """How many micro batches a part of an update is: none, one, or several that are merged."""
    if part is None:
        return 0
    return len(part.samples) if isinstance(part, Merged) else 1


def clip_gradients(
    parameters: Sequence[nn.Parameter], max_norm: float | None, max_value: float | None = None
) -> Tensor:
    """Return the 2-norm of all gradients together, a 0-dim tensor, from before the clipping.

    Where the norm exceeds `max_norm`, all gradients are scaled down by one factor, so that it is `max_norm`. Then every
    entry is brought into [-max_value, max_value]. With None they stay as they are.
    """
    norm = _clip_norm(parameters, max_norm)
    if max_value is not None:
        nn.utils.clip_grad_value_(parameters, max_value)
    return norm


def _clip_norm(parameters: Sequence[nn.Parameter], max_norm: float | None) -> Tensor:
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
