"""Lazy modules take their shapes from the first batch, before anything asks for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from speedtronic.checkpoint import CheckpointManager
from speedtronic.errors import ConfigError
from speedtronic.runtime import build_optimizer
from speedtronic.trainer import Trainer
from speedtronic.trainer.lazy_modules import initialize, uninitialized
from tests.support.models import Events, config_of, make_trainer, regression_batches

pytestmark = pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")

MSE: dict[str, Any] = {"loss": "mse"}


def lazy_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d(), nn.Tanh(), nn.LazyLinear(1))


def trainer_of(model: nn.Module, **options: Any) -> Trainer:
    return make_trainer(model, optimizer=torch.optim.AdamW(model.parameters(), lr=0.01), **options)


def test_they_train_as_modules_that_a_forward_pass_has_shaped_before() -> None:
    lazy = trainer_of(lazy_model(), config=config_of(**MSE)).fit(5)
    model = lazy_model()
    model.eval()(regression_batches()[0][0])
    shaped = trainer_of(model.train(), config=config_of(**MSE)).fit(5)
    losses = [[record["loss"] for record in result.metrics] for result in (lazy, shaped)]
    assert losses[0] == losses[1]


def test_the_first_batch_is_trained_on_although_it_was_looked_at() -> None:
    seen: list[float] = []

    class Watching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.LazyLinear(1)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            if torch.is_grad_enabled():
                seen.append(x[0, 0].item())
            return ((self.linear(x) - y) ** 2).mean()

    batches = regression_batches()
    trainer_of(Watching(), batches=iter(batches)).fit(3)
    assert seen == [x[0, 0].item() for x, _ in batches[:3]]


def test_a_checkpoint_of_them_is_resumed_exactly(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, every_steps=3)
    whole = trainer_of(lazy_model(), config=config_of(**MSE), checkpoint_manager=manager).fit(3)
    rest = trainer_of(lazy_model(), config=config_of(**MSE))
    state = manager.load_latest()
    assert state is not None
    rest.resume(state)
    straight = trainer_of(lazy_model(), config=config_of(**MSE)).fit(6)
    losses = [r["loss"] for r in (*whole.metrics, *rest.fit(6).metrics)]
    assert losses == [r["loss"] for r in straight.metrics]


def test_everything_that_asks_for_shapes_is_told_them() -> None:
    events = Events()
    config = config_of(**MSE, optimizer={"ema": 0.9})
    ours = trainer_of(lazy_model(), config=config, events=events)
    ours.fit(2)
    assert events.of("train_start")[0]["parameters"] == 3 * 4 + 4 + 4 + 4 + 4 + 1
    assert ours.averaged_model is not None


def test_an_optimizer_whose_groups_depend_on_shapes_is_refused_before_they_are_known() -> None:
    for name in ("adamw", "muon"):
        with pytest.raises(ConfigError, match="call the model once"):
            build_optimizer(lazy_model(), config_of(optimizer=name), "cpu")


def test_one_that_the_forward_pass_does_not_reach_is_named() -> None:
    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.LazyLinear(1), nn.LazyLinear(1)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.used(x)
            return out

    model = Unused()
    with pytest.raises(ConfigError, match=r"unused\.weight"):
        initialize(model, lambda: model(torch.zeros(2, 3)))
    assert uninitialized(model) == ["unused.weight", "unused.bias"]


def test_shaping_changes_neither_modes_nor_running_statistics() -> None:
    model = lazy_model()
    model[3].eval()
    initialize(model, lambda: model(torch.full((4, 3), 9.0)))
    assert [part.training for part in model] == [True, True, True, False]
    assert model[1].running_mean.tolist() == [0.0] * 4
    assert not any(is_lazy(parameter) for parameter in model.parameters())
