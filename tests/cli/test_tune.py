"""`speedtronic tune` prints a table, keeps the plan, and writes it to a file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from speedtronic import runtime
from speedtronic.cli import main
from speedtronic.tuning import Choices, Measured, Plan, cache
from speedtronic.tuning.plan import read_plan

BASE = Choices(micro_batch_size=1)
ROWS = (Measured(choices=BASE, step_seconds=0.02), Measured(choices=BASE.but(merged=2), step_seconds=0.01))
PLAN = Plan(choices=ROWS[1].choices, base=BASE, target=50, machine={}, key="k", measured=ROWS)


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPEEDTRONIC_CACHE", str(tmp_path / "cache"))
    devices: list[str] = []
    monkeypatch.setattr(runtime, "tune_from_config", lambda config: devices.append(config.run.device) or PLAN)
    file = tmp_path / "c.yaml"
    file.write_text(f"run: {{output_dir: {tmp_path}}}\n", encoding="utf-8")
    return file


def test_the_table_says_what_was_measured_and_what_is_fastest(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", str(source), "--device", "cpu"]) == 0
    assert capsys.readouterr().out == f"{PLAN.table()}\nfor 50 updates: merged=2, 2.00 times as fast\n"
    assert cache.load("k") == PLAN


def test_the_plan_is_printed_as_json_and_written_to_a_file(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tune", str(source), "--json", "-o", str(tmp_path / "p.json")]) == 0
    assert json.loads(capsys.readouterr().out)["choices"]["merged"] == 2
    assert read_plan(tmp_path / "p.json") == PLAN


def test_a_file_or_a_cache_that_cannot_be_written_is_said(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tune", str(source), "-o", str(tmp_path / "absent" / "p.json")]) == 2
    assert "cannot write the plan to" in capsys.readouterr().err
    monkeypatch.setenv("SPEEDTRONIC_CACHE", str(source))
    assert main(["tune", str(source)]) == 0
    assert "warning: the plan could not be kept in the cache" in capsys.readouterr().err


def test_a_configuration_of_which_nothing_can_be_measured_is_a_failure(
    source: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failed = PLAN.model_copy(update={"measured": (Measured(choices=BASE, step_seconds=None, note="ValueError: no"),)})
    monkeypatch.setattr(runtime, "tune_from_config", lambda config: failed)
    assert main(["tune", str(source)]) == 1
    assert "ValueError: no" in capsys.readouterr().out
    assert cache.load("k") is None
