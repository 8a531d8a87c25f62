"""From what a model returned to one scalar loss. Pure functions of output and batch.

The data contract: labels are next-token aligned, one per position, and an integer label of -100 is not a target.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import permutations
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from speedtronic.errors import DataError, ModelError
from speedtronic.model import IGNORE_INDEX, causal_cross_entropy
from speedtronic.registry import import_factory

LossFunction = Callable[[Any, Any], Tensor]


class Warn(Protocol):
    """Is told of a kind of guess, and what it was; only where `when`, a 0-dim bool tensor, is true, if it is given."""

    def __call__(self, kind: str, message: str, when: Tensor | None = None) -> None: ...


# The dtypes that can hold -100. In any other every label is a target: also the float -100.0, which is a number to
# predict, and the unsigned 156, which torch takes for equal to -100.
_SIGNED = frozenset({torch.int8, torch.int16, torch.int32, torch.int64})

_REMEDY = (
    "return {'loss': ...}, or set loss (cross_entropy, mse or package.module:function) or pass loss_fn to the Trainer"
)


def batch_labels(batch: Any) -> Tensor | None:
    """The labels of a batch: `batch["labels"]` of a mapping, the second field of a tuple or list."""
    if isinstance(batch, Mapping):
        labels = batch.get("labels")
    elif isinstance(batch, (tuple, list)) and len(batch) >= 2:
        labels = batch[1]
    else:
        labels = None
    return labels if isinstance(labels, Tensor) else None


def resolve_loss(output: Any, batch: Any, loss_fn: LossFunction | None = None, *, warn: Warn | None = None) -> Tensor:
    """Return the scalar loss of a micro batch.

    With `loss_fn`, that is `loss_fn(output, batch)`. Otherwise:

    - a mapping's `"loss"`; without one, causal cross-entropy of its `"logits"` (B, T, V) and the labels;
    - a bare tensor is the loss itself, whatever its shape; but a row of numbers for each integer label is refused;
    - the first field of a tuple or list: a scalar, or one value per sample, is the loss; (B, T, V) are causal logits
      when the labels fit.

    A loss that is not a scalar is averaged: over the labels that are not -100 where it has one value for each integer
    label, in the order of the labels or with their dimensions in another order, such as (T, B); else over all its
    values. `warn` is told where this may not be meant.

    Raises:
        ModelError: no rule finds a loss in `output`.
        DataError: there are logits but no integer labels to compare them with.
        ValueError: the labels do not fit the logits.
    """
    loss = loss_fn(output, batch) if loss_fn is not None else _infer_loss(output, batch)
    if not isinstance(loss, Tensor):
        raise ModelError(f"the loss must be a tensor, not {type(loss).__name__}")
    if loss.ndim == 0:
        return loss
    labels = batch_labels(batch)
    orders = [] if labels is None or labels.dtype not in _SIGNED else _orders(loss, labels != IGNORE_INDEX)
    if orders:
        return _mean_over_targets(loss, orders, warn)
    # One value for each sample is a mean of its own; more than that are values of tokens. `doubt_about` is for a
    # tensor that the model returned as it is.
    meant_as_loss = loss_fn is not None or isinstance(output, Mapping)
    of_tokens = labels is not None and labels.ndim > 1 and loss.numel() > labels.shape[0]
    if warn is not None and labels is not None and meant_as_loss and of_tokens:
        warn(
            "mean of a loss",
            f"the loss has shape {tuple(loss.shape)} and the labels {tuple(labels.shape)}, so it is averaged over "
            f"all its values, those of labels of {IGNORE_INDEX} too; return a scalar, or one value for each label",
        )
    return loss.mean()


def _orders(loss: Tensor, targets: Tensor) -> list[Tensor]:
    """Where the targets may be in a loss with one value for each label: masks in the loss's shape.

    The dimensions of the labels come first in their own order, then in each other one that has the loss's shape too,
    but for dimensions of 1. A loss that is one row may have any of them. The list is empty where the loss is none of
    each label.
    """
    if loss.numel() != targets.numel():
        return []
    targets, sizes = targets.squeeze(), loss.squeeze().shape
    moved = (targets.permute(order) for order in permutations(range(targets.ndim)))
    return [mask.reshape(loss.shape) for mask in moved if loss.ndim == 1 or mask.shape == sizes]


def _mean_over_targets(loss: Tensor, orders: list[Tensor], warn: Warn | None) -> Tensor:
    """The mean of one value for each label over the targets. `orders` are the masks that these may have.

    The shape does not tell (T, B) from (B, T) where T = B, nor in one row. The zeros that cross-entropy has at ignored
    labels do: where they lie in another order, the sum of all values is that of the targets. Nothing is read from the
    device for it.
    """
    targets, *others = orders
    # A sum of half-precision values may be beyond their range.
    wide = loss.to(torch.promote_types(loss.dtype, torch.float32))
    counted = targets
    if others:
        values = loss.detach() != 0
        own, *fits = [~(values & ~mask).any() for mask in orders]
        moved = ~own & torch.stack(fits).any()
        counted = targets | moved
        if warn is not None:
            matters = torch.stack([(mask != targets).any() for mask in others]).any()
            shape = f"the loss has one value for each label, in the shape {tuple(loss.shape)}, and "
            warn(
                "order of a loss",
                f"{shape}its zeros are where labels of {IGNORE_INDEX} lie with their dimensions in another order, as "
                "in (T, B) for (B, T): it is averaged over the other labels; return it in the order of the labels",
                moved,
            )
            warn(
                "order of a loss in doubt",
                f"{shape}it is not 0 at all labels of {IGNORE_INDEX}, so that it may be in another order than the "
                "labels: their own order, as in (B, T), is assumed. Return a scalar, or 0 for these labels, as "
                'cross_entropy(…, ignore_index=-100, reduction="none") does',
                ~own & ~moved & matters,
            )
    return wide.masked_fill(~counted, 0.0).sum() / targets.sum().clamp(min=1)


def _infer_loss(output: Any, batch: Any) -> Tensor:
    if isinstance(output, Tensor):
        _refuse_class_scores(output, batch)
        return output
    if isinstance(output, Mapping):
        loss, logits = output.get("loss"), output.get("logits")
        if isinstance(loss, Tensor):
            return loss
        if isinstance(logits, Tensor) and logits.ndim == 3:
            return _causal_loss(logits, batch)
        raise ModelError(
            f"cannot find a loss in a model output with the keys {sorted(map(str, output))}: it needs a 'loss' tensor, "
            f"or 'logits' of shape (batch, sequence, vocabulary); {_REMEDY}"
        )
    if isinstance(output, (tuple, list)) and output and isinstance(output[0], Tensor):
        first = output[0]
        if first.ndim <= 1:
            return first
        if first.ndim == 3:
            return _causal_loss(first, batch)
        raise ModelError(
            f"the first field of the model output has shape {tuple(first.shape)}: it must be a loss, one for the batch "
            f"or one per sample, or logits of shape (batch, sequence, vocabulary); {_REMEDY}"
        )
    raise ModelError(
        f"cannot find a loss in a model output of type {type(output).__name__}: a mapping with 'loss' or 'logits', a "
        f"loss tensor, or a tuple that begins with one, has one; {_REMEDY}"
    )


def _causal_loss(logits: Tensor, batch: Any) -> Tensor:
    labels = batch_labels(batch)
    if labels is None:
        raise DataError("the model returned logits and the batch has no labels to compare them with")
    if labels.is_floating_point():
        raise DataError(f"the model returned logits of tokens, and the labels are {labels.dtype} instead of integers")
    return causal_cross_entropy(logits, labels)


def _refuse_class_scores(output: Tensor, batch: Any) -> None:
    """Refuse a bare (B, C) output with integer labels (B,): nobody wants the mean of the scores of classes.

    Where a mapping has no `labels`, one integer for each sample under any name counts as one.
    """
    if output.ndim != 2 or output.shape[1] < 2 or not output.is_floating_point():
        return
    columns = batch if isinstance(batch, Mapping) and "labels" not in batch else {"labels": batch_labels(batch)}
    for name, labels in columns.items():
        if isinstance(labels, Tensor) and labels.shape == output.shape[:1] and not labels.is_floating_point():
            raise ModelError(
                f"the model returned a bare tensor of shape {tuple(output.shape)}, and the batch has one integer for "
                f"each of its rows ({name}): these are scores of classes and no loss; {_REMEDY}"
            )


def doubt_about(output: Any, batch: Any) -> str | None:
    """What may be wrong about taking a tensor that is no scalar for the loss, as `resolve_loss` does; None if nothing.

    One value per sample, and one per integer label, are what `reduction="none"` gives. Anything else may as well be
    what the model predicts.
    """
    first = output[0] if isinstance(output, (tuple, list)) and output else output
    if not isinstance(first, Tensor) or first.ndim == 0 or (first.ndim > 1 and first is not output):
        return None
    labels = batch_labels(batch)
    floating = labels is not None and labels.is_floating_point()
    if first.ndim == 1 and not (labels is not None and floating and first.numel() == labels.numel()):
        return None
    if labels is not None and first.shape == labels.shape and not floating:
        return None
    return (
        f"the model returned a tensor of shape {tuple(first.shape)}, which is averaged as the loss; if it holds logits "
        f"or other predictions, {_REMEDY}"
    )


# ---------------------------------------------------------------------- losses by name


def loss_by_name(name: str | None) -> LossFunction | None:
    """The loss that `loss` in the configuration names: `cross_entropy`, `mse` or `package.module:function`.

    Raises:
        ConfigError: the function cannot be imported.
    """
    if name is None:
        return None
    named: dict[str, LossFunction] = {"cross_entropy": _cross_entropy, "mse": _mean_squared_error}
    return named.get(name) or import_factory(name, key="loss")


def _cross_entropy(output: Any, batch: Any) -> Tensor:
    """Mean cross-entropy of logits (B, V) and labels (B,), (B, T, V) and (B, T) or (B, T - 1), (B, V, …) and (B, …).

    Labels of -100 are left out; if all are, the loss is a zero with a gradient graph. Floating labels in the shape of
    the logits are probabilities of the classes.
    """
    logits, labels = _prediction(output, "cross_entropy"), _needed_labels(batch, "cross_entropy")
    if labels.is_floating_point():
        if labels.shape != logits.shape:
            raise DataError(
                f"loss: cross_entropy compares logits of shape {tuple(logits.shape)} with integer labels, or with "
                f"probabilities of the same shape, not with {labels.dtype} of shape {tuple(labels.shape)}"
            )
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return F.cross_entropy(wide, labels.to(wide.dtype))
    # The last dimension has the classes where it can, as in a language model.
    if logits.ndim == 3 and labels.ndim == 2 and labels.shape[1] in (logits.shape[1], logits.shape[1] - 1):
        return causal_cross_entropy(logits, labels)
    if logits.ndim < 2 or (logits.shape[0], *logits.shape[2:]) != tuple(labels.shape):
        raise DataError(
            f"loss: cross_entropy cannot compare logits of shape {tuple(logits.shape)} with labels of shape "
            f"{tuple(labels.shape)}: it needs (B, classes) and (B,), (B, T, classes) and (B, T), or (B, classes, …) "
            "and (B, …)"
        )
    targets = labels.long()
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    total = F.cross_entropy(wide, targets, ignore_index=IGNORE_INDEX, reduction="sum")
    return total / (targets != IGNORE_INDEX).sum().clamp(min=1)


def _mean_squared_error(output: Any, batch: Any) -> Tensor:
    """Mean of (prediction - label)² over all elements. The shapes are equal, but for dimensions of 1."""
    prediction, labels = _prediction(output, "mse"), _needed_labels(batch, "mse")
    if not labels.is_floating_point():
        raise DataError(
            f"loss: mse compares with floating labels, not {labels.dtype}: convert them in the dataset, or use "
            "cross_entropy for classes"
        )
    # (B, 1) and (B,) would broadcast to (B, B), every prediction against every label.
    if _without_ones(prediction) != _without_ones(labels):
        raise DataError(
            f"loss: mse cannot compare predictions of shape {tuple(prediction.shape)} with labels of shape "
            f"{tuple(labels.shape)}: they must be equal, but for dimensions of 1"
        )
    wide = torch.promote_types(prediction.dtype, torch.float32)
    return F.mse_loss(prediction.to(wide), labels.reshape(prediction.shape).to(wide))


def _without_ones(tensor: Tensor) -> list[int]:
    return [size for size in tensor.shape if size != 1]


def _prediction(output: Any, name: str) -> Tensor:
    """What a model returned: a tensor, a mapping's `"logits"`, or the first field of a tuple or list."""
    found = output
    if isinstance(output, Mapping):
        found = output.get("logits")
    elif isinstance(output, (tuple, list)) and output:
        found = output[0]
    if not isinstance(found, Tensor):
        keys = f" with the keys {sorted(map(str, output))}" if isinstance(output, Mapping) else ""
        raise ModelError(
            f"loss: {name} needs a model that returns a tensor, a mapping with 'logits', or a tuple that begins with "
            f"them, not {type(output).__name__}{keys}; name a function of your own as package.module:function"
        )
    return found


