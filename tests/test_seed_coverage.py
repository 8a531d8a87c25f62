"""docs/seed-coverage.md names tests that exist."""

from __future__ import annotations

from tests.test_reliability import NAMED, ROOT, names_in

ROWS = [
    line
    for line in (ROOT / "docs/seed-coverage.md").read_text(encoding="utf-8").splitlines()
    if line.startswith("| ") and not line.startswith("| statement")
]


def test_every_row_names_an_existing_test_or_the_part_it_comes_with() -> None:
    assert len(ROWS) > 50
    for row in ROWS:
        named = NAMED.search(row)
        assert named.group(2) in names_in(named.group(1)) if named else "comes with" in row, row
