"""A coordinator is called in order, and may leave out all but five calls."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from speedtronic.checkpoint import CheckpointManager
from speedtronic.trainer import SyncCoordinator
from speedtronic.trainer.sync import FullCoordinator, with_defaults
from tests.support.listening import Listening
from tests.support.models import (
    ACCUMULATE_TWO,
    Coordinator,
    Endless,
    Events,
    OnlyLogits,
    Regression,
    config_of,
    make_trainer,
    successor_batches,
)


def test_a_coordinator_is_a_runtime_checkable_protocol() -> None:
    assert isinstance(Coordinator(Events()), SyncCoordinator)
    assert not isinstance(object(), SyncCoordinator)


def test_fit_starts_calls_and_stops_the_coordinator_in_order() -> None:
    """Seed: "8. Start coordinator if needed. 9. Apply deferred coordinator checkpoint state after startup. 10. Emit
    train_start. 11. Run complete global steps. 12. Emit train_end and return."
    """
    events = Events()
    first = make_trainer(coordinator=Coordinator(Events()))
    first.fit(1)
    ours = make_trainer(events=events, coordinator=Coordinator(events))
    ours.resume(first.state_dict())
    ours.fit(3)
    assert events.names() == [
        "shape_profile",
        "coordinator.start",
        "coordinator.load",
        "train_start",
        "coordinator.step",
        "train_step",
        "coordinator.step",
        "train_step",
        "train_end",
        "coordinator.stop",
    ]
    assert events.of("coordinator.load") == [{"state": {"baseline": 7}}]
    assert [(p["model"], p["step"]) for p in events.of("coordinator.step")] == [
        (ours.model, 2),
        (ours.model, 3),
    ]


def test_a_coordinator_that_prepares_gets_its_state_before_it_starts() -> None:
    """Seed: "v2 coordinators can apply prepared baseline state during startup before any remote refresh"."""

    class Preparing(Coordinator):
        def prepare_state(self, state: dict[str, Any]) -> None:
            self._note("prepare")

    events = Events()
    first = make_trainer(coordinator=Coordinator(Events()))
    first.fit(1)
    ours = make_trainer(events=events, coordinator=Preparing(events))
    ours.resume(first.state_dict())
    ours.fit(2)
    assert events.names()[1:4] == ["coordinator.prepare", "coordinator.start", "coordinator.load"]


def test_a_coordinator_is_given_the_counts_of_a_step_before_the_step() -> None:
    class Counting(Coordinator):
        def count(self, samples: int, tokens: int | Tensor) -> None:
            self._note("count", samples=samples, tokens=int(tokens))

    events = Events()
    config = config_of(data=ACCUMULATE_TWO)
    make_trainer(OnlyLogits(), successor_batches(), coordinator=Counting(events), config=config).fit(1)
    assert events.names() == [f"coordinator.{name}" for name in ("start", "count", "step", "stop")]
    assert events.of("coordinator.count") == [{"samples": 8, "tokens": 48}]


@pytest.mark.parametrize("every", [2, 100])
def test_a_coordinator_hands_over_its_last_work_before_the_last_checkpoint(every: int, tmp_path: Path) -> None:
    class HandingOver(Coordinator):
        handed_over = False

        def hand_over(self) -> None:
            self.handed_over = True

        def state_dict(self) -> dict[str, Any] | None:
            return {"handed_over": self.handed_over}

    manager = CheckpointManager(tmp_path, every_steps=every)
    make_trainer(coordinator=HandingOver(Events()), checkpoint_manager=manager).fit(4)
    state = manager.load_latest()
    assert state is not None
    assert state["coordinator"] == {"handed_over": True}


class Position(NamedTuple):
    step: int
    samples: int
    tokens: int


class Knowing(Coordinator):
    """Knows, once it was told of step `after`, that the steps up to `position` are done."""

    def __init__(self, events: Events, position: Position, after: int) -> None:
        super().__init__(events)
        self._position: Position | None = position
        self._step, self._after = 0, after

    def after_optimizer_step(self, model: Any, step: int) -> bool:
        self._step = step
        return super().after_optimizer_step(model, step)

    def continue_at(self) -> Position | None:
        if self._step < self._after:
            return None
        known, self._position = self._position, None
        return known


def numbered(number: int) -> tuple[Tensor, Tensor]:
    return torch.full((2, 3), float(number)), torch.zeros(2, 1)


@pytest.mark.parametrize("after", [0, 2])
def test_work_that_a_coordinator_knows_to_be_done_is_skipped(after: int) -> None:
    """Its data is not read again, and steps, schedule and counters are where they would be."""
    seen: list[float] = []

    class Watching(Regression):
        def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
            seen.append(x[0, 0].item())
            return super().forward(x, y)

    torch.manual_seed(0)
    model = Watching()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    events = Events()
    ours = make_trainer(
        model,
        Endless(numbered),
        optimizer=optimizer,
        scheduler=torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 - step / 100),
        coordinator=Knowing(events, Position(5, samples=500, tokens=900), after),
        config=config_of(data={"micro_batch_size": 2, "target_batch_size": 4}),
    )
    result = ours.fit(7)
    done = [0.0, 1.0, 2.0, 3.0][: 2 * after]
    assert seen == [*done, 10.0, 11.0, 12.0, 13.0]
    assert [p["step"] for p in events.of("coordinator.step")] == [*range(1, after + 1), 6, 7]
    assert [record["lr_applied"] for record in result.metrics][-2:] == pytest.approx([0.95e-3, 0.94e-3])
    assert (result.steps, result.samples, result.tokens) == (7, 508, 900)
    assert result.metrics[-1]["samples_per_sec"] < 1.001 * result.metrics[-1]["steps_per_sec"] * 4


def test_any_scheduler_advances_by_the_skipped_steps() -> None:
    torch.manual_seed(0)
    model = Regression()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    make_trainer(
        model,
        optimizer=optimizer,
        scheduler=torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5),
        coordinator=Knowing(Events(), Position(5, 20, 60), after=0),
    ).fit(6)
    assert optimizer.param_groups[0]["lr"] == 0.5**6


def test_a_run_with_no_work_left_trains_nothing() -> None:
    ours = make_trainer(coordinator=Knowing(Events(), Position(9, 36, 108), after=0))
    result = ours.fit(7)
    assert (result.steps, list(result.metrics)) == (9, [])


def test_a_run_with_no_work_left_says_so_and_ends_with_a_checkpoint(tmp_path: Path) -> None:
    """The final step of a successful `fit` is always checkpointed: the weights are those of all nodes."""
    log = Listening()
    manager = CheckpointManager(tmp_path, every_steps=100)
    knowing = Knowing(Events(), Position(9, 36, 108), after=0)
    make_trainer(coordinator=knowing, checkpoint_manager=manager, logger=log).fit(7)
    assert log.said("steps 1 to 9 were trained before: nothing is left to train")
    state = CheckpointManager(tmp_path).load_latest()
    assert state is not None
    assert (state["step"], state["samples"], state["metrics"]["loss"]) == (9, 36, None)


def test_a_position_behind_the_run_is_ignored() -> None:
    ours = make_trainer(coordinator=Knowing(Events(), Position(2, 8, 24), after=3))
    assert ours.fit(4).samples == 16


@pytest.mark.parametrize("fail_at", ["start", "step"])
def test_the_coordinator_is_stopped_also_on_failure(fail_at: str) -> None:
    """Seed: "fit() always calls coordinator stop() in finally, even on failure"."""
    events = Events()
    ours = make_trainer(events=events, coordinator=Coordinator(events, fail_at=fail_at))
    with pytest.raises(RuntimeError, match=f"{fail_at} failed"):
        ours.fit(2)
    assert events.names()[-1] == "coordinator.stop"


def test_a_later_fit_starts_the_coordinator_again() -> None:
    """Seed: "a later fit() can start fresh background lanes"."""
    events = Events()
    ours = make_trainer(coordinator=Coordinator(events))
    ours.fit(1)
    ours.fit(2)
    assert [name for name in events.names() if name != "coordinator.step"] == [
        "coordinator.start",
        "coordinator.stop",
    ] * 2


@pytest.mark.parametrize(
    ("distributed", "cleared"),
    [
        ({}, True),
        ({"enabled": True, "repo_id": "a/b"}, False),
        ({"enabled": True, "repo_id": "a/b", "reset_inner_optimizer": True}, True),
    ],
)
def test_true_from_the_coordinator_resets_the_inner_optimizer(distributed: dict[str, Any], cleared: bool) -> None:
    """Seed: "after_optimizer_step() may return true to request inner optimizer state reset"."""
    torch.manual_seed(0)
    model = Regression()
    ours = make_trainer(
        model,
        optimizer=torch.optim.Adam(model.parameters()),
        coordinator=Coordinator(Events(), reset=True),
        config=config_of(distributed=distributed),
    )
    ours.fit(2)
    assert (len(ours.optimizer.state) == 0) is cleared


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("distributed", [{}, {"enabled": True, "repo_id": "a/b"}])
def test_a_coordinators_own_choice_about_the_reset_wins_in_any_trainer(
    distributed: dict[str, Any], reset: bool
) -> None:
    class Deciding(Coordinator):
        reset_inner_optimizer = reset

    torch.manual_seed(0)
    model = Regression()
    ours = make_trainer(
        model,
        optimizer=torch.optim.Adam(model.parameters()),
        coordinator=Deciding(Events(), reset=True),
        config=config_of(distributed=distributed),
    )
    ours.fit(2)
    assert (len(ours.optimizer.state) == 0) is reset


def test_a_coordinator_that_inherits_the_defaults_writes_only_what_it_needs() -> None:
    class Inheriting(Coordinator, FullCoordinator):
        handed_over = 0

        def hand_over(self) -> None:
            self.handed_over += 1

    coordinator = Inheriting(Events())
    assert with_defaults(coordinator, config_of()) is coordinator
    assert make_trainer(coordinator=coordinator).fit(2).steps == 2
    assert coordinator.handed_over > 0


def test_a_coordinator_with_five_methods_gets_defaults_for_the_rest() -> None:
    coordinator = Coordinator(Events())
    assert not isinstance(coordinator, FullCoordinator)
    full = with_defaults(coordinator, config_of())
    full.prepare_state({})
    full.count(4, 12)
    full.hand_over()
    assert (full.continue_at(), full.state_dict()) == (None, {"baseline": 7})
    for distributed, reset in (({}, True), ({"enabled": True, "repo_id": "a/b"}, False)):
        assert with_defaults(coordinator, config_of(distributed=distributed)).reset_inner_optimizer is reset
