"""Tables of what a command lists: framed on a terminal, in plain columns elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from speedtronic.cli import output


def write_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Write rows of texts under their headings. Raises as `output.write` does."""
    output.write(_framed(headings, rows) if sys.stdout.isatty() else _plain(headings, rows))


def age(seconds: float) -> str:
    """A duration as its largest unit: `5s`, `12m`, `3h`, `2d`."""
    for length, letter in ((86400, "d"), (3600, "h"), (60, "m")):
        if seconds >= length:
            return f"{int(seconds // length)}{letter}"
    return f"{max(0, int(seconds))}s"


def _plain(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    table = [headings, *rows]
    widths = [max(len(row[column]) for row in table) for column in range(len(headings))]
    lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in table]
    return "\n".join(lines) + "\n"


def _framed(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table()
    for heading in headings:
        table.add_column(Text(heading))
    for row in rows:
        table.add_row(*map(Text, row))
    console = Console(markup=False, highlight=False)
    with console.capture() as captured:
        console.print(table)
    return captured.get()
