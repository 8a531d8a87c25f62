from __future__ import annotations

import enum
from pathlib import Path

import numpy as np
import torch

from speedtronic.metrics.records import plain_payload


class Colour(enum.Enum):
    RED = 1


class Size(enum.IntEnum):
    BIG = 7


def test_scalars_of_tensors_and_arrays_become_numbers() -> None:
    plain = plain_payload(
        {
            "tensor": torch.tensor(2.5),
            "count": torch.tensor(3),
            "bf16": torch.tensor(0.5, dtype=torch.bfloat16),
            "np32": np.float32(0.25),
            "np64": np.float64(0.125),
            "int64": np.int64(9),
            "flag": np.bool_(True),
        }
    )
    assert plain == {
        "tensor": 2.5, "count": 3, "bf16": 0.5, "np32": 0.25, "np64": 0.125, "int64": 9, "flag": True
    }  # fmt: skip
    assert {type(value) for value in plain.values()} == {float, int, bool}


def test_containers_are_lists_and_dicts_with_string_keys() -> None:
    plain = plain_payload({"nested": {1: (1, [Path("a")])}, "set": {2}})
    assert plain == {"nested": {"1": [1, ["a"]]}, "set": [2]}


def test_any_other_object_becomes_its_text() -> None:
    plain = plain_payload({"path": Path("a/b"), "device": torch.device("cpu"), "enum": Colour.RED, "size": Size.BIG})
    assert plain == {"path": "a/b", "device": "cpu", "enum": "Colour.RED", "size": 7}


def test_a_scalar_with_item_that_returns_itself_is_text() -> None:
    assert plain_payload({"x": np.longdouble(1.5)}) == {"x": "1.5"}


class Unprintable:
    def __str__(self) -> str:
        raise RuntimeError("no words")


def test_values_that_json_cannot_hold_become_text() -> None:
    own: dict[str, object] = {"a": 1}
    own["self"] = [own]
    deep: list[object] = []
    for _ in range(5000):
        deep = [deep]
    shared = [1]
    plain = plain_payload(
        {
            "huge": 10**5000,
            "own": own,
            "deep": deep,
            "meta": torch.empty((), device="meta"),
            "foreign": Unprintable(),
            "twice": [shared, shared],
        }
    )
    assert plain["huge"] == hex(10**5000)
    assert plain["own"] == {"a": 1, "self": ["..."]}
    assert str(plain["deep"]) == "[" * 32 + "'...'" + "]" * 32
    assert "meta" in plain["meta"]
    assert plain["foreign"] == "<Unprintable: RuntimeError>"
    assert plain["twice"] == [[1], [1]]
