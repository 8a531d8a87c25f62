"""docs/seed-coverage.md names tests that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROWS = [
    line
    for line in (ROOT / "docs/seed-coverage.md").read_text(encoding="utf-8").splitlines()
    if line.startswith("| ") and not line.startswith("| statement")
]
NAMED = re.compile(r"`(tests/[\w/]+\.py)` `(test_\w+)`")


@pytest.mark.parametrize("row", ROWS)
def test_every_row_names_an_existing_test_or_the_part_it_comes_with(row: str) -> None:
    named = NAMED.search(row)
    if named is None:
        assert "comes with" in row
        return
    file, test = named.groups()
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    assert test in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
