"""Schedules that follow the evaluations, and those of several optimizers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau, StepLR

from speedtronic.checkpoint import CheckpointManager
from speedtronic.trainer import Trainer
from speedtronic.trainer.schedule import SchedulerSet, move_schedule
from tests.support.models import Regression, make_trainer

# What the evaluations find: no improvement from the third on.
LOSSES = [3.0, 2.0, 2.5, 2.5, 2.5, 2.5, 2.5, 2.5]


def plateau_trainer(folder: Path | None = None, **evaluation: Any) -> Trainer:
    torch.manual_seed(0)
    model = Regression()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = make_trainer(
        model,
        optimizer=optimizer,
        scheduler=ReduceLROnPlateau(optimizer, factor=0.5, patience=1),
        evaluator=lambda model, should_stop: {"loss": LOSSES[trainer.step // 2 - 1]},
        config={"run": {"max_steps": 16}, "eval": {"every_steps": 2, **evaluation}},
        checkpoint_manager=CheckpointManager(folder, every_steps=100) if folder is not None else None,
    )
    return trainer


def rates(trainer: Trainer, steps: int | None = None) -> list[float]:
    return [record["lr_applied"] for record in trainer.fit(steps).metrics]


def test_a_plateau_is_moved_by_the_evaluations_and_by_nothing_else() -> None:
    # With a patience of 1, the evaluations after steps 8 and 12 are the second without improvement.
    assert rates(plateau_trainer()) == [0.1] * 8 + [0.05] * 4 + [0.025] * 4


def test_a_plateau_continues_where_it_was(tmp_path: Path) -> None:
    first, second = plateau_trainer(tmp_path), plateau_trainer(tmp_path)
    # The evaluation at the end of the first run, after step 7, is not of eval.every_steps, and counts for nothing.
    before = rates(first, 7)
    assert first.checkpoint_manager is not None
    state = first.checkpoint_manager.load_latest()
    assert state is not None
    second.resume(state)
    assert before + rates(second) == rates(plateau_trainer())
    assert second.scheduler is not None
    assert second.scheduler.state_dict()["best"] == 2.0


def test_a_plateau_follows_the_monitored_number() -> None:
    trainer = plateau_trainer(monitor="others/loss")
    trainer._evaluator = lambda model, should_stop: {"loss": 1.0, "sets": {"others": {"loss": -float(trainer.step)}}}
    assert rates(trainer) == [0.1] * 16


def two_schedules() -> tuple[nn.Linear, dict[str, Any], SchedulerSet]:
    model = nn.Linear(2, 1)
    optimizers = {name: torch.optim.SGD([p], lr=1.0) for name, p in model.named_parameters()}
    schedulers = {
        "weight": LambdaLR(optimizers["weight"], lambda step: 1 / (1 + step)),
        "bias": StepLR(optimizers["bias"], 2, gamma=0.5),
    }
    return model, optimizers, SchedulerSet(schedulers)


def test_a_set_of_schedules_moves_each_and_continues_from_its_state() -> None:
    _, optimizers, schedulers = two_schedules()
    schedulers.step()
    schedulers.step()
    assert [optimizer.param_groups[0]["lr"] for optimizer in optimizers.values()] == [1 / 3, 0.5]
    _, optimizers, others = two_schedules()
    others.load_state_dict(schedulers.state_dict())
    move_schedule(torch.optim.SGD([nn.Parameter(torch.zeros(1))]), others, 2)  # type: ignore[arg-type]
    assert [optimizer.param_groups[0]["lr"] for optimizer in optimizers.values()] == [1 / 5, 0.5]
