from __future__ import annotations

import collections
import json
import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from speedtronic.checkpoint.tree import check, decode, encode
from speedtronic.durable.tensor_file import DTYPE_NAMES
from speedtronic.errors import CheckpointError


def round_trip(tree: Any) -> Any:
    """Through text, as a checkpoint does it."""
    encoded = encode(tree)
    return decode(json.loads(json.dumps(encoded.tree, allow_nan=False)), encoded.tensors)


def equal(left: Any, right: Any) -> bool:
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        return list(left) == list(right) and all(equal(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(equal, left, right))
    if isinstance(left, torch.Tensor):
        return (
            left.dtype == right.dtype
            and left.shape == right.shape
            and torch.equal(left.nan_to_num() if left.is_floating_point() else left,
                            right.nan_to_num() if right.is_floating_point() else right)
        )  # fmt: skip
    if isinstance(left, np.ndarray):
        return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()
    if isinstance(left, float):
        return left == right and math.copysign(1, left) == math.copysign(1, right) or left != left and right != right
    return bool(left == right)


tensors = st.builds(
    lambda dtype, shape: torch.arange(math.prod(shape)).reshape(shape).to(dtype),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.complex64]),
    st.lists(st.integers(0, 3), max_size=3),
)
arrays = hnp.arrays(
    hnp.scalar_dtypes() | hnp.array_dtypes(), hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3)
)
leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | tensors | arrays
trees = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=5) | st.integers(), inner, max_size=3)
    ),
    max_leaves=10,
)


@settings(max_examples=60)
@given(trees)
def test_every_tree_comes_back_equal(tree: Any) -> None:
    assert equal(round_trip(tree), tree)


