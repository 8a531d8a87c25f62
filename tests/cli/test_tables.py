from __future__ import annotations

import pytest

from speedtronic.cli.tables import age, write_table

HEADINGS = ("NODE", "STEP")
ROWS = [("[bold]anna", "7"), ("b", "1200")]


def test_a_table_is_plain_columns_where_no_terminal_is(capsys: pytest.CaptureFixture[str]) -> None:
    write_table(HEADINGS, ROWS)

    assert capsys.readouterr().out == "NODE        STEP\n[bold]anna  7\nb           1200\n"


def test_a_table_has_a_frame_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)

    write_table(HEADINGS, ROWS)

    table = capsys.readouterr().out
    assert "NODE" in table.splitlines()[1]
    assert "│ [bold]anna │ 7    │" in table


@pytest.mark.parametrize(
    ("seconds", "text"), [(-3, "0s"), (0, "0s"), (59.9, "59s"), (60, "1m"), (7199, "1h"), (86400 * 2, "2d")]
)
def test_an_age_is_told_in_its_largest_unit(seconds: float, text: str) -> None:
    assert age(seconds) == text
