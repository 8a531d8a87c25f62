"""AdamW with a state of eight bits."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from speedtronic.config import SpeedtronicConfig
from speedtronic.errors import MissingExtraError
from speedtronic.optimizers import CautiousOptimizer
from speedtronic.registry import build_model
from speedtronic.runtime import build_optimizer, build_runtime, train_from_config
from tests.support.configs import tiny

pytestmark = pytest.mark.slow  # importing bitsandbytes takes seconds

# Wide enough for weights of more than 4,096 entries.
WIDE = {"vocab_size": 128, "n_head": 2, "d_model": 64}


def eight_bits(folder: Path, **optimizer: Any) -> dict[str, Any]:
    return tiny(folder, run={"max_steps": 6}, model=WIDE, optimizer={"name": "adamw8bit", "lr": 1e-2, **optimizer})


@pytest.fixture(autouse=True)
def _needs_bitsandbytes() -> None:
    pytest.importorskip("bitsandbytes")


def test_its_moments_of_large_weights_have_eight_bits_and_each_group_its_options(tmp_path: Path) -> None:
    groups = [{"match": "*.mlp.*", "lr": 1e-3, "weight_decay": 0.5, "betas": [0.8, 0.9]}]
    trainer, _ = build_runtime(eight_bits(tmp_path, groups=groups, weight_decay=0.2))
    trainer.fit(1)
    embedding = trainer.model.get_parameter("transformer.wte.weight")
    state = trainer.optimizer.state[embedding]
    assert state["state1"].dtype is state["state2"].dtype is torch.uint8
    found = {name: group for group in trainer.optimizer.param_groups for name in group["param_names"]}
    assert found["transformer.wte.weight"]["weight_decay"] == 0.2
    mlp = found["transformer.h.0.mlp.up_proj.weight"]
    assert (mlp["initial_lr"], mlp["weight_decay"], mlp["betas"]) == (1e-3, 0.5, (0.8, 0.9))


def test_its_first_steps_are_near_those_of_adamw(tmp_path: Path) -> None:
    weights = {}
    for name in ("adamw", "adamw8bit"):
        config = SpeedtronicConfig.from_dict(eight_bits(tmp_path, name=name))
        torch.manual_seed(0)
        model = build_model(config)
        start = model.get_parameter("transformer.wte.weight").detach().clone()
        optimizer = build_optimizer(model, config, "cpu")
        for step in range(5):
            torch.manual_seed(step)
            for parameter in model.parameters():
                parameter.grad = torch.randn_like(parameter)
            optimizer.step()
        weights[name] = model.get_parameter("transformer.wte.weight").detach() - start
    difference = (weights["adamw"] - weights["adamw8bit"]).norm() / weights["adamw"].norm()
    assert 0 < difference < 0.05


@pytest.mark.parametrize("options", [{}, {"cautious": True}, {"ema": 0.9}])
def test_it_resumes_bit_for_bit(options: dict[str, Any], tmp_path: Path) -> None:
    straight = train_from_config(eight_bits(tmp_path / "straight", **options))
    first = train_from_config(eight_bits(tmp_path / "parts", **options), max_steps=3)
    second = train_from_config(eight_bits(tmp_path / "parts", **options), resume=True)
    losses = [record["loss"] for record in straight.metrics]
    assert losses == [record["loss"] for record in (*first.metrics, *second.metrics)]
    for name in ("model.safetensors", "state.safetensors"):
        file = f"checkpoints/step_000000000006/{name}"
        assert (tmp_path / "straight" / file).read_bytes() == (tmp_path / "parts" / file).read_bytes()


def test_it_can_be_cautious_and_names_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = SpeedtronicConfig.from_dict(eight_bits(tmp_path, cautious=True))
    assert isinstance(build_optimizer(build_model(config), config, "cpu"), CautiousOptimizer)
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim", None)
    with pytest.raises(MissingExtraError, match=r"install speedtronic\[bitsandbytes\]"):
        build_optimizer(build_model(config), config, "cpu")
