"""From what a model returned to one scalar loss. Pure functions of output and batch.

The data contract: labels are next-token aligned, one per position, and -100 marks what is not a target.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from speedtronic.model import IGNORE_INDEX, causal_cross_entropy

LossFunction = Callable[[Any, Any], Tensor]


def batch_labels(batch: Any) -> Tensor | None:
    """The labels of a batch: `batch["labels"]` of a mapping, the second field of a tuple or list."""
    if isinstance(batch, Mapping):
        labels = batch.get("labels")
    elif isinstance(batch, (tuple, list)) and len(batch) >= 2:
        labels = batch[1]
    else:
        labels = None
    return labels if isinstance(labels, Tensor) else None


def resolve_loss(output: Any, batch: Any, loss_fn: LossFunction | None = None) -> Tensor:
    """Return the scalar loss of a micro batch.

    With `loss_fn`, that is `loss_fn(output, batch)`. Otherwise:

    - a mapping's `"loss"`; without one, causal cross-entropy of its `"logits"` (B, T, V) and the labels;
    - a bare tensor is the loss itself, whatever its shape;
    - the first field of a tuple or list: a scalar, or one value per sample, is the loss; (B, T, V) are causal logits
      when the labels fit.

    A loss that is not a scalar is averaged.

    Raises:
        TypeError: no rule finds a loss in `output`.
        ValueError: there are logits but no labels to compare them with, or their shapes do not fit.
    """
    loss = loss_fn(output, batch) if loss_fn is not None else _infer_loss(output, batch)
    if not isinstance(loss, Tensor):
        raise TypeError(f"the loss must be a tensor, not {type(loss).__name__}")
    return loss.mean() if loss.ndim else loss


def _infer_loss(output: Any, batch: Any) -> Tensor:
    if isinstance(output, Tensor):
        return output
    if isinstance(output, Mapping):
        loss, logits = output.get("loss"), output.get("logits")
        if isinstance(loss, Tensor):
            return loss
        if isinstance(logits, Tensor) and logits.ndim == 3:
            return _causal_loss(logits, batch)
        raise TypeError(
            f"cannot find a loss in a model output with the keys {sorted(map(str, output))}: it needs a 'loss' tensor, "
            "or 'logits' of shape (batch, sequence, vocabulary); or pass loss_fn to the Trainer"
        )
    if isinstance(output, (tuple, list)) and output and isinstance(output[0], Tensor):
        first = output[0]
        if first.ndim <= 1:
            return first
        if first.ndim == 3:
            return _causal_loss(first, batch)
        raise TypeError(
            f"the first field of the model output has shape {tuple(first.shape)}: it must be a loss, one for the batch "
            "or one per sample, or logits of shape (batch, sequence, vocabulary); or pass loss_fn to the Trainer"
        )
    raise TypeError(
        f"cannot find a loss in a model output of type {type(output).__name__}: return a mapping with 'loss' or "
        "'logits', a loss tensor, or a tuple that begins with one; or pass loss_fn to the Trainer"
    )


def _causal_loss(logits: Tensor, batch: Any) -> Tensor:
    labels = batch_labels(batch)
    if labels is None:
        raise ValueError("the model returned logits and the batch has no labels to compare them with")
    return causal_cross_entropy(logits, labels)


def looks_like_logits(output: Any, batch: Any) -> bool:
    """Whether a bare output tensor, which counts as the loss itself, has the shape of logits for the labels."""
    labels = batch_labels(batch)
    if not isinstance(output, Tensor) or output.ndim != 3 or labels is None or labels.is_floating_point():
        return False
    sequences, length = output.shape[:2]
    return tuple(labels.shape) in {(sequences, length), (sequences, length - 1)}


def count_labels(batch: Any) -> Tensor:
    """Number of labels of a batch that are targets: a 0-dim int64 tensor on the labels' device.

    Raises:
        ValueError: the batch has no labels.
    """
    labels = batch_labels(batch)
    if labels is None:
        raise ValueError(
            "data.loss_normalization: tokens weighs each micro batch by its labels, and this batch has none; add "
            "labels or use micro_batch"
        )
    return (labels != IGNORE_INDEX).sum()


def align_labels(batch: Any) -> Any:
    """Turn labels that repeat the inputs (`data.labels: unshifted`) into next-token aligned ones.

    Position t gets the label of t + 1 and the last position none: (…, T) int64 in, (…, T) int64 out.
    """
    labels = batch_labels(batch)
    if labels is None:
        return batch
    aligned = torch.full_like(labels, IGNORE_INDEX)
    aligned[..., :-1] = labels[..., 1:]
    if isinstance(batch, Mapping):
        return {**batch, "labels": aligned}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(batch[0], aligned, *batch[2:])  # type: ignore[call-arg]  # a named tuple's fields
    return type(batch)([batch[0], aligned, *batch[2:]])
