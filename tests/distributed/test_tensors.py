from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from speedtronic.distributed.schema import snapshot
from speedtronic.distributed.tensors import (
    cpu_state_dict,
    load_safetensors,
    save_safetensors,
)
from tests.support.exchanged import Compiled, assert_equal, everything


def test_a_state_is_copied_to_the_cpu_in_its_own_dtypes() -> None:
    model = everything().half()

    state = cpu_state_dict(Compiled(model))

    assert_equal(state, dict(model.state_dict()))
    assert not {tensor.data_ptr() for tensor in state.values() if tensor.numel()} & {
        tensor.data_ptr() for tensor in model.state_dict().values() if tensor.numel()
    }
    assert_equal(cpu_state_dict({"a": torch.ones(2, 3).t(), "step": 3}), {"a": torch.ones(3, 2)})


class TestFiles:
    def test_a_state_with_tied_weights_comes_back_whole(self, tmp_path: Path) -> None:
        state = everything().state_dict()

        save_safetensors(state, tmp_path / "w.safetensors", {"step": "3"})
        found = load_safetensors(str(tmp_path / "w.safetensors"))

        assert_equal(found, dict(state))
        assert found["tied.weight"].data_ptr() != found["first.weight"].data_ptr()

    def test_the_model_takes_what_was_saved(self, tmp_path: Path) -> None:
        model, other = everything(0), everything(1)

        save_safetensors(cpu_state_dict(model), tmp_path / "w.safetensors")
        other.load_state_dict(load_safetensors(tmp_path / "w.safetensors"))

        assert_equal(snapshot(other), snapshot(model))

    def test_a_failed_write_leaves_the_file_that_was_there(self, tmp_path: Path) -> None:
        path = tmp_path / "w.safetensors"
        save_safetensors({"a": torch.ones(1)}, path)

        with pytest.raises(ValueError, match="odd"):
            save_safetensors({"odd": torch.eye(2).to_sparse()}, path)

        assert_equal(load_safetensors(path), {"a": torch.ones(1)})
        assert list(tmp_path.iterdir()) == [path]


def test_a_tensor_is_exact_through_any_round(tmp_path: Path) -> None:
    values: Tensor = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, 1e-45, 3.4e38])

    save_safetensors({"a": values}, tmp_path / "a.safetensors")

    assert torch.equal(load_safetensors(tmp_path / "a.safetensors")["a"].view(torch.int32), values.view(torch.int32))
