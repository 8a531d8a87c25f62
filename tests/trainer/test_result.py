"""Metric records look like a list of dicts and weigh like columns."""

from __future__ import annotations

import pytest

from speedtronic.trainer.result import MetricRecords, finite_or_none


def records(count: int = 3) -> MetricRecords:
    made = MetricRecords()
    for step in range(1, count + 1):
        made.append({"step": step, "loss": step / 2, "memory": None})
    return made


def test_records_read_like_a_list_of_dicts() -> None:
    made = records()
    assert len(made) == 3
    assert made[0] == {"step": 1, "loss": 0.5, "memory": None}
    assert made[-1]["step"] == 3
    assert [record["loss"] for record in made] == [0.5, 1.0, 1.5]
    assert made[1:] == [made[1], made[2]]
    assert made == list(made)
    assert made != list(made)[:2]


def test_records_of_several_runs_are_joined_as_lists_are() -> None:
    first, second = records(2), records(1)
    assert first + second == [*first, *second]
    assert list(first) + second == [*first, *second]
    assert second + list(first) == [*second, *first]
    assert type(first + second) is list


def test_numbers_keep_their_type() -> None:
    record = records()[0]
    assert type(record["step"]) is int
    assert type(record["loss"]) is float


def test_a_record_outside_is_an_index_error() -> None:
    with pytest.raises(IndexError):
        records()[3]
    with pytest.raises(IndexError):
        MetricRecords()[0]


def test_a_value_may_turn_from_number_to_none_and_back() -> None:
    made = records(2)
    made.append({"step": 3, "loss": None, "memory": 7})
    made.append({"step": 4, "loss": 2.0, "memory": None})
    assert [record["loss"] for record in made] == [0.5, 1.0, None, 2.0]
    assert [record["memory"] for record in made] == [None, None, 7, None]


def test_a_record_with_other_keys_is_refused() -> None:
    with pytest.raises(ValueError, match="keys"):
        records().append({"step": 4})


def test_a_record_of_twelve_numbers_takes_under_150_bytes() -> None:
    made = MetricRecords()
    for step in range(1000):
        made.append({f"key{i}": float(step) if i else step for i in range(12)})
    size = sum(column.itemsize * len(column) for column in made._columns.values())  # type: ignore[union-attr]
    assert size / len(made) <= 150


def test_only_finite_numbers_count_as_a_loss() -> None:
    assert finite_or_none(1.5) == 1.5
    assert finite_or_none(float("nan")) is None
    assert finite_or_none(float("-inf")) is None
