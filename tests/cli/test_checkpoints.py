from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from speedtronic.checkpoint import CheckpointManager
from speedtronic.cli import main


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """An output folder with two checkpoints, the older one cut short."""
    manager = CheckpointManager(tmp_path / "run" / "checkpoints")
    path = manager.save(5, {"metrics": {"loss": 3.5}})
    manager.save(10, {"metrics": {"loss": 2.25}})
    os.truncate(path / "state.json", 1)
    return tmp_path / "run"


def listed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["checkpoints", "list", *arguments]) == 0
    return capsys.readouterr().out


def test_the_table_tells_step_loss_and_status(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    heading, first, second = listed(capsys, str(saved)).splitlines()
    assert heading.split() == ["STEP", "AGE", "SIZE", "LOSS", "RUN", "STATUS", "FOLDER"]
    assert first.split()[0] == "5"
    assert "3.5000" in first
    assert "damaged: state.json has 1 bytes" in first
    assert second.split()[0] == "10"
    assert "complete" in second
    assert second.endswith("step_000000000010")


def test_the_checkpoints_folder_itself_and_a_config_are_the_same(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(f"run:\n  output_dir: {saved}\n")
    outputs = {listed(capsys, str(path), "--json") for path in (saved, saved / "checkpoints", config)}
    assert len(outputs) == 1


def test_json_is_an_array_of_objects(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = json.loads(listed(capsys, str(saved), "--json"))
    assert second["step"] == 10
    assert second["loss"] == 2.25
    assert second["problem"] is None
    assert len(second["run_id"]) == 32
    assert first["problem"].startswith("state.json has 1 bytes")


def test_an_empty_folder_is_said_to_be_empty(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert listed(capsys, str(tmp_path)) == f"no checkpoints in {tmp_path}\n"
    assert listed(capsys, str(tmp_path), "--json") == "[]\n"


def test_a_path_that_is_not_there_is_one_clear_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoints", "list", str(tmp_path / "absent")]) == 2
    assert capsys.readouterr().err == f"error: {tmp_path / 'absent'}: there is no such folder or config\n"


def test_a_checkpoint_without_a_manifest_is_listed(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (saved / "checkpoints" / "step_000000000010" / "manifest.json").unlink()
    assert "damaged: manifest.json is missing" in listed(capsys, str(saved))
