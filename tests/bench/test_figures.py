"""Contenders take turns, and a figure is the median of the ratios of its rounds."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from pydantic import ValidationError

from speedtronic.bench.figures import Figure, Settings, interleaved, ratios


def test_all_contenders_take_part_in_each_round_and_another_one_begins_it() -> None:
    order: list[str] = []

    def contender(name: str, seconds: list[float]) -> Callable[[], float]:
        def once() -> float:
            order.append(name)
            return seconds.pop(0)

        return once

    found = interleaved(
        {"a": contender("a", [1.0, 2.0]), "b": contender("b", [4.0, 6.0]), "c": contender("c", [0, 0])}, 2
    )
    assert "".join(order) == "abcbca"
    assert found == {"a": [1.0, 2.0], "b": [4.0, 6.0], "c": [0, 0]}
    assert ratios(found["b"], found["a"]) == (4.0, 3.0)


def test_a_figure_is_the_median_of_ratios_and_no_ratio_of_medians() -> None:
    figure = Figure(name="a ÷ b", rounds=ratios([1.0, 10.0, 100.0], [1.0, 100.0, 10.0]))
    assert figure.value == 1.0
    assert Figure(name="a", rounds=(1.0, 2.0)).value == 1.5


@pytest.mark.parametrize(
    ("goal", "met"),
    [
        ({}, True),
        ({"at_most": 2.0}, True),
        ({"at_most": 1.9}, False),
        ({"at_least": 2.0}, True),
        ({"at_least": 2.1}, False),
    ],
)
def test_a_goal_is_a_bound_that_the_median_keeps(goal: dict[str, float], met: bool) -> None:
    figure = Figure(name="a", rounds=(1.0, 2.0, 9.0), **goal)
    assert figure.met is met
    assert figure.goal == next(iter(goal.values()), None)


def test_a_figure_without_a_round_is_refused() -> None:
    with pytest.raises(ValidationError):
        Figure(name="a", rounds=())


def test_rounds_are_those_asked_for_else_one_of_a_quick_row_else_its_own() -> None:
    assert Settings().rounds_or(7) == 7
    assert Settings(quick=True).rounds_or(7) == 1
    assert Settings(quick=True, rounds=3).rounds_or(7) == 3
