"""Non-finite updates stay away from the weights, by reading one number or none."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from speedtronic.trainer.nonfinite import NonFiniteGuard, Policy

NAN, ONE = torch.tensor(float("nan")), torch.tensor(1.0)


def run_updates(policy: Policy, *, fused: bool, losses: list[torch.Tensor]) -> tuple[list[float], list[bool]]:
    """The weight after each update with gradient 1 and lr 1, and whether the host knew of a refusal."""
    weight = nn.Parameter(torch.zeros(1))
    optimizer: torch.optim.Optimizer
    if fused:
        optimizer = torch.optim.AdamW([weight], lr=1.0, weight_decay=0.0, fused=True)
    else:
        optimizer = torch.optim.SGD([weight], lr=1.0)
    guard = NonFiniteGuard(policy, optimizer)
    weights, refused = [], []
    for loss in losses:
        weight.grad = torch.ones(1)
        guard.step(guard.inspect(loss, ONE))
        weights.append(weight.item())
        refused.append(guard.refused)
    return weights, refused


@pytest.mark.parametrize("fused", [True, False])
def test_finite_updates_are_applied(fused: bool) -> None:
    weights, refused = run_updates("stop", fused=fused, losses=[ONE, ONE])
    assert weights == pytest.approx([-1.0, -2.0])
    assert refused == [False, False]


def test_a_fused_optimizer_refuses_on_the_device_and_all_that_follows_under_stop() -> None:
    weights, refused = run_updates("stop", fused=True, losses=[ONE, NAN, ONE])
    assert weights == pytest.approx([-1.0, -1.0, -1.0])
    assert refused == [False, False, False]


def test_an_ordinary_optimizer_is_not_stepped_and_the_host_knows() -> None:
    weights, refused = run_updates("stop", fused=False, losses=[ONE, NAN])
    assert weights == [-1.0, -1.0]
    assert refused == [False, True]


@pytest.mark.parametrize("fused", [True, False])
def test_skip_leaves_out_the_bad_update_only(fused: bool) -> None:
    weights, _ = run_updates("skip", fused=fused, losses=[ONE, NAN, ONE])
    assert weights == pytest.approx([-1.0, -1.0, -2.0])


def test_ignore_applies_everything() -> None:
    weights, refused = run_updates("ignore", fused=False, losses=[ONE, NAN, ONE])
    assert weights == [-1.0, -2.0, -3.0]
    assert refused == [False] * 3


def test_an_infinite_gradient_norm_is_bad_too() -> None:
    guard = NonFiniteGuard("stop", torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0))
    assert guard.inspect(ONE, torch.tensor(float("inf"))).item() == 1.0
    assert guard.inspect(ONE, ONE).item() == 0.0


def test_the_verdict_leaves_no_mark_on_the_optimizer() -> None:
    optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(1))], fused=True)
    guard = NonFiniteGuard("stop", optimizer)
    guard.step(guard.inspect(ONE, ONE))
    assert "found_inf" not in vars(optimizer)
