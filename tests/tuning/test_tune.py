"""Where the plan of a run comes from."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from speedtronic.config import SpeedtronicConfig
from speedtronic.errors import ConfigError
from speedtronic.metrics import MetricLogger
from speedtronic.registry import build_model
from speedtronic.tuning import Choices, Measured, Workbench, cache, plan_of_run, tune
from speedtronic.tuning.search import Search
from speedtronic.tuning.tune import possible_choices
from tests.support.configs import tiny
from tests.support.models import Events, Silence

LONG = 1_000_000


class Told(MetricLogger):
    """A logger that keeps its messages and events."""

    def __init__(self) -> None:
        super().__init__(stream=Silence())
        self.messages: list[str] = []
        self.events = Events()

    def info(self, message: str) -> None:
        self.messages.append(message)

    warning = info

    def emit(self, event: str, payload: Any = None) -> None:
        self.events.on_event(event, payload)


class World:
    """A configuration and its model; `searches` counts the measurements, which find that merging is twice as fast."""

    def __init__(self) -> None:
        self.searches: list[int] = []
        self.complete = True

    def config(self, **sections: Any) -> SpeedtronicConfig:
        sections = {"data": {"target_batch_size": 8}, "tune": "auto", "run": {"max_steps": LONG}} | sections
        return SpeedtronicConfig(**tiny("out", **sections))

    def plan(self, config: SpeedtronicConfig | None = None, saved: Any = None, step: int = 0) -> tuple[Any, Told]:
        config, told = config or self.config(), Told()
        workbench = Workbench(
            build_model(config.model),
            torch.device("cpu"),
            make_loader=lambda settings: [],
            make_optimizer=lambda model, settings, device: torch.optim.SGD(model.parameters(), lr=0.0),
        )
        target = config.run.max_steps
        return plan_of_run(config, workbench, step=step, target=target, saved=saved, logger=told), told

    def search(self, search: Search, base: Choices, possible: Any) -> list[Measured]:
        self.searches.append(search._steps)
        search.complete = self.complete
        rows = [Measured(choices=base, step_seconds=0.02)]
        return [*rows, Measured(choices=base.but(merged=4), step_seconds=0.01, start_seconds=1.0)]


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setenv("SPEEDTRONIC_CACHE", str(tmp_path / "cache"))
    made = World()
    with mock.patch.object(Search, "run", lambda self, base, possible: made.search(self, base, possible)):
        yield made


def test_off_decides_nothing_and_says_that_a_saved_plan_is_dropped(world: World) -> None:
    off = world.config(tune="off")
    assert world.plan(off) == (None, mock.ANY)
    plan, told = world.plan(off, saved=world.plan()[0].model_dump())
    assert plan is None
    assert "the plan of the checkpoint is dropped" in told.messages[0]


def test_a_first_run_measures_and_says_what_it_found_in_one_event_and_one_table(world: World) -> None:
    plan, told = world.plan()
    assert (plan.choices.merged, world.searches) == (4, [LONG])
    event = {"source": "measured", "choices": {"merged": 4}, "speedup": 2.0, "ways": 2}
    assert told.events.seen == [("tune", event)]
    assert told.messages[1:] == [f"tune: merged=4, of 2 ways that were measured\n{plan.table()}"]


def test_the_next_run_finds_the_plan_in_the_cache_and_decides_for_its_own_length(world: World) -> None:
    world.plan()
    plan, told = world.plan()
    assert (plan.choices.merged, told.events.of("tune")[0]["source"]) == (4, "cache")
    # A second to begin with is not earned back in so few updates.
    short, _ = world.plan(world.config(run={"max_steps": 60}))
    assert (short.choices.merged, short.target, world.searches) == (1, 60, [LONG])


def test_a_run_that_is_too_short_measures_nothing(world: World) -> None:
    plan, told = world.plan(world.config(run={"max_steps": 100}))
    assert (plan.choices, plan.measured, world.searches) == (plan.base, (), [])
    assert told.events.of("tune") == [{"source": "too short", "choices": {}, "speedup": None, "ways": 0}]
    world.plan(world.config(run={"max_steps": 2_000}))  # two seconds of a tiny model
    assert world.searches == []


def test_a_longer_run_measures_again_what_a_shorter_one_had_no_time_for(world: World) -> None:
    world.complete = False
    world.plan(world.config(run={"max_steps": 20_000}))
    world.plan(world.config(run={"max_steps": 30_000}))
    assert world.searches == [20_000]
    world.plan()
    assert world.searches == [20_000, LONG]


def test_a_resumed_run_keeps_its_plan_whatever_the_cache_says_and_is_left(world: World) -> None:
    saved = world.plan()[0]
    world.complete = False
    plan, told = world.plan(saved=saved.model_dump(), step=LONG - 10)
    assert (plan, told.events.of("tune")[0]["source"]) == (saved, "checkpoint")


def test_a_run_that_was_too_short_stays_as_it_is_until_it_is_longer(world: World) -> None:
    short = world.config(run={"max_steps": 100})
    saved = world.plan(short)[0].model_dump()
    world.plan()  # fills the cache
    assert world.plan(short, saved=saved, step=50)[0].choices.merged == 1
    assert world.plan(saved=saved, step=50)[0].choices.merged == 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"machine": {"cores": "512"}}, "it was made on another machine: cores 512 -> "),
        ({"key": "another"}, "the configuration has changed"),
        ({"version": 0}, "is of another version"),
    ],
)
def test_a_plan_that_does_not_hold_here_is_dropped_with_a_notice(
    world: World, change: dict[str, Any], message: str
) -> None:
    saved = world.plan()[0].model_dump() | change
    plan, told = world.plan(saved=saved)
    assert message in told.messages[0]
    assert (plan.choices.merged, told.events.of("tune")[0]["source"]) == (4, "cache")


def test_a_file_is_used_as_it_is_and_a_stranger_is_named(world: World, tmp_path: Path) -> None:
    plan = world.plan()[0]
    (tmp_path / "p.json").write_text(plan.to_json(), encoding="utf-8")
    named = world.config(tune=str(tmp_path / "p.json"))
    found, told = world.plan(named)
    assert (found, len(told.messages), told.events.of("tune")[0]["source"]) == (plan, 1, "file")
    (tmp_path / "p.json").write_text(plan.model_copy(update={"key": "x"}).to_json(), encoding="utf-8")
    found, told = world.plan(named)
    assert "was made for another model, configuration or machine" in told.messages[0]
    with pytest.raises(ConfigError, match="cannot read the plan"):
        world.plan(world.config(tune="absent.json"))


def test_a_cache_that_cannot_be_written_costs_the_cache_alone(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    monkeypatch.setenv("SPEEDTRONIC_CACHE", str(tmp_path / "file"))
    plan, told = world.plan()
    assert plan.choices.merged == 4
    assert "the plan could not be kept for other runs" in told.messages[1]


def test_what_could_not_be_measured_is_not_kept_for_the_next_run(world: World) -> None:
    with mock.patch.object(world, "search", lambda search, base, possible: [Measured(choices=base, step_seconds=None)]):
        plan, _ = world.plan()
    assert (plan.choices, plan.worth_keeping) == (plan.base, False)
    assert world.plan()[1].events.of("tune")[0]["source"] == "measured"


def test_what_the_user_has_chosen_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "DEFAULT_THREADS", 8)
    monkeypatch.setattr(cache, "cores", lambda: 4)

    def possible(other: nn.Module | None = None, **sections: Any) -> Any:
        config = SpeedtronicConfig(**tiny("out", **{"data": {"target_batch_size": 12}} | sections))
        return possible_choices(config, other or build_model(config.model), torch.device("cpu"))

    free = possible()
    assert (free.merges, free.threads, free.num_workers, free.unfused) == (True, (4, 2, 1), (1, 2), True)
    assert (free.larger, free.smaller, free.target_batch_size) == ((), (), 12)
    assert (free.compile_modes, free.regional) == ((None,), True)
    assert possible(run={"threads": 4}).threads == ()
    assert possible(compile=True).compile_modes == ()
    assert possible(compile_options={"mode": "max-autotune"}).compile_modes == ()
    assert possible(optimizer={"fused": True}).unfused is False
    assert possible(data={"num_workers": 2}).num_workers == ()
    monkeypatch.setattr(tune, "bf16_is_faster", lambda: True)
    assert possible().precisions == ("bf16",)
    assert possible(precision={"mode": "fp32"}).precisions == ()
    assert possible(model={"dropout": 0.1}).merges is False
    assert possible(nn.Linear(2, 2)).merges is False
    assert possible(loss="cross_entropy").merges is False


def test_micro_batches_of_auto_begin_at_eight_or_below_and_stay_within_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "memory_bytes", lambda: 4 * 60 * 16 * (16 * 64 + 160 * 1 * 16))
    data = {"micro_batch_size": "auto", "target_batch_size": 120}
    config = SpeedtronicConfig(**tiny("out", data=data, tune="auto"))
    assert Choices.of(config).micro_batch_size == 8
    possible = possible_choices(config, build_model(config.model), torch.device("cpu"))
    assert possible.larger == (10, 12, 15, 20, 24, 30, 40, 60)
    assert possible.smaller == (6, 5, 4, 3, 2, 1)
    assert possible.most_samples == 60
    assert Choices.of(config).applied_to(config).accumulation_steps == 15
