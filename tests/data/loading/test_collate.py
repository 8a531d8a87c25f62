from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from speedtronic.data import collate_batch, collate_causal
from speedtronic.data.loading.collate import CollateForModel
from speedtronic.errors import DataError


def test_shorter_rows_are_padded_and_masked() -> None:
    batch = collate_causal([{"input_ids": [5, 6, 7], "labels": [6, 7, 8]}, {"input_ids": [9], "labels": [10]}])

    assert batch["input_ids"].tolist() == [[5, 6, 7], [9, 0, 0]]
    assert batch["labels"].tolist() == [[6, 7, 8], [10, -100, -100]]
    assert batch["attention_mask"].tolist() == [[True, True, True], [True, False, False]]
    assert batch["input_ids"].dtype == batch["labels"].dtype == torch.int64
    assert batch["attention_mask"].dtype == torch.bool


def test_rows_of_equal_length_need_no_mask() -> None:
    batch = collate_causal([{"input_ids": [1, 2], "labels": [2, 3]}] * 2)

    assert batch.keys() == {"input_ids", "labels"}


def test_labels_may_be_one_shorter_than_their_ids() -> None:
    batch = collate_causal([{"input_ids": [1, 2, 3], "labels": [2, 3]}, {"input_ids": [4, 5], "labels": [5]}])

    assert batch["labels"].tolist() == [[2, 3], [5, -100]]


def test_labels_may_be_absent() -> None:
    assert collate_causal([{"input_ids": [1]}, {"input_ids": [2]}]).keys() == {"input_ids"}


def test_masks_that_samples_bring_are_padded() -> None:
    batch = collate_causal(
        [
            {"input_ids": [1, 2], "attention_mask": [False, True]},
            {"input_ids": [3], "attention_mask": [True]},
        ]
    )

    assert batch["attention_mask"].tolist() == [[False, True], [True, False]]


def test_other_fields_are_stacked() -> None:
    batch = collate_causal([{"input_ids": [1], "weight": 0.5}, {"input_ids": [2], "weight": 2.0}])

    assert batch["weight"].tolist() == [0.5, 2.0]


@pytest.mark.parametrize("make", [list, np.array, torch.tensor])
@pytest.mark.parametrize("field", ["input_ids", "labels"])
def test_ids_and_labels_that_are_not_integers_are_refused(make: Any, field: str) -> None:
    sample = {"input_ids": make([1, 2]), "labels": make([2, 3]), field: make([0.5, 1.0])}

    with pytest.raises(DataError, match=rf"the {field} of a sample must be integers, not torch\.float(32|64)"):
        collate_batch([sample])


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int32])
def test_integers_of_any_width_become_int64(dtype: Any) -> None:
    batch = collate_causal([{"input_ids": np.array([1, 2], dtype)}, {"input_ids": []}])

    assert batch["input_ids"].tolist() == [[1, 2], [0, 0]]
    assert batch["input_ids"].dtype == torch.int64


