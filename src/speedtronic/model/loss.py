"""Next-token cross-entropy on labels that are aligned with the logits, or one position shorter.

Legend: `B` batch, `T` sequence, `V` vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

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
    dtype = torch.promote_types(logits.dtype, torch.float32)
    log_probabilities = F.log_softmax(logits.flatten(0, 1), dim=-1, dtype=dtype)
    total = F.nll_loss(log_probabilities, targets.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")
    return total, (targets != IGNORE_INDEX).sum()


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
