"""Each row measures what it says, and what a row lacks or breaks stays with that row."""

from __future__ import annotations

import ast
import math
import subprocess
from pathlib import Path

import pytest

import speedtronic.bench
from speedtronic.bench import rows, scripts
from speedtronic.bench.figures import Figure, Outcome, Settings
from speedtronic.bench.rows import ROWS, measure, measure_here

FOLDER = Path(speedtronic.bench.__file__).parent
# Those that a quick form leaves out wherever the repository's own environment is.
LEFT_OUT = {"time-to-loss", "peers", "card", "tune-bf16"}


def test_each_row_has_its_function() -> None:
    for row in ROWS.values():
        module, function = row.function.split(":")
        tree = ast.parse((FOLDER / f"{module}.py").read_text(encoding="utf-8"))
        assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_a_row_that_lacks_something_says_what() -> None:
    assert "gpu_check.sh" in (measure_here("card", Settings()).left_out or "")
    assert "--text" in (measure_here("time-to-loss", Settings()).left_out or "")


def test_scripts_are_run_only_in_the_repository(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "diloco.py").write_text("raise SystemExit('strange')", encoding="utf-8")
    monkeypatch.setattr(scripts, "SOURCE", tmp_path / "site-packages")
    monkeypatch.setattr(scripts, "BENCHMARKS", tmp_path / "benchmarks")
    assert "of the repository" in (measure_here("diloco", Settings()).left_out or "")


def test_a_row_whose_process_fails_keeps_the_last_line_of_its_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 1, None, "Traceback\n  a line\nRuntimeError: the texts differ\n")

    monkeypatch.setattr(rows.subprocess, "run", fails)
    assert measure("overhead", Settings()) == Outcome(failed="RuntimeError: the texts differ")
    assert "a line" in capsys.readouterr().err


def test_a_row_whose_process_is_killed_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    killed = subprocess.CompletedProcess([], -9, None, "")
    monkeypatch.setattr(rows.subprocess, "run", lambda *_, **__: killed)
    assert measure("overhead", Settings()) == Outcome(failed="its process ended with -9")


def test_the_time_to_a_loss_is_measured_with_n_gram_tables_and_without(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, ...]] = []
    monkeypatch.setattr(scripts, "_records", lambda *words: asked.append(words) or [{"ratios": [0.1, 0.3, 0.2]}])
    figures = measure_here("time-to-loss", Settings(text=Path("text.txt"), rounds=3)).figures
    assert [(figure.value, figure.at_most) for figure in figures] == [(0.2, 1 / 8), (0.2, 1 / 4)]
    assert all(words[:5] == ("time_to_loss.py", "--text", "text.txt", "--seeds", "3") for words in asked)
    assert [words[5:] for words in asked] == [(), ("model.ngram_order=1", "run.max_steps=300")]


def test_a_training_that_never_reaches_the_loss_has_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scripts, "_records", lambda *_: [{"ratios": [0.1, math.inf]}])
    with pytest.raises(RuntimeError, match="n-gram tables ended above"):
        measure_here("time-to-loss", Settings(text=Path("text.txt")))


def test_other_trainers_are_measured_where_they_are_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scripts, "find_spec", lambda name: None if name == "lightning" else object())
    assert "needs lightning: `make bench-peers`" in (measure_here("peers", Settings()).left_out or "")
    monkeypatch.setattr(scripts, "find_spec", lambda name: object())
    figure = Figure(name="fit ÷ Lightning, tiny", rounds=(1.5,), at_least=2.8)
    monkeypatch.setattr(scripts, "_records", lambda *_: [figure.model_dump()])
    assert measure_here("peers", Settings()).figures == (figure,)


@pytest.mark.slow
@pytest.mark.parametrize("name", ROWS)
def test_each_row_is_measured_in_its_quick_form(name: str) -> None:
    outcome = measure(name, Settings(quick=True))
    assert outcome.failed is None
    assert (outcome.left_out is None) == bool(outcome.figures)
    assert outcome.figures or name in LEFT_OUT, outcome.left_out
    for figure in outcome.figures:
        assert all(math.isfinite(value) and value >= 0 for value in figure.rounds), figure
