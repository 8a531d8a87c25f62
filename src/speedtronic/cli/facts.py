"""What a command has to say at its end: a table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from speedtronic.cli import output


def write_facts(facts: Iterable[tuple[str, str]]) -> None:
    """Write names with their values. Raises as `output.write` does."""
    if not sys.stdout.isatty():
        output.write("".join(f"{name}: {value}\n" for name, value in facts))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(show_header=False)
    for name, value in facts:
        table.add_row(name, value)
    console = Console(markup=False, highlight=False)
    with console.capture() as captured:
        console.print(table)
    output.write(captured.get())


def counted(number: int, noun: str) -> str:
    """`1 file`, `2 files`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