@pytest.mark.parametrize("dtype", [*DTYPE_NAMES, torch.complex64, torch.complex128])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3)])
def test_tensors_of_every_dtype_and_shape_come_back(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.ones(shape, dtype=torch.float32).to(dtype)
    back = round_trip({"x": tensor})["x"]
    assert (back.dtype, back.shape) == (dtype, shape)
    assert back.to(torch.complex128).equal(tensor.to(torch.complex128))


def test_views_parameters_and_conjugates_come_back_by_value() -> None:
    base = torch.arange(12.0).reshape(3, 4)
    turned = torch.tensor([1 + 2j, 3 - 4j]).conj()
    tree = {"t": base.t(), "row": base[1], "step": base[:, ::2], "turned": turned, "imag": turned.imag}
    back = round_trip({**tree, "parameter": torch.nn.Parameter(base)})
    assert all(torch.equal(back[name], tensor) for name, tensor in tree.items())
    assert torch.equal(back["parameter"], base)
    assert not back["parameter"].requires_grad


def test_the_same_memory_is_held_once_and_tied_again() -> None:
    weight = torch.randn(2, 3)
    tree = {"wte": weight, "head": weight.detach(), "turned": weight.t(), "copy": weight.clone()}
    encoded = encode(tree)
    assert sorted(encoded.tensors) == ["copy", "turned", "wte"]
    assert encoded.aliases == {"head": "wte"}
    back = decode(encoded.tree, encoded.tensors)
    assert back["head"] is back["wte"]
    assert back["copy"] is not back["wte"]


def test_empty_tensors_are_not_taken_for_each_other() -> None:
    back = round_trip({"a": torch.empty(0), "b": torch.empty(0, dtype=torch.int64), "c": torch.empty(0, 2)})
    assert [(item.dtype, tuple(item.shape)) for item in back.values()] == [
        (torch.float32, (0,)), (torch.int64, (0,)), (torch.float32, (0, 2))
    ]  # fmt: skip


def test_subclasses_of_plain_types_come_back_as_the_plain_ones() -> None:
    tree = {
        "ordered": collections.OrderedDict(a=1),
        "default": collections.defaultdict(int, {0: 1}),
        "size": torch.Size([2, 3]),
        "float64": np.float64(0.1),
    }
    back = round_trip(tree)
    assert back == tree
    assert [type(item) for item in back.values()] == [dict, dict, tuple, float]


def test_names_that_collide_or_are_reserved_stay_apart() -> None:
    tree = {"a": {"b": torch.tensor(1)}, "a.b": torch.tensor(2), "__metadata__": torch.tensor(3), "$x": 1}
    assert equal(round_trip(tree), tree)


def test_the_states_of_optimizers_and_generators_come_back_equal() -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    tree = {"optimizer": optimizer.state_dict(), "python": random.getstate(), "numpy": np.random.get_state()}
    assert equal(round_trip(tree), tree)


def test_structured_and_unicode_arrays_come_back() -> None:
    dtype = np.dtype([("id", "<i4"), ("pos", ">f8", (2,)), ("name", "U3")])
    array = np.zeros(3, dtype)
    array["name"] = ["a", "bc", "déf"]
    back = round_trip({"x": array, "times": np.array(["2030-01-01"], "M8[D]"), "fortran": np.ones((2, 3), order="F")})
    assert back["x"].dtype == dtype
    assert (back["x"] == array).all()
    assert back["times"][0] == np.datetime64("2030-01-01")
    back["x"]["id"] = 7


class Opaque:
    pass


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (Opaque(), "Opaque cannot be saved"),
        ({1, 2}, "a set cannot be saved"),
        (lambda: 0, "a function cannot be saved"),
        (np.float32(1), "numpy.float32 cannot be saved"),
        (np.array([object()]), "dtype object cannot be saved"),
        (np.array(["a"], np.dtypes.StringDType()), "StringDType.* cannot be saved"),
        (np.ma.masked_array([1], [True]), "MaskedArray cannot be saved"),
        (torch.ones(2).to_sparse(), "make it dense"),
        (torch.ones(2, device="meta"), "meta device"),
        ({(1, 2): 3}, "keys are strings or integers"),
        ({True: 1}, "keys are strings or integers"),
        ({1.5: 1}, "keys are strings or integers"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_anything_else_is_an_error_that_names_its_path(value: Any, reason: str) -> None:
    tree = {"optimizer": {"state": {0: [None, value]}}}
    with pytest.raises(CheckpointError, match=rf"^optimizer\.state\.0\.1: .*{reason}"):
        check(tree)


def test_a_tree_that_contains_itself_is_an_error() -> None:
    tree: list[Any] = []
    tree.append(tree)
    with pytest.raises(CheckpointError, match="contains itself"):
        check({"x": tree})


def test_checking_copies_no_tensor() -> None:
    tensor = torch.ones(4)
    assert encode({"x": tensor}).tensors["x"].data_ptr() == tensor.data_ptr()


@pytest.mark.parametrize(
    "encoded",
    [
        {"$unknown": 1},
        {"$tensor": "absent"},
        {"$tensor": ["x"]},
        {"$int": 5},
        {"$bytes": "?"},
        {"$float": "one"},
        {"$dict": [[1, 2, 3]]},
        {"$dict": [[[1], 2]]},
        {"$complex": "x"},
        {"$ndarray": ["x", "|O", [1]]},
        {"$ndarray": ["x", "<f4", [3]]},
        {"$ndarray": ["x", "<f4", [-1]]},
        {"$ndarray": ["x", "no such dtype", [1]]},
        {"$ndarray": ["x"]},
        {"$ndarray": ["float", "<f4", [2]]},
        {"$ndarray": ["x", "|S0", [10**11]]},
        {"$ndarray": ["x", "|u1", "4"]},
        {"$ndarray": ["x", "|u1", {"4": 4}]},
        {"$ndarray": ["x", "|u1", [True, 4]]},
        {"$ndarray": ["x", "|u1", [10**4000] * 2_000]},
        {"$float": 10**400},
        {"$tensor": {}},
    ],
    ids=lambda encoded: str(encoded)[:50],
)
def test_a_malformed_tree_is_a_checkpoint_error(encoded: Any) -> None:
    with pytest.raises(CheckpointError, match="malformed state tree"):
        decode(encoded, {"x": torch.zeros(4, dtype=torch.uint8), "float": torch.zeros(2)})


def test_an_array_that_is_named_often_takes_its_memory_once() -> None:
    held = torch.arange(8, dtype=torch.uint8)
    arrays = decode([{"$ndarray": ["x", "<i4", [2]]}] * 3, {"x": held})
    assert {array.ctypes.data for array in arrays} == {held.data_ptr()}


def test_arrays_of_items_without_bytes_come_back() -> None:
    for description in ("S0", "U0", "V0"):
        array = np.ndarray((2, 3), description)
        back = round_trip(array)
        assert (back.dtype, back.shape, back.nbytes) == (array.dtype, (2, 3), 0)
