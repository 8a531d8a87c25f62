"""`speedtronic eval` measures a checkpoint as the run itself did, and nothing else."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from speedtronic.cli import main
from speedtronic.runtime import train_from_config
from tests.support.configs import tiny

METRIC = """
class Count:
    def __init__(self, times=1):
        self.times = times
        self.reset()

    def update(self, preds, target):
        self.seen += self.times * len(target)

    def compute(self):
        return self.seen

    def reset(self):
        self.seen = 0
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Path:
    """The folder of a run of 12 steps, which got worse after the best."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("the cat sat on the mat. " * 60)
    (tmp_path / "other.txt").write_text("a dog ran to the tea. " * 9)
    train_from_config(config())
    capsys.readouterr()
    return tmp_path / "out"


def config() -> dict[str, Any]:
    return tiny(
        "out",
        run={"max_steps": 12, "threads": 1},
        data={"text_path": "text.txt", "validation_fraction": 0.1, "micro_batch_size": 4, "target_batch_size": 4},
        model={"vocab_size": 128, "dropout": 0.1},
        optimizer={"lr": 0.3, "ema": 0.5},
        eval={"every_steps": 4, "sets": {"dogs": {"text_path": "other.txt", "block_size": 8}}},
        checkpoint={"every_steps": 4, "keep_last": None},
        logging={"json_file": "log.jsonl"},
    )


def evaluated(capsys: pytest.CaptureFixture[str], *words: object) -> dict[str, Any]:
    assert main(["eval", *map(str, words), "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def logged(folder: Path) -> dict[int, dict[str, float]]:
    """The loss of each step and set."""
    found: dict[int, dict[str, float]] = {}
    for line in (folder / "log.jsonl").read_text().splitlines():
        record = json.loads(line)
        if record["event"] == "eval":
            found.setdefault(record["step"], {})[record["set"]] = record["loss"]
    return found


def test_a_checkpoint_has_the_losses_that_the_run_measured(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    losses = logged(folder)
    assert list(losses) == [4, 8, 12]
    best = min(losses, key=lambda step: losses[step]["held_out"])
    for words, step in (
        ([folder], 12),
        ([folder, "--best"], best),
        ([folder / "checkpoints"], 12),
        ([folder / "checkpoints" / "step_000000000004"], 4),
    ):
        found = evaluated(capsys, *words)
        assert found["step"] == step
        assert {name: numbers["loss"] for name, numbers in found["sets"].items()} == losses[step]
    files = sorted(str(path) for path in folder.rglob("*"))
    evaluated(capsys, folder)
    assert sorted(str(path) for path in folder.rglob("*")) == files


def test_a_table_shows_each_set_and_texts_come_after_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [str(folder), "eval.samples=2", "eval.prompts=[the]", "eval.sample_tokens=5", "eval.batches=1"]
    assert main(["eval", *words]) == 0
    shown, *texts = capsys.readouterr().out.split("\n---\n")
    step, headings, *rows = shown.splitlines()
    assert step == "step 12"
    assert re.split("  +", headings) == [
        *("SET", "LOSS", "PERPLEXITY", "BITS PER BYTE", "TARGETS", "BATCHES", "DURATION S"),
    ]
    assert [row.split()[0] for row in rows] == ["held_out", "dogs"]
    assert len(texts) == 2
    assert all(text.startswith("the") for text in texts)


def test_other_metrics_and_data_may_be_asked_for(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder.parent / "counting.py").write_text(METRIC)
    metric = "{name: twice, factory: counting:Count, args: {times: 2}}"
    # The YAML's own folder can be imported from.
    yaml = folder.parent / "run.yaml"
    yaml.write_text(json.dumps(config()))
    found = evaluated(capsys, yaml, f"eval.metrics=[{metric}]", "eval.sets={}", "eval.batches=2")
    assert list(found["sets"]) == ["held_out"]
    numbers = found["sets"]["held_out"]
    assert numbers["twice"] == 2 * numbers["targets"]


def test_nothing_that_a_checkpoint_names_is_read_or_imported(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its own configuration has a text and could have plugins; both may be anybody's."""
    alone = folder.parent / "alone"
    (folder / "checkpoints").rename(alone)
    assert main(["eval", str(alone)]) == 2
    assert f"name the YAML it was trained with: CONFIG checkpoint.directory={alone}" in capsys.readouterr().err
    yaml = folder.parent / "run.yaml"
    yaml.write_text(json.dumps(config()))
    found = evaluated(capsys, yaml, f"checkpoint.directory={alone}")
    assert found["sets"]["held_out"]["loss"] == logged(folder)[12]["held_out"]


def test_bad_use_is_one_line_and_exit_code_2(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, said in (
        ([folder, "--tasks", ""], "no task is named"),
        ([folder, "--limit", "3"], "--limit: is for tasks"),
        ([folder, "--tasks", "a", "--limit", "0"], "--limit must be at least 1"),
        ([folder, "data.validation_fraction=0.0", "eval.sets={}", "eval.every_steps=null"], "nothing is held out"),
        ([folder, "eval.monitor=f1", "eval.mode=max"], "eval.monitor: no evaluation has 'f1'"),
        ([folder, "eval.sets.dogs={shards: nowhere}"], "nowhere"),
        ([folder, "eval.metrics=[{name: a, factory: nowhere:Metric}]"], "cannot import 'nowhere'"),
        ([folder, "model.d_model=32"], "another model"),
        ([folder.parent / "nothing"], "nothing"),
    ):
        assert main(["eval", *map(str, words)]) == 2, words
        captured = capsys.readouterr()
        assert said in captured.err, words
        assert captured.out == ""
