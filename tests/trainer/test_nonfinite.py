"""Non-finite updates stay away from the weights, by reading one number or none."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from speedtronic.checkpoint import CheckpointManager
from speedtronic.errors import NonFiniteError
from speedtronic.metrics import MetricLogger
from speedtronic.trainer import Trainer
from speedtronic.trainer.nonfinite import NonFiniteGuard, Policy
from tests.support.models import (
    Events,
    Regression,
    Silence,
    config_of,
    make_trainer,
    poisoned,
    regression_batches,
)

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


def test_on_mps_the_host_reads_the_verdict_since_the_fused_kernel_there_does_not_obey_it() -> None:
    class FusedOnMps:
        """Stands in for a fused optimizer whose weights are on MPS, and says that it takes the verdict."""

        def __init__(self) -> None:
            self.param_groups = [{"params": [SimpleNamespace(device=torch.device("mps"))]}]
            self._step_supports_amp_scaling = True
            self.steps = 0

        def step(self) -> None:
            self.steps += 1

    optimizer: Any = FusedOnMps()
    guard = NonFiniteGuard("skip", optimizer)
    for loss, refused in ((ONE, False), (NAN, True), (ONE, False)):
        guard.step(guard.inspect(loss, ONE))
        assert guard.refused is refused
    assert optimizer.steps == 2


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


def test_the_verdict_is_removed_from_the_optimizer_after_the_step() -> None:
    optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(1))], fused=True)
    guard = NonFiniteGuard("stop", optimizer)
    guard.step(guard.inspect(ONE, ONE))
    assert "found_inf" not in vars(optimizer)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("every_steps", [1, 10])
def test_a_nan_loss_stops_at_its_step_with_the_weights_before_it(fused: bool, every_steps: int, tmp_path: Path) -> None:

    def train(batches: Any, steps: int) -> Trainer:
        torch.manual_seed(0)
        model = Regression()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
        ours = make_trainer(
            model,
            batches,
            optimizer=optimizer,
            logger=MetricLogger(stream=Silence(), every_steps=every_steps),
            checkpoint_manager=CheckpointManager(tmp_path / str(steps), every_steps=2),
        )
        return ours if steps > 2 else _fitted(ours, steps)

    good = train(regression_batches(), 2)
    bad = train(poisoned(3), 9)
    with pytest.raises(NonFiniteError, match="step 3") as caught:
        bad.fit(9)
    assert caught.value.step == 3
    # An ordinary optimizer's refusal is known at once; a fused one's when the step is logged.
    assert bad.step == 2
    for name, parameter in good.model.named_parameters():
        torch.testing.assert_close(bad.model.get_parameter(name), parameter, rtol=0, atol=0)
    latest = CheckpointManager(tmp_path / "9").load_latest()
    assert latest is not None
    assert latest["step"] == 2


def _fitted(ours: Trainer, steps: int) -> Trainer:
    ours.fit(steps)
    return ours


def test_a_nan_loss_is_an_event_and_the_record_of_its_step_is_null() -> None:
    events = Events()
    ours = make_trainer(batches=poisoned(2), events=events)
    with pytest.raises(NonFiniteError):
        ours.fit(5)
    (event,) = events.of("nonfinite")
    assert (event["step"], event["action"]) == (2, "stop")


@pytest.mark.parametrize("policy", ["skip", "ignore"])
def test_skip_and_ignore_continue_after_a_nan_loss(policy: str) -> None:
    events = Events()
    ours = make_trainer(batches=poisoned(2), events=events, config=config_of(run={"on_nonfinite": policy}))
    result = ours.fit(4)
    assert result.steps == 4
    assert events.of("nonfinite")[0]["action"] == policy
    finite = all(torch.isfinite(parameter).all() for parameter in ours.model.parameters())
    assert finite is (policy == "skip")


@pytest.mark.parametrize("fused", [False, True])
def test_a_batch_without_a_target_is_named_as_the_cause_of_a_nan(fused: bool) -> None:
    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(5, 5)

        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return nn.functional.cross_entropy(self.embed(input_ids).flatten(0, 1), labels.flatten())

    ids = torch.ones(2, 3, dtype=torch.long)
    batches = [{"input_ids": ids, "labels": labels} for labels in (ids, torch.full_like(ids, -100), ids)]

    def trainer(**config: Any) -> Trainer:
        model = Mean()
        return make_trainer(
            model, batches, config=config, optimizer=torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
        )

    with pytest.raises(NonFiniteError, match=r"step 2: .*all labels of a batch are -100.*loss_normalization: tokens"):
        trainer().fit(3)
    assert trainer(data={"loss_normalization": "tokens"}).fit(3).steps == 3
    with torch.no_grad():
        (broken := trainer()).model.embed.weight.fill_(torch.nan)
    with pytest.raises(NonFiniteError, match=r"step 1: .*Lower the learning rate"):
        broken.fit(3)