@pytest.mark.parametrize("make", [list, np.array, torch.tensor])
def test_rows_may_be_lists_arrays_or_tensors(make: Any) -> None:
    batch = collate_batch([{"input_ids": make([1, 2]), "labels": make([2, 3])}] * 2)

    assert batch["input_ids"].tolist() == [[1, 2], [1, 2]]


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ([], "no samples"),
        ([{"input_ids": [1]}, {"input_ids": [1], "labels": [1]}], "different fields"),
        ([{"input_ids": [1, 2], "labels": [1, 2, 3]}], "3 labels for 2 ids"),
        (
            [{"input_ids": [1, 2], "labels": [1, 2]}, {"input_ids": [1, 2], "labels": [1]}],
            "1 labels for 2 ids",
        ),
        ([{"input_ids": [[1, 2]]}], r"one row of ids, not of shape \(1, 2\)"),
    ],
)
def test_samples_that_make_no_batch_are_refused(items: list[Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        collate_causal(items)


def test_arrays_may_be_read_only_run_backwards_and_have_their_bytes_reversed() -> None:
    for row in (np.broadcast_to(np.int64(1), 3), np.ones(6, np.int64)[::-2], np.ones(3, ">i4")):
        batch = collate_batch([{"input_ids": row, "labels": row, "weight": row}] * 2)

        assert [field.tolist() for field in batch.values()] == [[[1, 1, 1], [1, 1, 1]]] * 3


def pair(ids: Any, labels: Any) -> Any:
    return [(torch.tensor(ids), torch.tensor(labels))]


def mapping(ids: Any, labels: Any) -> Any:
    return [{"input_ids": ids, "labels": labels}]


@pytest.mark.parametrize("make", [pair, mapping])
def test_ids_and_rows_that_a_model_cannot_take_are_refused(make: Any) -> None:
    collate = CollateForModel(vocab_size=5, max_seq_len=3)

    collate(make([0, 4, 1], [4, -100, 0]))
    collate([{"input_ids": [0, 4]}])  # without labels
    with pytest.raises(DataError, match="the input_ids of a sample have the id 5, but .* 0 to 4: set model.vocab_size"):
        collate(make([0, 5], [0, 0]))
    with pytest.raises(DataError, match="the input_ids of a sample have the id -1"):
        collate(make([0, -1], [0, 0]))
    with pytest.raises(DataError, match="the labels of a sample have the id -1"):
        collate(make([0, 0], [-100, -1]))
    with pytest.raises(DataError, match=r"a sample has 4 tokens, more than the 3 of model\.max_seq_len"):
        collate(make([0] * 4, [0] * 4))


@pytest.mark.parametrize("items", [[(torch.ones(3), 9)], [(torch.ones(1, 3), torch.ones(9))], [9, 10], [{"x": 9}]])
def test_batches_without_rows_of_ids_are_not_checked(items: list[Any]) -> None:
    CollateForModel(vocab_size=5, max_seq_len=1)(items)


def test_tuples_of_equal_width_are_stacked_field_by_field() -> None:
    inputs, targets = collate_batch([(torch.ones(3), 1), (torch.zeros(3), 0)])

    assert inputs.tolist() == [[1, 1, 1], [0, 0, 0]]
    assert targets.tolist() == [1, 0]


def test_tensors_arrays_and_numbers_are_stacked() -> None:
    assert collate_batch([torch.tensor([1, 2]), torch.tensor([3, 4])]).tolist() == [[1, 2], [3, 4]]
    assert collate_batch([np.array([1.5]), np.array([2.5])]).tolist() == [[1.5], [2.5]]
    assert collate_batch([1, 2]).tolist() == [1, 2]


class Pair(NamedTuple):
    x: torch.Tensor
    y: float


def test_named_tuples_stay_named() -> None:
    batch = collate_batch([Pair(torch.ones(2), 1.0), Pair(torch.zeros(2), 2.0)])

    assert isinstance(batch, Pair)
    assert batch.x.tolist() == [[1, 1], [0, 0]]
    assert batch.y.tolist() == [1.0, 2.0]


def test_samples_may_be_nested() -> None:
    batch = collate_batch([{"image": (np.zeros(2), 1), "name": "a"}, {"image": (np.ones(2), 2), "name": "b"}])

    assert [field.tolist() for field in batch["image"]] == [[[0, 0], [1, 1]], [1, 2]]
    assert batch["name"] == ["a", "b"]


@pytest.mark.parametrize("dtype", [np.bool_, np.uint8, np.int32, np.int64, np.float16, np.float32, np.float64])
def test_arrays_and_their_numbers_keep_their_type(dtype: Any) -> None:
    expected = torch.from_numpy(np.zeros(1, dtype)).dtype

    assert collate_batch([np.zeros(2, dtype), np.ones(2, dtype)]).dtype == expected
    assert collate_batch([dtype(0), dtype(1)]).dtype == expected


def test_lists_of_numbers_in_a_field_are_rows_as_they_are_beside_ids() -> None:
    """torch turns them around: a list of one tensor for each position."""
    batch = collate_batch(
        [{"x": [1.0, 2.0, 3.0], "grid": [[1, 2]], "y": 0}, {"x": [4, 5, 6], "grid": [[3, 4]], "y": 1}]
    )

    assert batch["x"].tolist() == [[1, 2, 3], [4, 5, 6]]
    assert batch["x"].dtype == torch.float32
    assert batch["grid"].tolist() == [[[1, 2]], [[3, 4]]]
    assert batch["y"].tolist() == [0, 1]
    pair = collate_batch([([1.0, 2.0], 0), ([3.0, 4.0], 1)])
    assert [field.tolist() for field in pair] == [[[1, 2], [3, 4]], [0, 1]]
    beside_ids = collate_batch([{"input_ids": [5], "kinds": [0, 1]}, {"input_ids": [6, 7], "kinds": [1, 1]}])
    assert beside_ids["kinds"].tolist() == [[0, 1], [1, 1]]
    with pytest.raises(DataError, match="must have equal shapes"):
        collate_batch([{"x": [1.0]}, {"x": [1.0, 2.0]}])


def test_mappings_without_ids_are_stacked_field_by_field() -> None:
    assert collate_batch([{"x": 1.0, "y": 0}, {"x": 2.0, "y": 1}])["y"].tolist() == [0, 1]


@dataclass
class Sample:
    x: float


@pytest.mark.parametrize("items", [[], [torch.ones(2), torch.ones(3)], [object()], [Sample(1.0)], [[1], [1, 2]]])
def test_samples_that_cannot_be_stacked_are_refused(items: list[Any]) -> None:
    with pytest.raises(DataError, match=r"no samples|cannot be stacked"):
        collate_batch(items)


def test_samples_of_different_types_are_refused() -> None:
    with pytest.raises(DataError, match="the samples of a batch are of different types: dict, tuple"):
        collate_batch([(1, 2), {"input_ids": [1]}])


@pytest.mark.parametrize("other", [{"x": 2.0}, {"x": 2.0, "y": 1, "z": 3}, 2.0])
def test_mappings_with_different_fields_are_refused(other: Any) -> None:
    with pytest.raises(DataError, match="different fields: x, y and (the fields x|float)"):
        collate_batch([{"x": 1.0, "y": 0}, other])


@pytest.mark.parametrize("make", [int, float, np.int64, torch.tensor])
def test_labels_that_are_one_number_for_a_sample_are_stacked_beside_padded_ids(make: Any) -> None:
    batch = collate_batch([{"input_ids": [5, 6], "labels": make(2)}, {"input_ids": [9], "labels": make(0)}])

    assert batch["input_ids"].tolist() == [[5, 6], [9, 0]]
    assert batch["labels"].tolist() == [2, 0]
    assert batch["attention_mask"].tolist() == [[True, True], [True, False]]
