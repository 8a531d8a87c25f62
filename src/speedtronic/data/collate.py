"""Samples to batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import default_collate

from speedtronic.errors import DataError

PADDING_ID = 0
IGNORED_LABEL = -100


def collate_batch(items: Sequence[Any]) -> Any:
    """One batch from samples of any kind.

    Mappings with `input_ids` go through `collate_causal`. Everything else (tuples, named tuples, tensors, numpy
    arrays, numbers, other mappings) is stacked field by field and must be equally wide.

    Raises:
        DataError: no samples, samples with different fields or of unequal shape, or of a type that has no batches.
    """
    if not items:
        raise DataError("cannot make a batch of no samples")
    if isinstance(items[0], Mapping):
        _check_fields(items)
        if "input_ids" in items[0]:
            return collate_causal(items)
    try:
        return default_collate(list(items))
    except (RuntimeError, TypeError) as error:
        raise DataError(
            f"the samples cannot be stacked into one batch: {error}; samples must have equal shapes, unless "
            f"they are mappings with `input_ids`, which are padded"
        ) from error


def collate_causal(items: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    """Pad token samples of different lengths to one batch, on the right.

    Args:
        items: mappings with `input_ids` (T_i,), usually `labels` (T_i,) or (T_i − 1,), optionally
            `attention_mask` (T_i,), as tensors or anything a tensor can be made of. Other fields are stacked
            as they are.

    Returns:
        `input_ids` (B, T) int64 padded with 0, `labels` (B, T) or (B, T − 1) int64 padded with −100, and only
        if a row is shorter than the batch or a sample brings a mask, `attention_mask` (B, T) bool, false at
        padding.

    Raises:
        DataError: no samples, samples with different fields, ids or labels that are no integers, or labels that
            do not fit their ids.
    """
    if not items:
        raise DataError("cannot make a batch of no samples")
    _check_fields(items)
    fields = items[0].keys()
    ids = [_integers("input_ids", item) for item in items]
    width = max(len(row) for row in ids)
    batch = {"input_ids": _pad(ids, width, PADDING_ID)}
    if "labels" in fields:
        labels = [_integers("labels", item) for item in items]
        batch["labels"] = _pad(labels, width - _label_shift(ids, labels), IGNORED_LABEL)
    if "attention_mask" in fields:
        masks = [_row(item["attention_mask"]).bool() for item in items]
        batch["attention_mask"] = _pad(masks, width, False)
    elif any(len(row) < width for row in ids):
        lengths = torch.tensor([len(row) for row in ids])
        batch["attention_mask"] = torch.arange(width) < lengths[:, None]
    for name in fields - {"input_ids", "labels", "attention_mask"}:
        batch[name] = collate_batch([item[name] for item in items])
    return batch


def _check_fields(items: Sequence[Mapping[str, Any]]) -> None:
    fields = items[0].keys()
    for item in items:
        if not isinstance(item, Mapping) or item.keys() != fields:
            theirs = f"the fields {', '.join(map(str, item))}" if isinstance(item, Mapping) else type(item).__name__
            raise DataError(f"the samples of a batch have different fields: {', '.join(map(str, fields))} and {theirs}")


def _integers(name: str, item: Mapping[str, Any]) -> Tensor:
    row = _row(item[name])
    # An empty list has no type of its own, and becomes a float tensor.
    if len(row) and (row.is_floating_point() or row.is_complex()):
        raise DataError(f"the {name} of a sample must be integers, not {row.dtype}")
    return row.long()


def _row(values: Any) -> Tensor:
    row = torch.as_tensor(values)
    if row.ndim != 1:
        raise DataError(f"a token sample must be one row of ids, not of shape {tuple(row.shape)}")
    return row


def _label_shift(ids: list[Tensor], labels: list[Tensor]) -> int:
    shifts = {len(row) - len(targets) for row, targets in zip(ids, labels, strict=True)}
    if shifts not in ({0}, {1}):
        raise DataError(
            "the labels of a sample must be as many as its input_ids, or in the whole batch one fewer; got "
            + ", ".join(f"{len(t)} labels for {len(row)} ids" for row, t in zip(ids, labels, strict=True))
        )
    return shifts.pop()


def _pad(rows: list[Tensor], width: int, filling: int) -> Tensor:
    batch = rows[0].new_full((len(rows), width), filling)
    for place, row in zip(batch, rows, strict=True):
        place[: len(row)] = row
    return batch
