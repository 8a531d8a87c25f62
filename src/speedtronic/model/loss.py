"""Next-token cross-entropy on labels that are aligned with the logits, or one position shorter.

Legend: `B` batch, `T` sequence, `V` vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

IGNORE_INDEX = -100
"""The label of a position that is no target."""


def causal_cross_entropy_sum(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Sum the negative log-likelihood of the labels, and count them.

    Args:
        logits: `(B, T, V)` floating; half-precision logits are normalised in float32.
        labels: integer `(B, T)`, where `labels[:, t]` is the target of `logits[:, t]`; or `(B, T - 1)`, where
            the last position has no target. `-100` marks a position to ignore.

    Returns:
        The scalar sum in nats, differentiable even when every label is ignored, and the int64 count of labels
        that are not ignored. Both stay on the device: nothing is read back.

    Raises:
        ValueError: the labels fit neither form.
    """
    targets = _one_label_per_position(logits, labels)
    return _summed_cross_entropy(logits.flatten(0, 1), targets.flatten()), (targets != IGNORE_INDEX).sum()


def _summed_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    if torch.compiler.is_compiling():
        # A compiler decides by itself what is kept and what is computed again.
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return F.cross_entropy(wide, targets, ignore_index=IGNORE_INDEX, reduction="sum")
    total: Tensor = _SummedCrossEntropy.apply(logits, targets)[0]  # type: ignore[no-untyped-call]
    return total


class _SummedCrossEntropy(torch.autograd.Function):
    """Σ log Σ exp(logits) - logits[target], which keeps the logits for the backward pass and nothing of their size.

    A log-softmax would keep its result as well: for a large vocabulary the largest tensor of a model, in float32.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        normalizer = torch.logsumexp(wide, -1)
        ignored = targets == IGNORE_INDEX
        chosen = wide.gather(-1, targets.masked_fill(ignored, 0).unsqueeze(-1)).squeeze(-1)
        return (normalizer - chosen).masked_fill(ignored, 0.0).sum(), normalizer

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: tuple[Tensor, Tensor]) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs, output[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor | None, _: None) -> tuple[Tensor | None, None]:
        if upstream is None:
            return None, None
        logits, targets, normalizer = ctx.saved_tensors
        ignored = targets == IGNORE_INDEX
        weight = upstream.expand_as(targets).masked_fill(ignored, 0.0).unsqueeze(-1)
        gradient = torch.exp(logits - normalizer.unsqueeze(-1)).mul_(weight)
        gradient.scatter_add_(-1, targets.masked_fill(ignored, 0).unsqueeze(-1), -weight)
        return gradient.to(logits.dtype), None


def causal_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean negative log-likelihood of the labels that are not ignored, in nats per token; zero when there are
    none.

    Arguments and errors as in `causal_cross_entropy_sum`. The zero keeps its graph to the logits.
    """
    total, count = causal_cross_entropy_sum(logits, labels)
    return total / count.clamp(min=1)


def _one_label_per_position(logits: Tensor, labels: Tensor) -> Tensor:
    if logits.ndim == 3:
        batch, length, _ = logits.shape
        if labels.shape == (batch, length):
            return labels.long()
        if labels.shape == (batch, length - 1):
            # Ignoring the last position equals cutting it off, without copying the logits.
            return F.pad(labels.long(), (0, 1), value=IGNORE_INDEX)
    raise ValueError(
        f"labels of shape {tuple(labels.shape)} do not fit logits of shape {tuple(logits.shape)}: logits are "
        "(B, T, V), labels (B, T) with one next-token target per position, or (B, T - 1)"
    )
