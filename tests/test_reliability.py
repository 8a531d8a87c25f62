"""docs/reliability.md names tests that exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/reliability.md").read_text(encoding="utf-8")
ROWS = [line for line in PAGE.splitlines() if line.startswith("| ") and not line.endswith("| held by |")]
NAMED = re.compile(r"`(tests/[\w/]+\.py)` `(test_\w+)`")


@cache
def names_in(file: str) -> set[str]:
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("row", ROWS)
def test_every_row_names_the_test_that_holds_it(row: str) -> None:
    named = NAMED.findall(row)
    assert named
    assert len(named) == row.count("`tests/")
    assert [(file, test) for file, test in named if test not in names_in(file)] == []


def test_every_test_named_elsewhere_on_the_page_exists() -> None:
    assert [(file, test) for file, test in NAMED.findall(PAGE) if test not in names_in(file)] == []


def test_the_page_has_both_tables() -> None:
    assert len(ROWS) > 50
