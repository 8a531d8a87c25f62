"""The rank that does not come is named, with its step and what it does there."""

from __future__ import annotations

import pytest

from speedtronic.parallel.watch import Line, Watch, diagnosis


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Store(dict[str, str]):
    """Of one process; `during` is called at each line, as time passes for the other ranks."""

    def set(self, key: str, value: str) -> None:
        self[key] = value

    def get(self, key: str) -> bytes:  # type: ignore[override]
        return self[key].encode()

    def check(self, keys: list[str]) -> bool:
        return all(key in self for key in keys)


@pytest.fixture
def store() -> Store:
    return Store()


def watches(store: Store, clock: Clock, size: int = 2) -> list[Watch]:
    # An interval of 0.01 s in the end, which the test waits for twice.
    return [Watch(store, rank, size, 0.08, clock=clock) for rank in range(size)]


def test_a_rank_that_says_nothing_any_more_is_named_with_its_last_place(store: Store) -> None:
    clock = Clock()
    waits, stopped = watches(store, clock)
    stopped.note("step 12, its data")
    stopped.look()
    waits.note("step 12")
    with waits.waiting("a sum"):
        assert waits.look() is None
        clock.now = 0.06
        message = waits.look()
    assert message == (
        "rank 0 has waited for 0 s at step 12, waiting for a sum: rank 1 does not answer any more, and was last at "
        "step 12, its data (parallel.timeout)"
    )


def test_a_rank_that_has_never_come_is_named(store: Store) -> None:
    clock = Clock()
    waits, _ = watches(store, clock)
    with waits.waiting("a sum"):
        clock.now = 0.06
        message = waits.look()
    assert message is not None
    assert "rank 1 has never answered" in message


def test_a_wait_that_ends_accuses_nobody(store: Store) -> None:
    clock = Clock()
    waits, _ = watches(store, clock)
    with waits.waiting("a sum"):
        clock.now = 0.04
        assert waits.look() is None
    clock.now = 1.0
    assert waits.look() is None


def test_a_rank_that_is_busy_elsewhere_is_told_from_those_that_wait() -> None:
    lines = {
        0: Line(9, "step 7", "a sum"),
        1: Line(9, "step 7, its data", None),
        2: Line(9, "step 7", "a sum"),
    }
    message = diagnosis(0, 600.0, range(3), lines, set())
    assert "rank 1 is still at step 7, its data" in message
    assert "rank 2" not in message


def test_ranks_that_wait_for_different_things_are_all_shown() -> None:
    lines = {0: Line(9, "step 7", "a sum"), 1: Line(9, "step 7", "a value of rank 0")}
    message = diagnosis(0, 600.0, range(2), lines, set())
    assert "rank 1 waits too, at step 7, waiting for a value of rank 0" in message
    assert "each waits for something else" in message