def _needed_labels(batch: Any, name: str) -> Tensor:
    labels = batch_labels(batch)
    if labels is None:
        found = f"has {', '.join(map(str, batch))}" if isinstance(batch, Mapping) else "is no pair of tensors"
        raise DataError(
            f"loss: {name} compares with the labels of a batch, which are its 'labels' or its second field, and the "
            f"batch {found}: name the column of the targets 'labels', or name a function of your own as "
            "package.module:function"
        )
    return labels


# ---------------------------------------------------------------------- labels


def count_labels(batch: Any) -> Tensor:
    """Number of labels of a batch that are targets: a 0-dim int64 tensor on the labels' device.

    Raises:
        DataError: the batch has no labels.
    """
    labels = batch_labels(batch)
    if labels is None:
        raise DataError(
            "data.loss_normalization: tokens weighs each micro batch by its labels, and this batch has none; add "
            "labels or use micro_batch"
        )
    if labels.dtype in _SIGNED:
        return (labels != IGNORE_INDEX).sum()
    return labels.new_full((), labels.numel(), dtype=torch.int64)


def align_labels(batch: Any) -> Any:
    """Turn labels that repeat the inputs (`data.labels: unshifted`) into next-token aligned ones.

    Position t gets the label of t + 1 and the last position none: (…, T) integers in, (…, T) int64 out.

    Raises:
        DataError: the labels are no integers.
    """
    labels = batch_labels(batch)
    if labels is None:
        return batch
    if labels.is_floating_point():
        raise DataError(f"data.labels: unshifted is for ids of tokens, and the labels of the batch are {labels.dtype}")
    aligned = torch.full_like(labels, IGNORE_INDEX, dtype=torch.int64)
    aligned[..., :-1] = labels[..., 1:]
    if isinstance(batch, Mapping):
        return {**batch, "labels": aligned}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(batch[0], aligned, *batch[2:])  # type: ignore[call-arg]  # a named tuple's fields
    return type(batch)([batch[0], aligned, *batch[2:]])
