"""From what a model returned to one scalar loss. Pure functions of output and batch.

The data contract: labels are next-token aligned, one per position, and an integer label of -100 is not a target.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import permutations
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from speedtronic.errors import DataError, InputError, ModelError
from speedtronic.model import IGNORE_INDEX, causal_cross_entropy
from speedtronic.registry import import_factory

LossFunction = Callable[[Any, Any], Tensor]


class Warn(Protocol):
    """Is told of a kind of guess, and what it was; only where `when`, a 0-dim bool tensor, is true, if it is given."""

    def __call__(self, kind: str, message: str, when: Tensor | None = None) -> None: ...


class MeanLoss(NamedTuple):
    """The loss of a batch, a mean.

    Attributes:
        value: a 0-dim tensor.
        weight: of how many values it is the mean, an integer or a 0-dim tensor, so that the means of several batches
            are averaged as if they were one batch. None where the labels tell: the number of those that are targets,
            or of samples where there are no labels.
    """

    value: Tensor
    weight: int | Tensor | None = None


LABELS = ("labels", "label", "targets", "target")
"""The keys of a mapping that may hold its labels; the first that does counts."""

# The dtypes that can hold -100. In any other every label is a target: also the float -100.0, which is a number to
# predict, and the unsigned 156, which torch takes for equal to -100.
_SIGNED = frozenset({torch.int8, torch.int16, torch.int32, torch.int64})

_REMEDY = (
    "return {'loss': ...}, or set loss (cross_entropy, mse or package.module:function) or pass loss_fn to the Trainer"
)


def as_tensor(value: Any) -> Tensor | None:
    """A tensor itself, and a copy of an array of numbers; None for anything else."""
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        # Torch wants the bytes in the order of this machine.
        return torch.tensor(value.astype(value.dtype.newbyteorder("=")))
    return value if isinstance(value, Tensor) else None


def batch_labels(batch: Any) -> Tensor | None:
    """The labels of a batch: a mapping's first tensor under one of `LABELS`, the second field of a tuple or list.

    An array of NumPy's counts as a tensor on the CPU.
    """
    if isinstance(batch, Mapping):
        labels = batch.get(_labels_key(batch))
    elif isinstance(batch, (tuple, list)) and len(batch) >= 2:
        labels = batch[1]
    else:
        labels = None
    return as_tensor(labels)


def _labels_key(batch: Mapping[Any, Any]) -> str:
    return next((key for key in LABELS if as_tensor(batch.get(key)) is not None), LABELS[0])


def resolve_loss(output: Any, batch: Any, loss_fn: LossFunction | None = None, *, warn: Warn | None = None) -> MeanLoss:
    """Return the scalar loss of a micro batch, and its weight among others.

    With `loss_fn`, that is `loss_fn(output, batch)`. Otherwise:

    - a mapping's `"loss"`; without one, causal cross-entropy of its `"logits"` (B, T, V) and the labels; a named tuple
      with one of these fields counts as a mapping;
    - a bare tensor is the loss itself, whatever its shape; but a row of numbers for each integer label is refused;
    - the first field of a tuple or list: a scalar, or one value per sample, is the loss; (B, T, V) are causal logits
      when the labels fit.

    A loss that is not a scalar is averaged: over the labels that are not -100 where it has one value for each integer
    label, in the order of the labels or with their dimensions in another order, such as (T, B); else over all its
    values. So it is where `loss_fn` gives one value for each sample, and not 0 where the label is -100: there -100 is a
    number to predict. `warn` is told where this may not be meant.

    A scalar is taken for a mean over the labels that are targets. A loss that has as many rows as the labels, and is
    not one value for each label, weighs as much as it has values.

    Raises:
        ModelError: no rule finds a loss in `output`, or the loss has no value where the batch has targets.
        DataError: there are logits but no integer labels to compare them with.
        ValueError: the labels do not fit the logits.
    """
    loss = _called(loss_fn, output, batch) if loss_fn is not None else _infer_loss(output, batch)
    if not isinstance(loss, Tensor):
        raise ModelError(f"the loss must be a tensor, not {type(loss).__name__}")
    # The mean of half-precision values, and sums of such means, would have three digits.
    loss = loss.to(torch.promote_types(loss.dtype, torch.float32))
    if loss.ndim == 0:
        return MeanLoss(loss)
    labels = batch_labels(batch)
    targets = None if labels is None or labels.dtype not in _SIGNED else (labels != IGNORE_INDEX).to(loss.device)
    if loss.numel() == 0:
        # Only the losses of the targets were returned, and there is none.
        if targets is not None and not targets.any():
            return MeanLoss(loss.sum())
        raise ModelError(f"the loss has the shape {tuple(loss.shape)}, so it has no value, and its mean would be NaN")
    orders = [] if targets is None else _orders(loss, targets)
    if orders:
        if loss_fn is not None and len(orders) == 1 and loss.numel() == loss.shape[0]:
            return _mean_over_samples(loss, orders[0], warn)
        return MeanLoss(_mean_over_targets(loss, orders, warn))
    # One value for each sample is a mean of its own; more than that are values of tokens. `doubt_about` is for a
    # tensor that the model returned as it is.
    meant_as_loss = loss_fn is not None or isinstance(by_name(output), Mapping)
    if warn is not None and targets is not None and meant_as_loss and targets.ndim > 1 and loss.numel() > len(targets):
        # As many values as targets are those of the targets alone, unless one is 0, as at an ignored label.
        ignored = ~targets.all() & ((targets.sum() != loss.numel()) | (loss.detach() == 0).any())
        warn(
            "mean of a loss",
            f"the loss has shape {tuple(loss.shape)} and the labels {tuple(targets.shape)}, so it is averaged over "
            f"all its values, those of labels of {IGNORE_INDEX} too; return a scalar, or one value for each label",
            ignored,
        )
    own = labels is not None and labels.ndim > 0 and loss.numel() != labels.numel() and len(loss) == len(labels)
    return MeanLoss(loss.mean(), loss.numel() if own else None)


def _called(loss_fn: LossFunction, output: Any, batch: Any) -> Any:
    # It may take the labels out of the batch, which are looked at afterwards.
    given = dict(batch) if isinstance(batch, Mapping) else list(batch) if isinstance(batch, list) else batch
    try:
        return loss_fn(output, given)
    except (TypeError, AttributeError) as error:
        if not isinstance(error, InputError):
            error.add_note(
                "raised by the loss function, which is called with the model's output and the whole batch: one that "
                "takes the targets alone needs a function around it, such as lambda output, batch: "
                "criterion(output, batch[1])"
            )
        raise


def _orders(loss: Tensor, targets: Tensor) -> list[Tensor]:
    """Where the targets may be in a loss with one value for each label: masks in the loss's shape.

    The dimensions of the labels come first in their own order, then in each other one that has the loss's shape too,
    but for dimensions of 1. Where none has it, as of a loss or labels in one row, any order may be meant. The list is
    empty where the loss is none of each label.
    """
    if loss.numel() != targets.numel():
        return []
    targets, sizes = targets.squeeze(), loss.squeeze().shape
    if targets.ndim <= 1 < len(sizes):
        # The labels are the row. They may follow the dimensions of the loss in any order.
        rows = (targets.reshape([sizes[i] for i in order]).permute(_inverse(order)) for order in _all_orders(sizes))
        return [mask.reshape(loss.shape) for mask in rows]
    moved = [targets.permute(order) for order in _all_orders(targets.shape)]
    return [mask.reshape(loss.shape) for mask in [mask for mask in moved if mask.shape == sizes] or moved]


def _all_orders(sizes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    return permutations(range(len(sizes)))


def _inverse(order: Sequence[int]) -> list[int]:
    return sorted(range(len(order)), key=order.__getitem__)


def _mean_over_samples(loss: Tensor, targets: Tensor, warn: Warn | None) -> MeanLoss:
    """The mean of one value for each sample, without labels of -100 if it is 0 at all of them.

    A loss that ignores them is. Any other one has taken -100 for a number to predict, as a regression on integers does.
    """
    values = loss.detach()
    predicted = ((values != 0) & values.isfinite() & ~targets).any()
    if warn is not None:
        warn(
            "labels of -100",
            f"the loss has one value for each sample, and is not 0 at a label of {IGNORE_INDEX}: so these are numbers "
            "to predict, and it is averaged over all samples; where they are no targets, return 0 for them, as "
            'cross_entropy(…, reduction="none") does, or a scalar',
            predicted,
        )
    counted = targets | predicted
    return MeanLoss(_mean(loss, counted), counted.sum())


def _mean(loss: Tensor, counted: Tensor, by: Tensor | None = None) -> Tensor:
    """The sum of the values of a loss that count, divided by the true ones of `by`; else by their own number."""
    return loss.masked_fill(~counted, 0.0).sum() / (counted if by is None else by).sum().clamp(min=1)


def _mean_over_targets(loss: Tensor, orders: list[Tensor], warn: Warn | None) -> Tensor:
    """The mean of one value for each label over the targets. `orders` are the masks that these may have.

    The shape does not tell (T, B) from (B, T) where T = B, nor in one row. The zeros that cross-entropy has at ignored
    labels do: where they lie in another order, the sum of all values is that of the targets. Nothing is read from the
    device for it.
    """
    targets, *others = orders
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
    return _mean(loss, counted, by=targets)


def by_name(output: Any) -> Any:
    """A named tuple that says which field is which, as a mapping; any other output as it is."""
    names = getattr(output, "_fields", ()) if isinstance(output, tuple) else ()
    return dict(zip(names, output, strict=True)) if {"loss", "logits", "predictions"} & {*names} else output


def _infer_loss(output: Any, batch: Any) -> Tensor:
    output = by_name(output)
    if isinstance(output, Tensor):
        _refuse_class_scores(output, batch)
        return output
    if isinstance(output, Mapping):
        loss, logits = output.get("loss"), output.get("logits")
        if isinstance(loss, Tensor):
            return loss
        if loss is not None:
            raise ModelError(f"the 'loss' of the model output is no tensor, but a {type(loss).__name__}; {_REMEDY}")
        if isinstance(logits, Tensor) and logits.ndim == 3:
            return _causal_loss(logits, batch)
        named = _labels_key(batch) if isinstance(batch, Mapping) else LABELS[0]
        renamed = "" if named == LABELS[0] else f"; a Hugging Face model computes it where {named!r} is named 'labels'"
        raise ModelError(
            f"cannot find a loss in a model output with the keys {sorted(map(str, output))}: it needs a 'loss' tensor, "
            f"or 'logits' of shape (batch, sequence, vocabulary); {_REMEDY}{renamed}"
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
    return _compared(causal_cross_entropy, logits, labels, logits.shape[-1])


def _refuse_class_scores(output: Tensor, batch: Any) -> None:
    """Refuse a bare (B, C) output with integer labels (B,): nobody wants the mean of the scores of classes.

    Where a mapping has no labels, one integer for each sample under any name counts as one.
    """
    if output.ndim != 2 or output.shape[1] < 2 or not output.is_floating_point():
        return
    labels = batch_labels(batch)
    columns = batch if isinstance(batch, Mapping) and labels is None else {"labels": labels}
    for name, labels in columns.items():
        if isinstance(labels, Tensor) and labels.shape == output.shape[:1] and not labels.is_floating_point():
            raise ModelError(
                f"the model returned a bare tensor of shape {tuple(output.shape)}, and the batch has one integer for "
                f"each of its rows ({name}): these are scores of classes and no loss; {_REMEDY}"
            )


def doubt_about(output: Any, batch: Any, warn: Warn) -> None:
    """Tell `warn` where a tensor that is no scalar may be wrongly taken for the loss, as `resolve_loss` does.

    One value per sample, and one per integer label, are what `reduction="none"` gives. Anything else may as well be
    what the model predicts, and so may a tensor in the shape of numbers of the batch. Losses below 0 beside labels
    are rare.
    """
    first = output[0] if isinstance(output := by_name(output), (tuple, list)) and output else output
    if not isinstance(first, Tensor) or first.ndim == 0 or (first.ndim > 1 and first is not output):
        return
    message = f"the model returned a tensor of shape {tuple(first.shape)}, which is averaged as the loss"
    remedy = f"if it holds logits or other predictions, {_REMEDY}"
    labels = batch_labels(batch)
    columns = batch.values() if isinstance(batch, Mapping) and labels is None else [labels]
    of_a_number = any(
        isinstance(column, Tensor)
        and (column.is_floating_point() or column.dtype is torch.bool)
        and column.numel() == first.numel()
        for column in columns
    )
    of_tokens = labels is not None and labels.ndim > 1 and labels.numel() == first.numel()
    if of_a_number or (first.ndim > 1 and not of_tokens):
        warn("loss", f"{message}; {remedy}")
    elif labels is not None:
        warn("loss", f"{message}, and has values below 0; {remedy}", (first.detach() < 0).any())


def doubt_labels(batch: Any, warn: Warn) -> None:
    """Tell `warn` where integers of -100 are in a field that is not taken for the labels, and perhaps holds them.

    That is one of a mapping without labels, or one of a tuple behind the first two.
    """
    if isinstance(batch, Mapping):
        fields = {} if batch_labels(batch) is not None else dict(batch)
    else:
        fields = dict(enumerate(batch[2:], start=2)) if isinstance(batch, (tuple, list)) else {}
    for name, value in fields.items():
        if isinstance(value, Tensor) and value.dtype in _SIGNED:
            warn(
                f"labels in {name}",
                f"the field {name} of a batch has integers of {IGNORE_INDEX}, and is not taken for its labels: an "
                f"evaluation does not weigh by it, and of a loss for each label all values count. The labels are a "
                f"mapping's {', '.join(LABELS)}, or the second field of a tuple: name this one 'labels' in a mapping",
                (value == IGNORE_INDEX).any(),
            )


class _Lent:
    """The loss function of a trainer, as an evaluator that has none of its own uses it."""

    def __init__(self, loss_fn: LossFunction) -> None:
        self._loss_fn = loss_fn

    def __call__(self, output: Any, batch: Any) -> Tensor:
        return self._loss_fn(output, batch)


def lend_loss(evaluator: Any, loss_fn: LossFunction | None) -> None:
    """Let an evaluator with a `loss_fn` that is None use this one, in place of one that another trainer lent it."""
    if hasattr(evaluator, "loss_fn") and (evaluator.loss_fn is None or isinstance(evaluator.loss_fn, _Lent)):
        evaluator.loss_fn = None if loss_fn is None else _Lent(loss_fn)


# ---------------------------------------------------------------------- losses by name


def loss_by_name(name: str | None) -> LossFunction | None:
    """The loss that `loss` in the configuration names: `cross_entropy`, `mse` or `package.module:function`.

    Raises:
        ConfigError: the function cannot be imported.
    """
    if name is None:
        return None
    if name == "cross_entropy":
        return _CrossEntropy()
    return _mean_squared_error if name == "mse" else import_factory(name, key="loss")


class _CrossEntropy:
    """Mean cross-entropy of logits (B, V) and labels (B,), (B, T, V) and (B, T) or (B, T - 1), (B, V, …) and (B, …).

    Labels of -100 are left out; if all are, the loss is a zero with a gradient graph. Floating labels in the shape of
    the logits are probabilities of the classes.

    Two of these can have the same sizes: logits (B, 6, 6) and labels (B, 6). Then the classes are the last dimension
    where the batch has ids of tokens (B, T), or else where they were in the batch before; without one it is an error.
    """

    def __init__(self) -> None:
        self._classes_last: bool | None = None

    def __call__(self, output: Any, batch: Any) -> Tensor:
        logits, labels = _prediction(output, "cross_entropy"), _needed_labels(batch, "cross_entropy")
        shapes = f"logits of shape {tuple(logits.shape)} with labels of shape {tuple(labels.shape)}"
        if labels.is_floating_point():
            if labels.shape != logits.shape or logits.ndim < 2:
                raise DataError(
                    f"loss: cross_entropy compares logits of shape {tuple(logits.shape)} with integer labels, or with "
                    f"probabilities of the same shape, not with {labels.dtype} of shape {tuple(labels.shape)}"
                )
            _refuse_one_class(logits, classes=logits.shape[1])
            wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
            return F.cross_entropy(wide, labels.to(wide.dtype))
        # The last dimension has the classes in a language model, the second one in torch's own function.
        last = logits.ndim == 3 and labels.shape in (logits.shape[:2], (logits.shape[0], logits.shape[1] - 1))
        second = logits.ndim >= 2 and labels.shape == (logits.shape[0], *logits.shape[2:])
        if last and second:
            if not has_ids(batch, logits) and self._classes_last is None:
                raise DataError(
                    f"loss: cross_entropy cannot tell which dimension has the classes, comparing {shapes}: (B, T, "
                    "classes) and (B, classes, T) fit; name a function of your own as package.module:function, such as "
                    "one that returns torch.nn.functional.cross_entropy(output, labels) for (B, classes, T)"
                )
            last = has_ids(batch, logits) or self._classes_last is True
        elif logits.ndim == 3 and (last or second):
            self._classes_last = last
        elif not second:
            raise DataError(
                f"loss: cross_entropy cannot compare {shapes}: it needs (B, classes) and (B,), (B, T, classes) and "
                "(B, T), or (B, classes, …) and (B, …)"
            )
        classes = logits.shape[-1 if last else 1]
        _refuse_one_class(logits, classes)
        return _compared(causal_cross_entropy if last else _mean_cross_entropy, logits, labels, classes)


def _mean_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    targets = labels.long()
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    total = F.cross_entropy(wide, targets, ignore_index=IGNORE_INDEX, reduction="sum")
    return total / (targets != IGNORE_INDEX).sum().clamp(min=1)


def has_ids(batch: Any, logits: Tensor) -> bool:
    """Whether the inputs of a batch are ids of tokens (B, T), one for each row of the logits (B, T, V)."""
    ids = batch.get("input_ids", batch.get("inputs")) if isinstance(batch, Mapping) else batch[0]
    return (
        isinstance(ids, Tensor)
        and ids.shape == logits.shape[:2]
        and not ids.is_floating_point()
        and ids.dtype is not torch.bool
    )


def _refuse_one_class(logits: Tensor, classes: int) -> None:
    if classes == 1:
        raise ModelError(
            f"loss: cross_entropy of one class is always 0, and the model returned {tuple(logits.shape)}: return a "
            "score for each of the two classes or more, or, for one score of yes or no, name a function of your own as "
            "package.module:function that returns torch.nn.functional.binary_cross_entropy_with_logits"
        )


def _compared(compare: Callable[[Tensor, Tensor], Tensor], logits: Tensor, labels: Tensor, classes: int) -> Tensor:
    """`compare(logits, labels)`, where a label that is no class is an error that says which.

    Only CPUs tell. Elsewhere the check would wait for the device, and torch's own assertion ends the process.
    """
    try:
        return compare(logits, labels)
    except IndexError:
        wrong = (labels != IGNORE_INDEX) & ((labels < 0) | (labels >= classes))
        if not wrong.any():
            raise
        place = tuple(wrong.nonzero()[0].tolist())
        raise DataError(
            f"the label {int(labels[place])} at {place} of a batch with labels of shape {tuple(labels.shape)} is none "
            f"of the {classes} classes of the logits, which are 0 to {classes - 1} ({int(wrong.sum())} such labels "
            f"there): let the model return a score for each class, or label what is no target {IGNORE_INDEX}"
        ) from None


def _mean_squared_error(output: Any, batch: Any) -> Tensor:
    """Mean of (prediction - label)² over all elements. The shapes are equal, but for dimensions of 1."""
    prediction, labels = _prediction(output, "mse"), _needed_labels(batch, "mse")
    if not labels.is_floating_point():
        raise DataError(
            f"loss: mse compares with floating labels, not {labels.dtype}: convert them in the dataset, or use "
            "cross_entropy for classes"
        )
    # (B, 1) and (B,) would broadcast to (B, B), every prediction against every label.
    if sizes_but_ones(prediction) != sizes_but_ones(labels):
        raise DataError(
            f"loss: mse cannot compare predictions of shape {tuple(prediction.shape)} with labels of shape "
            f"{tuple(labels.shape)}: they must be equal, but for dimensions of 1"
        )
    wide = torch.promote_types(prediction.dtype, torch.float32)
    return F.mse_loss(prediction.to(wide), labels.reshape(prediction.shape).to(wide))


def sizes_but_ones(tensor: Tensor) -> list[int]:
    """The shape of a tensor without its dimensions of 1."""
    return [size for size in tensor.shape if size != 1]


def _prediction(output: Any, name: str) -> Tensor:
    """What a model returned: a tensor, a mapping's `"logits"`, or the first field of a tuple or list."""
    found = output = by_name(output)
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
            f"loss: {name} compares with the labels of a batch, which are its {', '.join(LABELS)} or its second field, "
            f"and the batch {found}: name the column of the targets 'labels', or name a function of your own as "
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


