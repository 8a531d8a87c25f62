from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from speedtronic.checkpoint import snapshot
from speedtronic.checkpoint.files import FileSystem
from speedtronic.checkpoint.snapshot import take_snapshot, write_snapshot
from speedtronic.errors import CheckpointError


def test_a_copy_is_independent_and_keeps_ties() -> None:
    weight = torch.zeros(3)
    taken = take_snapshot({"model": {"a": weight, "b": weight}, "ema": {"a": weight}}, copy=True)
    weight.fill_(1)
    assert taken.model is not None
    assert taken.model.aliases == {"b": "a"}
    assert taken.model.tensors["a"].sum() == 0
    assert taken.rest.tensors["ema.a"].sum() == 0


def test_without_a_copy_the_tensors_are_the_states_own() -> None:
    weight = torch.zeros(3)
    taken = take_snapshot({"model": {"a": weight}}, copy=False)
    assert taken.model is not None
    assert taken.model.tensors["a"].data_ptr() == weight.data_ptr()


def test_a_tree_too_large_to_be_loaded_again_is_refused_when_it_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot, "_LARGEST_TREE", 100)
    with pytest.raises(CheckpointError, match="keep large data in tensors"):
        write_snapshot(FileSystem(), tmp_path, take_snapshot({"text": "x" * 100}, copy=False))


@pytest.mark.parametrize("state", [None, [1], torch.zeros(1)])
def test_a_state_is_a_dict(state: Any) -> None:
    with pytest.raises(CheckpointError, match="state is a dict"):
        take_snapshot(state, copy=False)
