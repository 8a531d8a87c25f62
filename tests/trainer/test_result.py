"""Metric records weigh like columns while a run lasts, and are a list of dicts afterwards."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
from typing import Any

import pytest

from speedtronic.trainer.result import MetricRecords, TrainResult, finite_or_none


def records(count: int = 3) -> MetricRecords:
    made = MetricRecords()
    for step in range(1, count + 1):
        made.append({"step": step, "loss": step / 2, "memory": None})
    return made


def result(metrics: Any) -> TrainResult:
    return TrainResult(steps=3, samples=3, tokens=0, final_loss=1.5, elapsed_s=0.1, metrics=metrics)


def test_the_metrics_of_a_result_are_a_list_of_dicts() -> None:
    """Seed: "metrics: list[dict[str, Any]]"."""
    made = result(records())
    plain = [{"step": step, "loss": step / 2, "memory": None} for step in (1, 2, 3)]
    assert type(made.metrics) is list
    assert type(made.metrics[0]) is dict
    assert json.loads(json.dumps(made.metrics)) == plain
    assert made.metrics + [{}] == [*plain, {}]
    assert dataclasses.asdict(made)["metrics"] == plain
    assert made == result(plain)


def test_what_is_done_to_the_metrics_of_a_result_stays() -> None:
    made = result(records(2))
    made.metrics[0]["loss"] = 9.0
    made.metrics.extend([{"step": 3}])
    assert [record["step"] for record in made.metrics] == [1, 2, 3]
    assert made.metrics[0]["loss"] == 9.0
    assert copy.deepcopy(made).metrics == pickle.loads(pickle.dumps(made)).metrics == made.metrics
    mine = [{"step": 1}]
    made.metrics = mine
    assert made.metrics is mine


def test_a_result_without_metrics_has_an_empty_list_of_its_own() -> None:
    first, second = (TrainResult(0, 0, 0, None, 0.0) for _ in range(2))
    first.metrics.append({"step": 1})
    assert second.metrics == []


def test_numbers_keep_their_type() -> None:
    record = next(iter(records()))
    assert type(record["step"]) is int
    assert type(record["loss"]) is float


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
