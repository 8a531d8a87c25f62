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
    manager.save(10, {"metrics": {"loss": 2.25, "eval_loss": 2.5}})
    os.truncate(path / "state.json", 1)
    return tmp_path / "run"


def listed(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    assert main(["checkpoints", "list", *arguments]) == code
    return capsys.readouterr().out


def test_the_table_tells_step_losses_and_status(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    heading, first, second = listed(capsys, str(saved)).splitlines()
    assert heading.split() == ["STEP", "AGE", "SIZE", "LOSS", "EVAL", "LOSS", "RUN", "STATUS", "FOLDER"]
    assert first.split()[0] == "5"
    assert "3.5000" in first
    assert "damaged: state.json has 1 bytes" in first
    assert second.split()[:2] == ["*", "10"]
    assert second.split()[5:7] == ["2.2500", "2.5000"]
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
    assert (second["step"], second["loss"], second["eval_loss"], second["problem"]) == (10, 2.25, 2.5, None)
    assert len(second["run_id"]) == 32
    assert first["problem"].startswith("state.json has 1 bytes")
    assert (first["newest"], second["newest"]) == (False, True)
    fields = ["step", "path", "size_bytes", "time", "run_id", "loss", "eval_loss", "newest", "problem"]
    assert list(first) == list(second) == fields


def test_the_help_describes_every_field(capsys: pytest.CaptureFixture[str], saved: Path) -> None:
    fields = json.loads(listed(capsys, str(saved), "--json"))[0]
    text = listed(capsys, "--help")
    assert not [field for field in fields if field not in text]


def test_one_checkpoint_is_listed_alone(
    saved: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = saved / "checkpoints" / "step_000000000010"
    by_name = json.loads(listed(capsys, str(folder), "--json"))
    monkeypatch.chdir(folder)
    by_dot = json.loads(listed(capsys, ".", "--json"))
    assert [entry["step"] for entry in by_name] == [10]
    assert by_dot == by_name
    assert by_name[0]["newest"]


def test_the_one_that_is_loaded_next_is_that_of_the_last_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    CheckpointManager(tmp_path).save(900, {})
    CheckpointManager(tmp_path).save(10, {})
    newest = [entry["step"] for entry in json.loads(listed(capsys, str(tmp_path), "--json")) if entry["newest"]]
    assert newest == [10]


def test_an_empty_folder_is_said_to_be_empty(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoints", "list", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"error: {tmp_path}: there are no checkpoints\n"


def test_a_path_that_is_not_there_is_one_clear_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoints", "list", str(tmp_path / "absent")]) == 2
    assert capsys.readouterr().err == f"error: {tmp_path / 'absent'}: there is no such folder or config\n"


def test_checkpoints_of_version_2_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "step_100.pt").write_bytes(b"\x80\x02")
    for path in (tmp_path, tmp_path / "step_100.pt"):
        assert main(["checkpoints", "list", str(path)]) == 2
        assert "checkpoints of version 2.0 (step_100.pt)" in capsys.readouterr().err


def test_a_checkpoint_without_a_manifest_is_listed(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (saved / "checkpoints" / "step_000000000010" / "manifest.json").unlink()
    assert "damaged: manifest.json is missing" in listed(capsys, str(saved), code=1)


def test_a_folder_that_cannot_be_read_is_one_clear_message(
    saved: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "iterdir", refuse)
    assert main(["checkpoints", "list", str(saved)]) == 2
    assert capsys.readouterr().err == f"error: {saved / 'checkpoints'}: cannot be read: Permission denied\n"
