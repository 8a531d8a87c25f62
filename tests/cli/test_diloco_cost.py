"""`speedtronic diloco cost`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from speedtronic.cli import main
from tests.support.configs import tiny


@pytest.fixture
def config(tmp_path: Path) -> Path:
    sections: dict[str, Any] = tiny(
        tmp_path / "run",
        run={"max_steps": 2000},
        distributed={"repo_id": "s3://bucket/x", "inner_steps": 100, "poll_interval": 60.0},
    )
    file = tmp_path / "config.yaml"
    file.write_text(json.dumps(sections), encoding="utf-8")  # JSON is YAML
    return file


def test_the_load_of_a_store_is_told_without_asking_it(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diloco", "cost", str(config), "--nodes", "4", "--hours", "10", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["deltas"], told["versions"]) == (8.0, 4.0)
    assert told["requests"]["put"] == 8 + 3 * 4
    assert min(told["weights_bytes"], told["momentum_bytes"], told["delta_bytes"]) > 4 * 16 * 64
    assert told["commits_in_one"] == 12.0

    assert main(["diloco", "cost", str(config), "distributed.quorum=1", "--nodes", "4", "--hours", "10"]) == 0
    said = capsys.readouterr().out
    assert [line.split() for line in said.splitlines() if line.startswith("versions ")] == [["versions", "8", "80"]]
    assert "16 if all nodes write to one" in said
    assert "raise distributed.inner_steps" not in said


def test_too_many_commits_are_met_on_paper(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diloco", "cost", str(config), "--nodes", "20", "--hours", "1"]) == 0
    assert "more than 100; raise distributed.inner_steps" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--nodes", "0", "--hours", "1"], "--nodes must be a whole number over 0, not 0"),
        (["--nodes", "1.5", "--hours", "1"], "--nodes must be a whole number over 0, not 1.5"),
        (["--nodes", "2", "--hours", "soon"], "--hours must be a number over 0, not soon"),
    ],
)
def test_a_wrong_number_is_refused(
    config: Path, words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["diloco", "cost", str(config), *words]) == 2
    assert says in capsys.readouterr().err