def count_targets(batches: Sequence[Any]) -> list[int]:
    """`count_labels` of each batch.

    Where the labels are on the host, as the loader gives them, counting does not wait for the device.
    """
    counts: list[int] = torch.stack([count_labels(batch) for batch in batches]).tolist()
    return counts


def has_no_target(batch: Any) -> Tensor | None:
    """A 0-dim bool tensor: whether all labels of a batch are -100. None where it has no labels that can be."""
    labels = batch_labels(batch)
    if labels is None or labels.dtype not in _SIGNED or labels.numel() == 0:
        return None
    # Cheaper than counting, since this is asked of each micro batch. No label is smaller.
    return labels.amax() == IGNORE_INDEX


def align_labels(batch: Any) -> Any:
    """Turn labels that repeat the inputs (`data.labels: unshifted`) into next-token aligned ones.

    Position t gets the label of t + 1 and the last position none: (…, T) integers in, (…, T) int64 out.

    Raises:
        DataError: the labels are no integers, or no rows.
    """
    labels = batch_labels(batch)
    if labels is None:
        return batch
    if labels.is_floating_point():
        raise DataError(f"data.labels: unshifted is for ids of tokens, and the labels of the batch are {labels.dtype}")
    ids = as_tensor(batch.get("input_ids", batch.get("inputs")) if isinstance(batch, Mapping) else batch[0])
    if labels.ndim < 2 and (ids is None or ids.ndim != labels.ndim):
        raise DataError(
            f"data.labels: unshifted is for labels that repeat rows of ids of tokens, and those of the batch have the "
            f"shape {tuple(labels.shape)}, as one class for each sample has; set data.labels to aligned"
        )
    aligned = torch.full_like(labels, IGNORE_INDEX, dtype=torch.int64)
    aligned[..., :-1] = labels[..., 1:]
    if isinstance(batch, Mapping):
        return {**batch, _labels_key(batch): aligned}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(batch[0], aligned, *batch[2:])  # type: ignore[call-arg]  # a named tuple's fields
    return type(batch)([batch[0], aligned, *batch[2:]])
