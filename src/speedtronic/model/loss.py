"""Next-token cross-entropy on labels that are aligned with the logits, or one position shorter.

Legend: `B` batch, `T` sequence, `V` vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from speedtronic.model.derivatives import only_backward_differentiates

IGNORE_INDEX = -100
"""The label of a position that is not a target."""


def causal_cross_entropy_sum(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Sum the negative log-likelihood of the labels, and count them.

    Args:
        logits: `(B, T, V)` floating; half-precision logits are normalised in float32.
        labels: integer `(B, T)`, where `labels[:, t]` is the target of `logits[:, t]`; or `(B, T - 1)`, where
            the last position has no target. `-100` marks a position to ignore.

    Returns:
        The scalar sum in nats, differentiable even if every label is ignored, and the int64 count of labels that are
        not ignored. Both stay on the device.

    Raises:
        ValueError: the labels fit neither form.
    """
    targets = _one_label_per_position(logits, labels)
    flat_logits, flat_targets = logits.flatten(0, 1), targets.flatten()
    # Where torch's own operation is used, a compiler may decide itself which tensors to keep.
    total: Tensor
    if only_backward_differentiates():
        total = _SummedCrossEntropy.apply(flat_logits, flat_targets)  # type: ignore[no-untyped-call]
    else:
        total = _summed(flat_logits, flat_targets)
    return total, (targets != IGNORE_INDEX).sum()


def _summed(logits: Tensor, targets: Tensor) -> Tensor:
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(wide, targets, ignore_index=IGNORE_INDEX, reduction="sum")


class _SummedCrossEntropy(torch.autograd.Function):
    """Σ log Σ exp(logits) - logits[target]. It keeps the logits for the backward pass, and nothing else of their size.

    torch would also keep the log-softmax. For a large vocabulary, that is the largest tensor of a model, in float32.
    """

    @staticmethod
    def forward(logits: Tensor, targets: Tensor) -> Tensor:
        return _summed(logits, targets)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        logits, targets = ctx.saved_tensors
        ignored = targets == IGNORE_INDEX
        # d total / d logits = softmax(logits) - one_hot(target), and 0 at ignored positions.
        weight = upstream.expand_as(targets).masked_fill(ignored, 0.0).unsqueeze(-1)
        probability = torch.softmax(logits, -1, dtype=torch.promote_types(logits.dtype, torch.float32))
        # A second derivative needs the probabilities themselves. Otherwise their memory is used again.
        gradient = probability * weight if torch.is_grad_enabled() else probability.mul_(weight)
        gradient = gradient.scatter_add_(-1, targets.masked_fill(ignored, 0).unsqueeze(-1), -weight)
        return gradient.to(logits.dtype), None


def causal_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean negative log-likelihood of the labels that are not ignored, in nats per token; zero if there are none.

    Arguments and errors as in `causal_cross_entropy_sum`. The zero still has a gradient graph to the logits.
    """
    total, count = causal_cross_entropy_sum(logits, labels)
    return total / count.clamp(min=1)


def _one_label_per_position(logits: Tensor, labels: Tensor) -> Tensor:
    if logits.ndim == 3:
        batch, length, _ = logits.shape
        if labels.shape == (batch, length):
            return labels.long()
        if labels.shape == (batch, length - 1):
            # Ignore the last position: the same as cutting it off, but without a copy of the logits.
            return F.pad(labels.long(), (0, 1), value=IGNORE_INDEX)
    raise ValueError(
        f"labels of shape {tuple(labels.shape)} do not fit logits of shape {tuple(logits.shape)}: logits are "
        "(B, T, V), labels (B, T) with one next-token target per position, or (B, T - 1)"
    )
