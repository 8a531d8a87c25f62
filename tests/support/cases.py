"""Name the case of a loop in the error of a test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def case(*values: object) -> Iterator[None]:
    """Add `values` to any error that the block raises, so that a loop over many cases shows which one failed."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"in the case {', '.join(map(str, values))}")
        raise
