"""Schedules of the learning rate while a run trains: what moves one, and by how much."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau


class SchedulerSet:
    """A schedule for each of several optimizers, by name, as one."""

    def __init__(self, schedulers: Mapping[str, LRScheduler]) -> None:
        self.schedulers = dict(schedulers)
        self._schedulers = list(schedulers.values())  # where torch's own combinations have their parts

    def step(self) -> None:
        """Advance each that needs the number of the step alone."""
        with warnings.catch_warnings():
            # torch warns of a scheduler that moves before the first step of its optimizer, and some may step later.
            warnings.simplefilter("ignore")
            for scheduler in self._schedulers:
                advance(scheduler)

    def state_dict(self) -> dict[str, Any]:
        """The state of each."""
        return {name: scheduler.state_dict() for name, scheduler in self.schedulers.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned."""
        for name, scheduler in self.schedulers.items():
            scheduler.load_state_dict(state[name])


Schedule = LRScheduler | SchedulerSet


def advance(scheduler: Schedule | None) -> None:
    """Move a schedule by one global step. One that follows the evaluations stays."""
    if scheduler is not None and not isinstance(scheduler, ReduceLROnPlateau):
        scheduler.step()


def advance_by_evaluation(scheduler: Schedule | None, value: float) -> None:
    """Tell a schedule that follows the evaluations what the newest one measured."""
    for part in scheduler.schedulers.values() if isinstance(scheduler, SchedulerSet) else (scheduler,):
        if isinstance(part, ReduceLROnPlateau):
            part.step(value)


def recompute_learning_rates(optimizer: torch.optim.Optimizer, scheduler: Schedule | None) -> None:
    """Set each LR to that of the schedule at its current step."""
    if isinstance(scheduler, SchedulerSet):
        for part in scheduler.schedulers.values():
            recompute_learning_rates(part.optimizer, part)
    elif isinstance(scheduler, LambdaLR):
        for group, base, factor in zip(optimizer.param_groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True):
            group["lr"] = base * factor(scheduler.last_epoch)


def move_schedule(optimizer: torch.optim.Optimizer, scheduler: Schedule | None, steps: int) -> None:
    """Move the schedule by some steps; back, where they are negative and the schedule can."""
    if isinstance(scheduler, SchedulerSet):
        for part in scheduler.schedulers.values():
            move_schedule(part.optimizer, part, steps)
    elif isinstance(scheduler, LambdaLR):
        scheduler.last_epoch += steps
        recompute_learning_rates(optimizer, scheduler)
    elif scheduler is not None:
        with warnings.catch_warnings():
            # torch warns of a scheduler that moves before the first optimizer step. Here that is meant.
            warnings.simplefilter("ignore")
            for _ in range(steps):
                advance(scheduler)
