"""What a checkpoint holds comes back, and what does not fit is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from speedtronic.errors import CheckpointError
from speedtronic.trainer import Trainer
from tests.support.models import (
    SCALED,
    OnlyLogits,
    Overflowing,
    Regression,
    config_of,
    make_trainer,
    successor_batches,
)


def test_counters_are_cumulative_over_a_resume() -> None:
    first, second = (make_trainer(OnlyLogits(), successor_batches()) for _ in range(2))
    first.fit(3)
    second.resume(first.state_dict())
    result = second.fit(5)
    assert (result.steps, result.samples, result.tokens) == (5, 20, 120)
    assert [record["samples"] for record in result.metrics] == [16, 20]


def test_the_scalers_state_is_restored_when_fit_makes_a_new_one() -> None:
    """Seed: "Create a new GradScaler and restore deferred scaler state"."""
    first = make_trainer(Overflowing(1), precision=SCALED)
    first.fit(1)
    second = make_trainer(Overflowing(2), precision=SCALED)
    second.resume(first.state_dict())
    second.fit(2)
    assert first.state_dict()["scaler"]["scale"] == second.state_dict()["scaler"]["scale"] == 2.0**15


def test_a_model_that_was_compiled_by_hand_saves_plain_names(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrapper(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self._orig_mod = inner

        def forward(self, x: Tensor, y: Tensor) -> Any:
            return self._orig_mod(x, y)

    ours = make_trainer(Wrapper(Regression()))
    ours.fit(1)
    assert set(ours.state_dict()["model"]) == {"linear.weight", "linear.bias"}


def test_resume_restores_everything_at_once() -> None:
    """Seed: "Trainer.resume(state) immediately restores: model state; optimizer state; scheduler state; global
    step/sample/token counters; RNG state".
    """

    def adam_trainer() -> Trainer:
        torch.manual_seed(3)
        model = OnlyLogits()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
        return make_trainer(model, successor_batches(), optimizer=optimizer, scheduler=scheduler)

    first = adam_trainer()
    first.fit(3)
    state = first.state_dict()
    expected = torch.rand(2)
    second = adam_trainer()
    second.resume(state)
    assert torch.equal(torch.rand(2), expected)
    assert (second.step, second.samples, second.tokens) == (3, 12, 72)
    assert torch.equal(second.model.get_parameter("head.weight"), first.model.get_parameter("head.weight"))
    weight = second.model.get_parameter("head.weight")
    assert second.optimizer.state[weight]["step"] == 3
    assert second.scheduler is not None
    assert second.scheduler.last_epoch == 3
    assert second.optimizer.param_groups[0]["lr"] == pytest.approx(0.1 / 4)


def test_another_model_is_an_error_that_names_the_tensors() -> None:
    class Wider(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 1)
            self.extra = nn.Linear(1, 1)

    state = make_trainer().state_dict()
    with pytest.raises(CheckpointError) as caught:
        make_trainer(Wider()).resume(state)
    message = str(caught.value)
    assert "linear.weight has shape (1, 3) in the checkpoint and (1, 4) in this model" in message
    assert "extra.bias is missing in the checkpoint" in message


def test_another_optimizer_is_a_clear_error() -> None:
    state = make_trainer().state_dict()
    model = Regression()
    other = torch.optim.SGD([{"params": [model.linear.weight]}, {"params": [model.linear.bias]}], lr=0.1)
    with pytest.raises(CheckpointError, match="optimizer"):
        make_trainer(model, optimizer=other).resume(state)


def by_algorithm(*algorithms: str | None) -> Trainer:
    """Groups as `HybridOptimizer` has them, one tensor each; None is a group of an ordinary optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(1, 1, bias=False) for _ in algorithms))
    keys: list[dict[str, Any]] = [{} if algorithm is None else {"algorithm": algorithm} for algorithm in algorithms]
    groups = [{"params": list(layer.parameters()), **key} for layer, key in zip(model, keys, strict=True)]
    return make_trainer(model, optimizer=torch.optim.AdamW(groups))


@pytest.mark.parametrize(
    ("saved", "own", "message"),
    [
        (("muon", "adamw"), (None, None), "written by another optimizer .* continue with optimizer.name: muon, or"),
        ((None, None), ("muon", "adamw"), "written by another optimizer .* continue with optimizer.name: adamw, or"),
        (("muon", "adamw"), ("adamw", "adamw"), "divides the weights as muon, adamw, and this one as adamw, adamw: "),
    ],
)
def test_the_state_of_another_algorithm_is_refused_with_the_remedy(
    saved: tuple[str | None, ...], own: tuple[str | None, ...], message: str
) -> None:
    state = by_algorithm(*saved).state_dict()
    with pytest.raises(CheckpointError, match=f"{message}.*run.init_from") as caught:
        by_algorithm(*own).resume(state)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("algorithms", [("muon", "adamw"), (None, None)])
def test_the_state_of_the_same_algorithms_is_taken(algorithms: tuple[str | None, ...]) -> None:
    by_algorithm(*algorithms).resume(by_algorithm(*algorithms).state_dict())


def test_a_longer_horizon_recomputes_the_lr_from_the_step() -> None:
    def scheduled(horizon: int) -> Trainer:
        torch.manual_seed(0)
        model = Regression()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - min(step / horizon, 1))
        return make_trainer(model, optimizer=optimizer, scheduler=scheduler)

    first = scheduled(4)
    first.fit(4)
    second = scheduled(8)
    second.resume(first.state_dict())
    result = second.fit(5)
    assert result.metrics[0]["lr_applied"] == pytest.approx(0.5e-3)
    assert result.metrics[0]["lr"] == pytest.approx(0.375e-3)


def test_saved_precision_and_config_are_informational() -> None:
    """Seed: "Saved precision and config copies are informational; they are not compared with or applied"."""
    state = make_trainer(config=config_of(run={"name": "first"})).state_dict()
    state["precision"] = "bf16"
    ours = make_trainer(config=config_of(run={"name": "second"}))
    ours.resume(state)
    assert ours.config.run.name == "second"
    assert ours.precision.mode == "fp32"


@pytest.mark.parametrize("state", [None, "runs/a", {}, {"model": {}}, nn.Linear(2, 1).state_dict()])
def test_what_is_no_state_of_a_trainer_is_refused_with_what_to_do(state: Any) -> None:
    with pytest.raises(CheckpointError, match=r"cannot resume from a \w+ that is no trainer's state.*load_latest"):
        make_trainer().resume(state)
