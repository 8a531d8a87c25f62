from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from speedtronic.checkpoint import CheckpointManager
from speedtronic.cli import checkpoints_found, main


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """An output folder with checkpoints of steps 5 and 10."""
    manager = CheckpointManager(tmp_path / "run" / "checkpoints")
    manager.save(5, {"model": {"w": torch.ones(8)}})
    manager.save(10, {"model": {"w": torch.ones(8)}, "metrics": {"loss": 2.0}})
    return tmp_path / "run"


def flip_a_bit(run: Path, step: int) -> None:
    file = run / "checkpoints" / f"step_{step:012d}" / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def verified(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    assert main(["checkpoints", "verify", *arguments]) == code
    return capsys.readouterr().out


def test_the_newest_is_read_whole(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flip_a_bit(saved, 5)
    line = verified(capsys, str(saved))
    assert line.startswith("step_000000000010: sound, ")
    assert line.count("\n") == 1


def test_a_flipped_bit_is_found_and_named(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flip_a_bit(saved, 10)
    line = verified(capsys, str(saved), code=1)
    assert line == (
        "step_000000000010: damaged: model.safetensors is damaged: its contents do not match their checksum\n"
    )


def test_all_are_told_in_a_line_each(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flip_a_bit(saved, 5)
    first, second = verified(capsys, str(saved), "--all", code=1).splitlines()
    assert first.startswith("step_000000000005: damaged: model.safetensors")
    assert second.startswith("step_000000000010: sound")


def test_one_that_is_named_is_read_alone(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flip_a_bit(saved, 10)
    folder = saved / "checkpoints" / "step_000000000005"
    assert verified(capsys, str(folder)).startswith("step_000000000005: sound")
    (folder / "manifest.json").unlink()
    assert "manifest.json is missing" in verified(capsys, str(folder), code=1)


def test_a_config_means_its_run(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(f"run:\n  output_dir: {saved}\n")
    assert verified(capsys, str(config)) == verified(capsys, str(saved / "checkpoints"))


def test_json_has_the_objects_of_the_list(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flip_a_bit(saved, 5)
    found = json.loads(verified(capsys, str(saved), "--all", "--json", code=1))
    main(["checkpoints", "list", str(saved), "--json"])
    listed = json.loads(capsys.readouterr().out)
    assert listed[0]["problem"] is None
    assert "checksum" in found[0]["problem"]
    assert found == [listed[0] | {"problem": found[0]["problem"]}, listed[1]]


@pytest.mark.parametrize("pointer", ["as it is", "missing", "damaged"])
def test_the_newest_is_the_last_that_was_saved_also_when_it_has_lost_its_manifest(
    saved: Path, capsys: pytest.CaptureFixture[str], pointer: str
) -> None:
    latest = saved / "checkpoints" / "latest.json"
    if pointer == "missing":
        latest.unlink()
    elif pointer == "damaged":
        latest.write_text("{")
    assert "step_000000000010: sound" in verified(capsys, str(saved))
    if pointer == "as it is":
        (saved / "checkpoints" / "step_000000000010" / "manifest.json").unlink()
        assert "step_000000000010: damaged: manifest.json is missing" in verified(capsys, str(saved), code=1)


def test_without_the_newest_its_run_is_looked_at(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(saved / "checkpoints" / "step_000000000010")
    assert "step_000000000005: sound" in verified(capsys, str(saved))


def test_nothing_to_verify_is_bad_use(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoints", "verify", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"error: {tmp_path}: there are no checkpoints\n"


def test_a_problem_cannot_steer_the_terminal(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = saved / "checkpoints" / "step_000000000010" / "manifest.json"
    manifest.write_text('{"format": "\\u001b[2J", "\x1b[31m": 1')
    assert "\x1b" not in verified(capsys, str(saved), code=1)


def test_a_bar_shows_how_much_is_read(
    saved: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints_found, "_WORTH_SHOWING", 1)
    assert main(["checkpoints", "verify", str(saved)]) == 0
    assert capsys.readouterr().err == ""  # not on a terminal
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    assert main(["checkpoints", "verify", str(saved)]) == 0
    shown = capsys.readouterr()
    assert "verifying" in shown.err
    assert shown.out.startswith("step_000000000010: sound")


def test_help_answers_without_torch() -> None:
    code = (
        "import sys\nfrom speedtronic.cli import main\n"
        "for action in ('list', 'verify', 'export'):\n    main(['checkpoints', action, '--help'])\n"
        "sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
