from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from speedtronic.checkpoint import snapshot
from speedtronic.checkpoint.manifest import Manifest
from speedtronic.checkpoint.snapshot import SnapshotBuffers, read_state, stored_average, take_snapshot, write_snapshot
from speedtronic.durable.files import FileSystem, write_file
from speedtronic.errors import CheckpointError


def contents(chunks: Iterable[bytes | memoryview]) -> dict[str, torch.Tensor]:
    return safetensors.torch.load(b"".join(bytes(chunk) for chunk in chunks))


def test_a_copy_is_independent_and_keeps_ties() -> None:
    weight = torch.zeros(3)
    taken = take_snapshot({"model": {"a": weight, "b": weight}, "ema": {"a": weight}}, SnapshotBuffers())
    weight.fill_(1)
    model, rest = b"".join(map(bytes, taken.model)), contents(taken.rest)
    assert safetensors.torch.load(model)["a"].sum() == 0
    assert b'"b":"a"' in model
    assert rest["ema.a"].sum() == 0


def test_without_buffers_the_tensors_are_read_when_they_are_written() -> None:
    weight = torch.zeros(3)
    taken = take_snapshot({"model": {"a": weight}})
    weight.fill_(1)
    assert contents(taken.model)["a"].sum() == 3


def test_the_trees_are_independent_of_the_state() -> None:
    state: dict[str, Any] = {"groups": [{"lr": 0.1}], "order": [1, 2]}
    taken = take_snapshot(state, SnapshotBuffers())
    state["groups"][0]["lr"] = 0.2
    state["order"].append(3)
    assert taken.trees == {"state": {"groups": [{"lr": 0.1}], "order": [1, 2]}}


def test_buffers_are_used_again() -> None:
    buffers = SnapshotBuffers()
    for value in (1.0, 2.0):
        taken = take_snapshot({"model": {"a": torch.full((3,), value)}, "b": torch.full((2,), value)}, buffers)
        assert contents(taken.model)["a"].tolist() == [value] * 3
        assert contents(taken.rest)["b"].tolist() == [value] * 2


@pytest.mark.parametrize(
    ("metrics", "losses"),
    [
        ({"loss": 2.5, "eval_loss": 3}, (2.5, 3.0)),
        ({"loss": float("nan"), "eval_loss": float("inf")}, (None, None)),
        ({"loss": None}, (None, None)),
        ({"loss": "low"}, (None, None)),
        (None, (None, None)),
    ],
)
def test_finite_losses_are_taken_from_the_metrics(metrics: Any, losses: tuple[float | None, float | None]) -> None:
    taken = take_snapshot({"metrics": metrics})
    assert (taken.loss, taken.eval_loss) == losses


def test_a_tree_too_large_to_be_loaded_again_is_refused_when_it_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot, "_LARGEST_TREE", 100)
    with pytest.raises(CheckpointError, match="keep large data in tensors"):
        write_snapshot(FileSystem(), tmp_path, take_snapshot({"text": "x" * 100}))


@pytest.mark.parametrize("state", [None, [1], torch.zeros(1)])
def test_a_state_is_a_dict(state: Any) -> None:
    with pytest.raises(CheckpointError, match="state is a dict"):
        take_snapshot(state)


# --- reading what somebody else wrote, under a manifest that is right about it ---


def written(folder: Path, trees: Any) -> Manifest:
    """A checkpoint whose tree is `trees`, and that has one float tensor `t` and one of bytes `b`."""
    fs = FileSystem()
    taken = take_snapshot({"t": torch.zeros(3), "b": torch.zeros(3, dtype=torch.uint8)})
    files = write_snapshot(fs, folder, taken)
    (folder / "state.json").unlink()
    files["state.json"] = write_file(fs, folder / "state.json", [json.dumps(trees).encode("ascii")])
    return Manifest(
        step=1,
        sequence=1,
        run_id="0123456789abcdef",
        time="2030-01-01T00:00:00+00:00",
        loss=None,
        eval_loss=None,
        config_sha256=None,
        versions={},
        files=files,
    )


@pytest.mark.parametrize(
    "trees",
    [
        [],
        5,
        "state",
        {},
        {"model": {}},
        {"state": []},
        {"state": None},
        {"state": {"$tensor": "t"}, "model": {}},
        {"state": {"$ndarray": ["b", "|u1", [3]]}, "model": {}},
        {"state": {"$tuple": []}, "model": {}},
        {"state": {}, "model": {"$tensor": "t"}},
        {"state": {"$dict": [[{"$dict": []}, 1]]}},
    ],
    ids=str,
)
def test_a_tree_that_is_no_state_is_an_error_that_names_the_file(tmp_path: Path, trees: Any) -> None:
    manifest = written(tmp_path, trees)
    with pytest.raises(CheckpointError, match=r"state\.json"):
        read_state(FileSystem(), tmp_path, manifest)


def test_a_state_whose_keys_are_numbers_is_a_state(tmp_path: Path) -> None:
    manifest = written(tmp_path, {"state": {"$dict": [[1, 2]]}, "model": {"w": 1}})
    assert read_state(FileSystem(), tmp_path, manifest) == {1: 2, "model": {"w": 1}}


# --- the averaged weights, without reading the rest ---


def trees_of(folder: Path) -> Any:
    return json.loads((folder / "state.json").read_bytes())


def test_the_average_is_found_where_its_bytes_are(tmp_path: Path) -> None:
    weight = torch.arange(3.0)
    write_snapshot(FileSystem(), tmp_path, take_snapshot({"other": torch.zeros(5), "ema": {"a": weight, "b": weight}}))
    found = stored_average(tmp_path, trees_of(tmp_path))
    assert found.keys() == {"a", "b"}
    assert found["a"] == found["b"]
    data = found["a"].file.read_bytes()[found["a"].begin :]
    assert torch.frombuffer(bytearray(data), dtype=torch.float32, count=3).tolist() == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("state", [{}, {"ema": None}, {1: 2}])
def test_a_state_without_an_average_has_none(tmp_path: Path, state: dict[Any, Any]) -> None:
    write_snapshot(FileSystem(), tmp_path, take_snapshot(state))
    assert stored_average(tmp_path, trees_of(tmp_path)) == {}


@pytest.mark.parametrize(
    "average", [5, [], {"$tensor": "t"}, {"a": 5}, {"a": {"$tensor": ["t"]}}, {"a": {"$complex": "t"}}], ids=str
)
def test_an_average_that_is_not_tensors_is_an_error_that_names_the_file(tmp_path: Path, average: Any) -> None:
    written(tmp_path, {"state": {"ema": average}})
    with pytest.raises(CheckpointError, match=r"state\.json: the averaged weights .* are not all plain tensors"):
        stored_average(tmp_path, trees_of(tmp_path))


def test_an_average_that_is_not_there_is_an_error_that_names_it(tmp_path: Path) -> None:
    written(tmp_path, {"state": {"ema": {"a": {"$tensor": "absent"}}}})
    with pytest.raises(CheckpointError, match=r"state\.safetensors lacks the averaged weight 'absent'"):
        stored_average(tmp_path, trees_of(tmp_path))
