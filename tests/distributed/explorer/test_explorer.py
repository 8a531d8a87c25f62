"""The protocol under thousands of schedules, and the explorer under protocols that lack a rule."""

from __future__ import annotations

import re

import pytest

from tests.distributed.explorer.campaign import many, several, story
from tests.distributed.explorer.mutants import MUTANTS

SCHEDULES = 2000
JOBS = 2
TROUBLES = (
    *("lost", "repeated", "failed", "late", "doubled", "torn", "no space", "crash", "new disk"),
    *("vanished", "stray head", "stray head removed", "forged", "junk", "nan", "wrong expected_nodes"),
)


def test_no_random_schedule_loses_or_doubles_anything() -> None:
    assert several(range(25)).failure is None


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_no_schedule_of_two_thousand_loses_or_doubles_anything() -> None:
    tally = many(range(SCHEDULES), JOBS)
    assert tally.failure is None
    assert tally.schedules == SCHEDULES
    assert tally.deltas > 2 * SCHEDULES, "there was something to lose"
    assert all(tally.troubles[trouble] > 100 for trouble in TROUBLES), tally.troubles
    assert tally.troubles["forgotten"] > 50, "manifests had no room for a node"


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_the_explorer_catches_a_protocol_that_lacks_one_rule(name: str) -> None:
    failure = several(range(SCHEDULES), name).failure
    assert failure is not None
    assert re.search(MUTANTS[name].noticed_as, failure.message), failure.message


def test_a_seed_always_gives_the_same_schedule() -> None:
    first, second = story(17), story(17)
    assert first == second
    assert first.endswith("all is as it should be")
