"""A profile tells where the time of a step goes, and costs nothing where nobody asked for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from speedtronic.trainer.profiling import WARM_UP, StepProfiler, phase, phase_table
from tests.support.models import ACCUMULATE_TWO, config_of, make_trainer


def profiled(trace: Path, *, steps: int, target: int) -> None:
    config = config_of(data=ACCUMULATE_TWO)
    make_trainer(config=config, callbacks=[StepProfiler(steps, trace)]).fit(target)


def test_the_trace_has_the_phases_of_the_asked_steps_and_no_others(tmp_path: Path) -> None:
    trace = tmp_path / "run/trace.json"
    profiled(trace, steps=2, target=8)
    events: list[dict[str, Any]] = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    names = [event["name"] for event in events if event["name"].startswith("step: ")]
    counts = {name.removeprefix("step: "): names.count(name) for name in names}
    assert counts == {"data": 2, "forward": 4, "backward": 4, "update": 2}  # two micro batches make an update


def test_profiling_does_not_change_the_run(tmp_path: Path) -> None:
    plain = make_trainer(config=config_of(data=ACCUMULATE_TWO)).fit(6)
    watched = make_trainer(config=config_of(data=ACCUMULATE_TWO), callbacks=[StepProfiler(2, tmp_path / "t")]).fit(6)
    assert [record["loss"] for record in plain.metrics] == [record["loss"] for record in watched.metrics]


def test_the_table_shows_each_phase_and_the_rest_as_shares_of_all() -> None:
    table = phase_table({"data": 0.1, "forward": 0.2, "backward": 0.4, "update": 0.1}, 1.0, 10)
    rows = [line.split() for line in table.splitlines()[1:-1]]
    assert rows == [
        ["data", "10.000", "10.0%"],
        ["forward", "20.000", "20.0%"],
        ["backward", "40.000", "40.0%"],
        ["update", "10.000", "10.0%"],
        ["the", "rest", "20.000", "20.0%"],
        ["all", "100.000", "100.0%"],
    ]


def test_a_run_that_ends_within_the_profile_shows_the_steps_that_there_were(tmp_path: Path) -> None:
    profiled(tmp_path / "trace.json", steps=100, target=WARM_UP + 2)
    assert (tmp_path / "trace.json").is_file()


def test_a_run_shorter_than_the_warm_up_writes_no_trace(tmp_path: Path) -> None:
    profiled(tmp_path / "trace.json", steps=2, target=WARM_UP)
    assert not (tmp_path / "trace.json").exists()


def test_a_trace_that_cannot_be_written_does_not_end_the_run(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    profiled(tmp_path / "file/trace.json", steps=1, target=6)


def test_without_a_profiler_a_phase_is_one_object_that_does_nothing() -> None:
    assert phase("data") is phase("update")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert phase("data") is not phase("update")
