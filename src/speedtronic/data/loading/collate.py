"""Samples to batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Number
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from speedtronic.errors import DataError

PADDING_ID = 0
IGNORED_LABEL = -100


def collate_batch(items: Sequence[Any]) -> Any:
    """One batch from samples of any kind.

    Mappings with `input_ids` go through `collate_causal`. Everything else (tuples, named tuples, tensors, numpy
    arrays, numbers, other mappings) is stacked field by field and must be equally wide. A list of numbers in a field,
    as Hugging Face's datasets have it, is a row.

    Raises:
        DataError: no samples, samples with different fields or of unequal shape, or of a type that cannot be batched.
    """
    if not items:
        raise DataError("cannot make a batch of no samples")
    if isinstance(items[0], Mapping):
        _check_fields(items)
        if "input_ids" in items[0]:
            return collate_causal(items)
    elif any(isinstance(item, Mapping) for item in items):
        kinds = ", ".join(sorted({type(item).__name__ for item in items}))
        raise DataError(f"the samples of a batch are of different types: {kinds}")
    return _stacked([_with_rows(item) for item in items])


def _stacked(items: list[Any]) -> Any:
    try:
        return default_collate(items)
    except (RuntimeError, TypeError, ValueError) as error:
        raise DataError(
            f"the samples cannot be stacked into one batch: {error}; samples must have equal shapes (only mappings "
            f"with `input_ids` are padded)"
        ) from error


def collate_causal(items: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    """Pad token samples of different lengths to one batch, on the right.

    Args:
        items: mappings with `input_ids` (T_i,), usually `labels` (T_i,) or (T_i − 1,), optionally
            `attention_mask` (T_i,), as tensors or anything a tensor can be made of. Other fields are stacked
            as they are; so are `labels` that are one number for a sample, as of a class.

    Returns:
        `input_ids` (B, T) int64 padded with 0, and `labels` (B, T) or (B, T − 1) int64 padded with −100. Also
        `attention_mask` (B, T) bool, false at padding, if a row is shorter than the batch or a sample has a mask.

    Raises:
        DataError: no samples, samples with different fields, ids or labels that are not integers, or labels that
            do not fit their ids.
    """
    if not items:
        raise DataError("cannot make a batch of no samples")
    _check_fields(items)
    fields = items[0].keys()
    # The ids set the width of the batch.
    ids = [_integers("input_ids", item) for item in items]
    width = max(len(row) for row in ids)
    batch = {"input_ids": _pad(ids, width, PADDING_ID)}
    padded = {"input_ids", "attention_mask"}
    if "labels" in fields and torch.as_tensor(_copied(items[0]["labels"])).ndim:
        padded.add("labels")
        labels = [_integers("labels", item) for item in items]
        # Labels are as many as the ids, or one fewer in every sample.
        shifts = {len(row) - len(targets) for row, targets in zip(ids, labels, strict=True)}
        if shifts not in ({0}, {1}):
            raise DataError(
                "the labels of a sample must be as many as its input_ids, or in the whole batch one fewer; got "
                + ", ".join(f"{len(t)} labels for {len(row)} ids" for row, t in zip(ids, labels, strict=True))
            )
        batch["labels"] = _pad(labels, width - shifts.pop(), IGNORED_LABEL)
    # Without masks of the samples, the padding alone needs one.
    if "attention_mask" in fields:
        masks = [_row(item["attention_mask"]).bool() for item in items]
        batch["attention_mask"] = _pad(masks, width, False)
    elif any(len(row) < width for row in ids):
        lengths = torch.tensor([len(row) for row in ids])
        batch["attention_mask"] = torch.arange(width) < lengths[:, None]
    # All other fields are stacked as they are.
    for name in fields - padded:
        batch[name] = _stacked([_with_rows(item[name], is_field=True) for item in items])
    return batch


def _check_fields(items: Sequence[Mapping[str, Any]]) -> None:
    fields = items[0].keys()
    for item in items:
        if not isinstance(item, Mapping) or item.keys() != fields:
            theirs = f"the fields {', '.join(map(str, item))}" if isinstance(item, Mapping) else type(item).__name__
            raise DataError(f"the samples of a batch have different fields: {', '.join(map(str, fields))} and {theirs}")


def _integers(name: str, item: Mapping[str, Any]) -> Tensor:
    row = _row(item[name])
    # An empty list has no dtype and becomes a float tensor.
    if len(row) and (row.is_floating_point() or row.is_complex()):
        raise DataError(f"the {name} of a sample must be integers, not {row.dtype}")
    return row.long()


def _row(values: Any) -> Tensor:
    row = torch.as_tensor(_copied(values))
    if row.ndim != 1:
        raise DataError(f"a token sample must be one row of ids, not of shape {tuple(row.shape)}")
    return row


def _with_rows(value: Any, *, is_field: bool = False) -> Any:
    """A sample, or a field of one, in which lists of numbers are tensors: torch would stack them turned around."""
    if isinstance(value, Mapping):
        return {key: _with_rows(field, is_field=True) for key, field in value.items()}
    if is_field and isinstance(value, list) and _holds_numbers(value):
        return torch.tensor(value)
    if isinstance(value, (tuple, list)):
        fields = [_with_rows(field, is_field=True) for field in value]
        return type(value)(*fields) if hasattr(value, "_fields") else type(value)(fields)
    return _copied(value)


def _holds_numbers(values: list[Any]) -> bool:
    return all(_holds_numbers(value) if isinstance(value, list) else isinstance(value, Number) for value in values)


def _copied(value: Any) -> Any:
    """A copy of an array, which torch can use: the array may be read-only, reversed, or in another byte order."""
    return value.astype(value.dtype.newbyteorder("=")) if isinstance(value, np.ndarray) else value


@dataclass(frozen=True)
class CollateForModel:
    """`collate_batch` for a language model, with a check of ids and lengths.

    On an accelerator a model fails on a wrong id without a helpful message. Checked are the `input_ids` and `labels`
    of a mapping, and the two members of a pair, where they are rows of integers.

    Attributes:
        vocab_size: V; ids must be in [0, V), labels too or −100.
        max_seq_len: the most tokens in a row.

    Raises:
        DataError: when called, as `collate_batch`, and for ids or rows that the model cannot take.
    """

    vocab_size: int
    max_seq_len: int

    def __call__(self, items: Sequence[Any]) -> Any:
        batch = collate_batch(items)
        match batch:
            case {"input_ids": ids}:
                self._check(ids, batch.get("labels"))
            case [ids, labels]:
                self._check(ids, labels)
        return batch

    def _check(self, ids: Any, labels: Any) -> None:
        if not _is_rows(ids):
            return
        if ids.size(1) > self.max_seq_len:
            raise DataError(f"a sample has {ids.size(1)} tokens, more than the {self.max_seq_len} of model.max_seq_len")
        self._check_ids("input_ids", ids)
        if _is_rows(labels):
            self._check_ids("labels", labels[labels != IGNORED_LABEL])

    def _check_ids(self, name: str, ids: Tensor) -> None:
        for wrong in ids[(ids < 0) | (ids >= self.vocab_size)][:1].tolist():
            raise DataError(
                f"the {name} of a sample have the id {wrong}, but the vocabulary of the model has the ids 0 to "
                f"{self.vocab_size - 1}: set model.vocab_size to hold all of the data's"
            )


def _is_rows(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim == 2 and not value.is_floating_point() and value.dtype != torch.bool


def _pad(rows: list[Tensor], width: int, filling: int) -> Tensor:
    batch = rows[0].new_full((len(rows), width), filling)
    for place, row in zip(batch, rows, strict=True):
        place[: len(row)] = row
    return batch
