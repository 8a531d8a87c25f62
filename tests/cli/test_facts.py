from __future__ import annotations

import pytest

from speedtronic.cli.facts import counted, write_facts

FACTS = [("folder", "data/[bold]corpus"), ("tokens", "1,234")]


def test_facts_are_plain_lines_where_no_terminal_is(capsys: pytest.CaptureFixture[str]) -> None:
    write_facts(FACTS)

    assert capsys.readouterr().out == "folder: data/[bold]corpus\ntokens: 1,234\n"


def test_facts_are_a_table_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)

    write_facts(FACTS)

    table = capsys.readouterr().out
    assert "│ folder │ data/[bold]corpus │" in table
    assert "│ tokens │ 1,234             │" in table


def test_a_number_of_things_is_told_in_words() -> None:
    assert [counted(number, "file") for number in (0, 1, 1200)] == ["0 files", "1 file", "1,200 files"]
