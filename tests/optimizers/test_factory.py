"""AdamW from a configuration: ownership, weight decay, fused construction and its fallback."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from speedtronic.config import SpeedtronicConfig
from speedtronic.errors import ConfigError
from speedtronic.optimizers import build_adamw, factory, parameter_groups

CPU = torch.device("cpu")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.linear = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.frozen = nn.Linear(4, 4).requires_grad_(False)


def section(**keys: object) -> Any:
    return SpeedtronicConfig.from_dict({"optimizer": keys}).optimizer


def names_of(model: nn.Module, group: dict[str, Any]) -> set[str]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {names[id(parameter)] for parameter in group["params"]}


def test_matrices_decay_and_vectors_do_not() -> None:
    model = Block()
    decayed, plain = parameter_groups(model, weight_decay=0.1, decay_1d=False)
    assert names_of(model, decayed) == {"embedding.weight", "linear.weight"}
    assert names_of(model, plain) == {"linear.bias", "norm.weight", "norm.bias"}
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.1, 0.0)


def test_decay_1d_decays_everything() -> None:
    groups = parameter_groups(Block(), weight_decay=0.1, decay_1d=True)
    assert [len(group["params"]) for group in groups] == [2, 3]
    assert [group["weight_decay"] for group in groups] == [0.1, 0.1]


def test_a_tied_parameter_belongs_to_one_group_once_and_a_frozen_one_to_none() -> None:
    model = Block()
    optimizer = build_adamw(model, section(), CPU)
    owned = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    assert len(owned) == len(set(owned)) == 5
    assert id(model.frozen.weight) not in owned


def test_a_trainable_parameter_that_no_group_owns_is_named() -> None:
    model = Block()
    with pytest.raises(ConfigError, match=r"no group: linear\.bias, norm\.weight, norm\.bias"):
        factory.check_ownership(model, parameter_groups(model, weight_decay=0.1, decay_1d=False)[:1])


def test_a_trainable_parameter_that_two_groups_own_is_named() -> None:
    model = nn.Linear(2, 2)
    groups = [{"params": [model.weight, model.bias]}, {"params": [model.bias]}]
    with pytest.raises(ConfigError, match="owned more than once: bias"):
        factory.check_ownership(model, groups)


def test_a_model_without_trainable_parameters_is_refused() -> None:
    with pytest.raises(ConfigError, match="no trainable parameter"):
        build_adamw(nn.Linear(2, 2).requires_grad_(False), section(), CPU)


def test_adamw_takes_lr_betas_eps_and_weight_decay_from_the_config() -> None:
    """Seed: "Builds AdamW from config.optimizer: lr, betas, eps, weight_decay"."""
    keys = section(lr=0.02, betas=[0.8, 0.9], eps=1e-6, weight_decay=0.3)
    group = build_adamw(nn.Linear(2, 2), keys, CPU).param_groups[0]
    assert {key: group[key] for key in ("lr", "betas", "eps", "weight_decay")} == {
        "lr": 0.02,
        "betas": (0.8, 0.9),
        "eps": 1e-6,
        "weight_decay": 0.3,
    }


def test_fused_null_asks_the_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seed: "When optimizer.fused is null, supports_fused_adamw(device) probes CUDA"."""
    asked: list[torch.device] = []

    def probe(device: torch.device) -> bool:
        asked.append(device)
        return True

    monkeypatch.setattr(factory, "supports_fused_adamw", probe)
    assert build_adamw(nn.Linear(2, 2), section(), CPU).param_groups[0]["fused"] is True
    assert asked == [CPU]


def test_a_forced_fused_value_is_attempted_without_asking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seed: "A forced fused value is also attempted"."""
    monkeypatch.setattr(factory, "supports_fused_adamw", lambda device: pytest.fail("asked"))
    assert build_adamw(nn.Linear(2, 2), section(fused=True), CPU).param_groups[0]["fused"] is True
    assert not build_adamw(nn.Linear(2, 2), section(fused=False), CPU).param_groups[0]["fused"]


@pytest.mark.parametrize("error", [TypeError, RuntimeError, ValueError])
def test_a_refused_fused_construction_falls_back_and_says_so(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Seed: "TypeError, RuntimeError, or ValueError during construction falls back to ordinary AdamW"."""
    real = torch.optim.AdamW

    def picky(*args: Any, fused: bool = False, **kwargs: Any) -> torch.optim.AdamW:
        if fused:
            raise error("no fused kernel")
        return real(*args, **kwargs)

    monkeypatch.setattr(torch.optim, "AdamW", picky)
    optimizer = build_adamw(nn.Linear(2, 2), section(fused=True), CPU)
    assert not optimizer.param_groups[0]["fused"]
    assert "no fused kernel" in caplog.text


def test_a_step_equals_torch_adamw_with_the_same_groups() -> None:
    torch.manual_seed(0)
    model, twin = nn.Linear(3, 2), nn.Linear(3, 2)
    twin.load_state_dict(model.state_dict())
    ours = build_adamw(model, section(lr=0.1, weight_decay=0.5), CPU)
    reference = torch.optim.AdamW(
        [{"params": [twin.weight], "weight_decay": 0.5}, {"params": [twin.bias], "weight_decay": 0.0}],
        lr=0.1,
        betas=(0.9, 0.95),
    )
    for module, optimizer in ((model, ours), (twin, reference)):
        module(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    torch.testing.assert_close(model.weight, twin.weight, rtol=0, atol=0)
    torch.testing.assert_close(model.bias, twin.bias, rtol=0, atol=0)
