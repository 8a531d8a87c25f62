"""What was measured is kept, a line a time, and can be drawn."""

from __future__ import annotations

import re
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

from speedtronic.bench.figures import Figure, Outcome
from speedtronic.bench.history import Record, draw, panels, read, versions
from speedtronic.errors import DataError, MissingExtraError

MACHINE = {"device": "cpu", "processor": "some processor", "cores": "2", "threads": "2"}


def record(day: int, value: float, *, quick: bool = False, cores: str = "2") -> Record:
    figures = (Figure(name="a ÷ b", rounds=(value,), at_most=1.0), Figure(name="no goal", rounds=(1.0,)))
    return Record(
        date=datetime(2026, 12, day, tzinfo=UTC),
        quick=quick,
        versions={"torch": "2.13.0"},
        machine=MACHINE | {"cores": cores},
        rows={"row": Outcome(figures=figures), "card": Outcome(left_out="needs a card")},
    )


def test_records_come_back_as_they_were(tmp_path: Path) -> None:
    written = [record(1, 0.5), record(2, 0.7, quick=True)]
    file = tmp_path / "history.jsonl"
    file.write_text("".join(f"{each.line()}\n" for each in written), encoding="utf-8")
    assert read(file) == written


def test_a_line_that_is_no_record_is_named(tmp_path: Path) -> None:
    file = tmp_path / "history.jsonl"
    file.write_text(record(1, 0.5).model_dump_json() + '\n{"date": "today"}\n', encoding="utf-8")
    with pytest.raises(DataError, match=r"history\.jsonl: line 2 is no record .* remove it"):
        read(file)


def test_a_history_that_is_not_there_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot read the history .*absent"):
        read(tmp_path / "absent.jsonl")


def test_a_panel_is_a_figure_with_a_goal_and_a_line_a_machine() -> None:
    drawn = panels([record(1, 0.5), record(2, 9.0, quick=True), record(3, 0.7), record(3, 0.4, cores="8")])
    ((title, (goal, series)),) = drawn.items()
    assert (title, goal) == ("row: a ÷ b, goal ≤ 1", 1.0)
    assert {machine: [value for _, value in points] for machine, points in series.items()} == {
        "cpu, some processor, 2 cores, 2 threads": [0.5, 0.7],
        "cpu, some processor, 8 cores, 2 threads": [0.4],
    }


def test_versions_are_of_what_is_installed() -> None:
    assert versions().keys() >= {"speedtronic", "python", "torch", "numpy"}


def test_a_history_without_figures_cannot_be_drawn(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="measure first"):
        draw([record(1, 0.5, quick=True)], tmp_path / "plot.svg")


def test_a_drawing_without_matplotlib_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtraError, match=r"speedtronic\[plot\]"):
        draw([record(1, 0.5)], tmp_path / "plot.svg")


@pytest.mark.slow
def test_the_same_history_is_drawn_as_the_same_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is an extra: speedtronic[plot]")
    monkeypatch.setenv("MPLCONFIGDIR", str(tmp_path / "matplotlib"))
    records = [record(1, 0.5), record(3, 0.7), record(3, 0.4, cores="8")]
    for name in ("one.svg", "two.svg"):
        draw(records, tmp_path / name)
    drawing = (tmp_path / "one.svg").read_text(encoding="utf-8")
    assert drawing == (tmp_path / "two.svg").read_text(encoding="utf-8")
    assert re.search(r"row: a ÷ b, goal ≤ 1", drawing)
    assert "some processor, 8 cores" in drawing
