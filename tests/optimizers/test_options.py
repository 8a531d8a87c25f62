"""Options by the name of a parameter and by its depth: who gets them, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from speedtronic.config import SpeedtronicConfig
from speedtronic.errors import ConfigError
from speedtronic.optimizers.without_dynamo import AdamW
from speedtronic.registry import build_model
from speedtronic.runtime import build_optimizer
from tests.support.configs import tiny

DEEP: dict[str, Any] = {"model": {"n_layer": 3, "tie_weights": False}}


def built(optimizer: dict[str, Any], **sections: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    config = SpeedtronicConfig.from_dict(tiny("unused", optimizer={"lr": 0.1, **optimizer}, **{**DEEP, **sections}))
    torch.manual_seed(0)
    model = build_model(config)
    return model, build_optimizer(model, config, "cpu")


def by_name(optimizer: torch.optim.Optimizer, key: str) -> dict[str, Any]:
    return {name: group[key] for group in optimizer.param_groups for name in group["param_names"]}


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_the_first_pattern_that_matches_a_whole_name_gives_its_options(name: str) -> None:
    groups = [
        {"match": "lm_head.*", "lr": 0.5, "weight_decay": 0.3, "betas": [0.8, 0.9], "eps": 1e-4},
        {"match": "transformer.h.[01].*", "lr": 0.01},
        {"match": "*.mlp.*", "weight_decay": 0.0},
    ]
    model, optimizer = built({"name": name, "weight_decay": 0.1, "groups": groups})
    rates, decays = by_name(optimizer, "lr"), by_name(optimizer, "weight_decay")
    assert rates.keys() == dict(model.named_parameters()).keys()
    for parameter in rates:
        if parameter.startswith("lm_head"):
            assert (rates[parameter], decays[parameter]) == (0.5, 0.3)
        elif parameter.startswith(("transformer.h.0", "transformer.h.1")):
            assert rates[parameter] == 0.01
            assert decays[parameter] == (0.0 if model.get_parameter(parameter).ndim < 2 else 0.1)
        else:
            assert rates[parameter] == 0.1
            assert decays[parameter] == (0.0 if ".mlp." in parameter or "norm" in parameter else 0.1), parameter
    (head,) = (group for group in optimizer.param_groups if "lm_head.weight" in group["param_names"])
    assert (head["betas"], head["eps"]) == ((0.8, 0.9), 1e-4)
    assert optimizer.param_groups[0]["lr"] == 0.1  # the one that a run reports


def test_a_step_of_each_group_is_that_of_an_optimizer_with_its_options() -> None:
    groups = [{"match": "*.mlp.*", "lr": 0.02, "weight_decay": 0.5, "betas": [0.5, 0.6], "eps": 1e-3}]
    model, optimizer = built({"groups": groups, "weight_decay": 0.0})
    twin, _ = built({"weight_decay": 0.0})
    mlp = [p for name, p in twin.named_parameters() if ".mlp." in name]
    rest = [p for name, p in twin.named_parameters() if ".mlp." not in name]
    alone = AdamW(mlp, lr=0.02, weight_decay=0.5, betas=(0.5, 0.6), eps=1e-3, fused=True)
    others = AdamW(rest, lr=0.1, weight_decay=0.0, betas=(0.9, 0.95), eps=1e-8, fused=True)
    for step in range(3):
        torch.manual_seed(step)
        for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            ours.grad = torch.randn_like(ours)
            theirs.grad = ours.grad.clone()
        for one in (optimizer, alone, others):
            one.step()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_tied_parameter_is_matched_by_any_of_its_names() -> None:
    _, optimizer = built(
        {"groups": [{"match": "lm_head.weight", "lr": 0.5}]}, model={"n_layer": 1, "tie_weights": True}
    )
    assert by_name(optimizer, "lr")["transformer.wte.weight"] == 0.5


def test_a_frozen_group_is_not_trained_and_not_in_the_optimizer() -> None:
    model, optimizer = built({"groups": [{"match": "transformer.wte.*", "frozen": True}]})
    assert not model.get_parameter("transformer.wte.weight").requires_grad
    assert "transformer.wte.weight" not in by_name(optimizer, "lr")


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_layer_decay_gives_each_block_its_share_of_the_next_ones_rate(name: str) -> None:
    _, optimizer = built({"name": name, "muon_lr": 0.1, "layer_decay": 0.5})
    rates = by_name(optimizer, "lr")
    assert rates["transformer.wte.weight"] == 0.1 * 0.5**4
    for block in range(3):
        own = {rate for parameter, rate in rates.items() if parameter.startswith(f"transformer.h.{block}.")}
        assert own == {0.1 * 0.5 ** (3 - block)}
    assert rates["lm_head.weight"] == rates["transformer.norm.weight"] == 0.1


def test_layer_decay_comes_on_top_of_a_groups_own_rate() -> None:
    _, optimizer = built({"layer_decay": 0.5, "groups": [{"match": "*.mlp.*", "lr": 1.0}]})
    assert by_name(optimizer, "lr")["transformer.h.1.mlp.up_proj.weight"] == 0.25


def test_layer_decay_needs_blocks() -> None:
    config = SpeedtronicConfig.from_dict({"optimizer": {"layer_decay": 0.5}})
    with pytest.raises(
        ConfigError, match=r"^optimizer\.layer_decay is about the blocks that a model repeats, and Linear"
    ):
        build_optimizer(nn.Linear(2, 2), config, "cpu")


def test_a_pattern_that_gets_nothing_is_refused_with_names() -> None:
    with pytest.raises(
        ConfigError, match=r"^optimizer\.groups\[0\]\.match: 'mlp' matches no parameter; .*transformer\.wte"
    ):
        built({"groups": [{"match": "mlp"}]})
    with pytest.raises(ConfigError, match=r"^optimizer\.groups\[1\]\.match: all parameters that '\*\.mlp\.\*' matches"):
        built({"groups": [{"match": "transformer.h.*"}, {"match": "*.mlp.*"}]})


def test_freezing_everything_is_refused() -> None:
    with pytest.raises(ConfigError, match="no trainable parameter"):
        built({"groups": [{"match": "*", "frozen": True}]})
