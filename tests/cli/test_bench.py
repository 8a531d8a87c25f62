"""`speedtronic bench` prints its rows, keeps them in a history, and draws it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from speedtronic.bench.figures import Figure, Outcome, Settings
from speedtronic.bench.history import read
from speedtronic.cli import bench, main

OUTCOMES = {
    "overhead": Outcome(figures=(Figure(name="time of fit, tiny", rounds=(1.0, 1.01, 1.2), at_most=1.02),)),
    "muon": Outcome(figures=(Figure(name="Muon ÷ torch", rounds=(0.9,), at_most=0.7),)),
    "card": Outcome(left_out="needs a card"),
    "data": Outcome(failed="RuntimeError: broken"),
}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Settings]:
    settings: list[Settings] = []

    def measure(name: str, given: Settings) -> Outcome:
        settings.append(given)
        return OUTCOMES[name]

    monkeypatch.setattr(bench, "measure", measure)
    return settings


def test_each_figure_has_its_spread_and_says_whether_the_goal_is_met(
    asked: list[Settings], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "--only", "overhead", "muon", "card", "--rounds", "3"]) == 0
    out = capsys.readouterr().out
    assert "1.010  (1 … 1.2)" in out
    assert "goal ≤ 1.02: met" in out
    assert "goal ≤ 0.7: missed" in out
    assert "left out: needs a card" in out
    assert [settings.rounds for settings in asked] == [3, 3, 3]


def test_a_row_that_fails_lets_the_others_run_and_the_exit_code_is_1(
    asked: list[Settings], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "--only", "data", "overhead"]) == 1
    out = capsys.readouterr().out
    assert "failed: RuntimeError: broken" in out
    assert "time of fit, tiny" in out


def test_a_line_of_json_has_date_versions_machine_and_rows_and_is_appended(
    asked: list[Settings], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "folder" / "history.jsonl"
    for only in ("overhead", "card"):
        assert main(["bench", "--only", only, "--quick", "--json", "--history", str(file)]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert file.read_text(encoding="utf-8").splitlines() == printed
    first, second = read(file)
    assert first.rows == {"overhead": OUTCOMES["overhead"]}
    assert second.rows == {"card": OUTCOMES["card"]}
    assert first.quick
    assert first.machine.keys() == {"device", "processor", "cores", "threads"}
    assert json.loads(printed[0])["versions"]["torch"]


def test_ctrl_c_keeps_what_was_measured_before_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(name: str, given: Settings) -> Outcome:
        if name == "muon":
            raise KeyboardInterrupt
        return OUTCOMES[name]

    monkeypatch.setattr(bench, "measure", measure)
    file = tmp_path / "history.jsonl"
    assert main(["bench", "--only", "overhead", "muon", "--history", str(file)]) == 130
    assert [record.rows.keys() for record in read(file)] == [{"overhead"}]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--only overhaed", "did you mean overhead?"),
        ("--rounds 0", "--rounds: 0 is no number of rounds"),
        ("--plot plot.svg", "--history"),
        ("--plot plot.svg --history absent.jsonl", "cannot read the history absent.jsonl"),
        ("--only card --history .", "cannot write the history ."),
    ],
)
def test_bad_use_is_one_clear_error(
    words: str,
    said: str,
    asked: list[Settings],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    try:
        code = main(["bench", *words.split()])
    except SystemExit as stop:
        code = stop.code  # type: ignore[assignment]  # argparse ends with a number
    assert code == 2
    assert said in capsys.readouterr().err
    assert not asked
