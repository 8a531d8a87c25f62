"""A plan says what was chosen and why; it becomes a configuration, a table and a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from speedtronic.config import SpeedtronicConfig
from speedtronic.errors import ConfigError
from speedtronic.tuning.plan import Choices, Measured, Plan, fastest, read_plan

BASE = Choices(micro_batch_size=2)
ROWS = (
    Measured(choices=BASE, step_seconds=0.010),
    Measured(choices=BASE.but(merged=4), step_seconds=0.006),
    Measured(choices=BASE.but(merged=4, compile=True), step_seconds=0.003, start_seconds=12.0),
    Measured(choices=BASE.but(merged=8), step_seconds=None, note="out of memory"),
)
PLAN = Plan(choices=ROWS[1].choices, base=BASE, target=100, machine={"cores": "2"}, key="k", measured=ROWS)


@pytest.mark.parametrize(("steps", "row"), [(100, 1), (3_900, 1), (4_500, 2), (10**6, 2)])
def test_the_fastest_way_depends_on_how_long_the_run_is(steps: int, row: int) -> None:
    assert fastest(ROWS, steps) == ROWS[row]
    assert PLAN.for_steps(steps, steps).choices == ROWS[row].choices


def test_the_earlier_way_stays_where_another_is_faster_by_less_than_the_noise() -> None:
    close = Measured(choices=BASE.but(threads=1), step_seconds=0.0098)
    assert fastest([ROWS[0], close], 1000) == ROWS[0]


def test_what_could_not_be_measured_is_never_chosen_before_what_was() -> None:
    failed = Measured(choices=BASE, step_seconds=None)
    assert fastest([failed, ROWS[1]], 10) == ROWS[1]
    assert fastest([failed, ROWS[3]], 10) == failed


def test_choices_become_a_configuration_and_leave_the_given_one_alone() -> None:
    config = SpeedtronicConfig(data={"micro_batch_size": 2, "target_batch_size": 8})
    before = config.to_dict()
    chosen = Choices.of(config).but(
        micro_batch_size=4, threads=1, precision="bf16", fused=False, compile=True, compile_mode="max-autotune"
    )
    applied = chosen.applied_to(config)
    assert Choices.of(applied) == chosen
    assert (applied.accumulation_steps, config.to_dict()) == (2, before)
    same = Choices.of(config).applied_to(config)
    assert (same.to_dict(), same.given()) == (before, config.given())


def test_choices_that_do_not_fit_the_configuration_are_an_error() -> None:
    config = SpeedtronicConfig(data={"micro_batch_size": 2, "target_batch_size": 8})
    with pytest.raises(ConfigError, match="must be a multiple of data.micro_batch_size"):
        Choices.of(config).but(micro_batch_size=3).applied_to(config)


def test_the_table_shows_each_way_and_marks_the_chosen_one() -> None:
    assert PLAN.table().splitlines() == [
        "   ms/step  start s  how",
        "     10.00      0.0  as configured",
        "*     6.00      0.0  merged=4",
        "      3.00     12.0  merged=4, compile=true",
        "         –      0.0  merged=8 (out of memory)",
    ]
    assert PLAN.speedup == pytest.approx(10 / 6)
    assert PLAN.model_copy(update={"measured": ()}).speedup is None


def test_a_plan_is_the_same_after_a_file(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(PLAN.to_json(), encoding="utf-8")
    assert read_plan(tmp_path / "plan.json") == PLAN
    assert Plan.model_validate(PLAN.model_dump()) == PLAN


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot read the plan .*plan.json"),
        ("{", "is no plan of this version"),
        ('{"version": 2}', "is no plan of this version .*speedtronic tune CONFIG -o FILE.json"),
        (PLAN.to_json().replace('"merged": 4', '"merged": 0', 1), "choices.merged: .*greater than or equal to 1"),
        (PLAN.to_json().replace('"merged"', '"marged"', 1), "choices.marged: Extra inputs"),
    ],
)
def test_what_is_no_plan_is_one_clear_error(tmp_path: Path, content: Any, message: str) -> None:
    if content is not None:
        (tmp_path / "plan.json").write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        read_plan(tmp_path / "plan.json")
