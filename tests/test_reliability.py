"""docs/reliability.md and docs/diloco.md name tests that exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = {name: (ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("reliability.md", "diloco.md")}
TABLES = re.compile(r"^\|.*\| held by \|\n\|[-|]+\|\n((?:\|.*\n)+)", re.MULTILINE)
ROWS = {name: [row for table in TABLES.findall(page) for row in table.splitlines()] for name, page in PAGES.items()}
NAMED = re.compile(r"`(tests/[\w/]+\.py)` `(test_\w+)`")


@cache
def names_in(file: str) -> set[str]:
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("row", [row for rows in ROWS.values() for row in rows])
def test_every_row_names_the_test_that_holds_it(row: str) -> None:
    named = NAMED.findall(row)
    assert named
    assert len(named) == row.count("`tests/")
    assert [(file, test) for file, test in named if test not in names_in(file)] == []


@pytest.mark.parametrize("page", PAGES)
def test_every_test_named_elsewhere_on_a_page_exists(page: str) -> None:
    assert [(file, test) for file, test in NAMED.findall(PAGES[page]) if test not in names_in(file)] == []


def test_the_pages_have_their_tables() -> None:
    assert len(ROWS["reliability.md"]) > 50
    assert len(ROWS["diloco.md"]) > 15
