"""`train --dry-run` says what a run needs, and leaves no trace of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from speedtronic.cli import main
from tests.support.configs import tiny


def write_config(folder: Path, **sections: Any) -> str:
    path = folder / "my.yaml"
    path.write_text(json.dumps(tiny(folder / "run", **sections)))
    return str(path)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def facts(capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    lines = capsys.readouterr().out.splitlines()
    return dict(line.split(": ", 1) for line in lines)


def test_a_dry_run_says_what_the_run_needs_and_changes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_config(
        tmp_path,
        logging={"json_file": "m.jsonl", "file": "log.txt"},
        callbacks=["no.such.module:callback"],  # none is made
        distributed={"enabled": True, "repo_id": str(tmp_path / "store"), "node_id": "ann"},
        checkpoint={"keep_last": 2},
        eval={"every_steps": 1},
        data={"num_tokens": 6400},
    )
    before = contents(tmp_path)
    assert main(["train", config, "--dry-run", "--max-steps", "100"]) == 0
    assert contents(tmp_path) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["my.yaml"]
    shown = facts(capsys)
    assert "warning" not in shown
    assert shown["device"].startswith(("cpu, fp32", "cuda"))
    assert shown["parameters"] == "4.21k"
    assert shown["the run"].startswith("100 updates, about 0:0")
    assert shown["tokens"].startswith("32 an update")
    # Weights and AdamW's two moments in float32: 12 bytes a parameter, and some that count steps or make randomness.
    amount, unit = shown["a checkpoint"].split()
    assert unit == "kB"
    assert 12 * 4.21 <= float(amount) < 12 * 4.21 + 10
    assert "free at" in shown["disk"]
    assert "peak memory" in shown


def test_a_dry_run_of_a_used_folder_counts_what_is_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = write_config(tmp_path)
    assert main(["train", config]) == 0
    before = contents(tmp_path)
    capsys.readouterr()
    assert main(["train", config, "--dry-run", "--resume", "run.max_steps=7"]) == 0
    assert contents(tmp_path) == before
    shown = capsys.readouterr().out
    assert "the run: 3 updates" in shown
    assert "tokens: 32 an update" in shown


def test_a_dry_run_goes_with_nothing_that_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for options in (["--overwrite"], ["--profile", "2"]):
        assert main(["train", write_config(tmp_path), "--dry-run", *options]) == 2
        assert "--dry-run writes nothing" in capsys.readouterr().err
