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
    total: Tensor
    if torch.compiler.is_compiling():
        # A compiler decides itself which tensors to keep and which to compute again.
        wide = flat_logits.to(torch.promote_types(logits.dtype, torch.float32))
        total = F.cross_entropy(wide, flat_targets, ignore_index=IGNORE_INDEX, reduction="sum")
    else:
        total = _SummedCrossEntropy.apply(flat_logits, flat_targets)[0]  # type: ignore[no-untyped-call]
    return total, (targets != IGNORE_INDEX).sum()


class _SummedCrossEntropy(torch.autograd.Function):
    """Σ log Σ exp(logits) - logits[target]. It keeps the logits for the backward pass, and nothing else of their size.

    A log-softmax would also keep its result. For a large vocabulary, that is the largest tensor of a model, in float32.
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
        # d total / d logits = softmax(logits) - one_hot(target), and 0 at ignored positions.
        weight = upstream.expand_as(targets).masked_fill(ignored, 0.0).unsqueeze(-1)
        gradient = torch.exp(logits - normalizer.unsqueeze(-1)).mul_(weight)
        gradient.scatter_add_(-1, targets.masked_fill(ignored, 0).unsqueeze(-1), -weight)
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
