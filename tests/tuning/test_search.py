"""The search is greedy, keeps its budget, and lets what fails cost that way alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from speedtronic.tuning.plan import Choices, Measured
from speedtronic.tuning.search import BUDGET, Possible, Search

COMPILE_SECONDS = 25.0
BASE = Choices(micro_batch_size=1)


class Imagined:
    """Measures by a formula, on a clock that the measurements move. Infinite seconds are a lack of memory."""

    def __init__(self, seconds: Callable[[Choices], float], start: float = 0.0, data_share: float = 0.0) -> None:
        self.now = 0.0
        self.data_share = data_share
        self.asked: list[dict[str, Any]] = []
        self.steps: list[int] = []
        self._seconds = seconds
        self._start = start

    def __call__(self, choices: Choices, *, steps: int, hopeless: float | None) -> Measured:
        self.asked.append(choices.changes(BASE))
        self.steps.append(steps)
        seconds = self._seconds(choices)
        start = self._start if choices.compile else 0.0
        if seconds == float("inf"):
            return Measured(choices=choices, step_seconds=None, note="out of memory")
        self.now += start + steps * seconds
        return Measured(choices=choices, step_seconds=seconds, start_seconds=start)

    def search(self, possible: Possible, *, steps: int = 10**6, limited: bool = False) -> Search:
        search = Search(self, clock=lambda: self.now, steps=steps, limited=limited)
        self.rows = search.run(BASE, possible)
        return search


def test_the_base_is_measured_first_and_alone_where_there_is_nothing_to_choose() -> None:
    world = Imagined(lambda choices: 1.0)
    assert world.search(Possible()).complete
    assert [row.choices for row in world.rows] == [BASE]


def test_each_choice_is_tried_on_top_of_the_best_so_far() -> None:
    world = Imagined(lambda c: 8.0 / c.merged * (1.2 if c.precision == "bf16" else 1.0) / (2 if c.compile else 1))
    world.search(Possible(merges=True, target_batch_size=4, precisions=("bf16",), compile_modes=(None,)))
    assert world.asked == [
        {},
        {"merged": 2},
        {"merged": 4},
        {"merged": 4, "precision": "bf16"},
        {"merged": 4, "compile": True},
        {},
    ]


def test_a_kind_of_choice_ends_with_the_first_that_is_no_better() -> None:
    world = Imagined(lambda c: {None: 1.0, 4: 0.9, 2: 0.89, 1: 0.1}[c.threads])
    world.search(Possible(threads=(4, 2, 1)))
    assert world.asked == [{}, {"threads": 4}, {"threads": 2}, {}]


def test_a_lack_of_memory_costs_that_way_alone() -> None:
    world = Imagined(lambda c: float("inf") if c.merged == 2 else 1.0 / c.merged)
    world.search(Possible(merges=True, target_batch_size=4))
    assert world.asked == [{}, {"merged": 2}, {"merged": 4}, {}]
    assert [row.note for row in world.rows] == ["", "out of memory", ""]


def test_micro_batches_grow_until_that_helps_no_more_and_shrink_where_the_first_size_does_not_fit() -> None:
    sizes = Possible(target_batch_size=8, larger=(2, 4, 8), smaller=())
    world = Imagined(lambda c: {1: 4.0, 2: 2.0, 4: 1.9, 8: 1.9}[c.micro_batch_size])
    world.search(sizes)
    assert world.asked[:-1] == [{}, *({"micro_batch_size": size} for size in (2, 4, 8))]
    start = Choices(micro_batch_size=4)
    world = Imagined(lambda c: float("inf") if c.micro_batch_size > 1 else 1.0)
    rows = Search(world, clock=lambda: world.now, steps=300, limited=True).run(
        start, Possible(target_batch_size=8, larger=(8,), smaller=(2, 1))
    )
    assert [row.choices.micro_batch_size for row in rows] == [4, 2, 1]


def test_no_more_samples_run_as_one_than_memory_is_likely_to_hold() -> None:
    world = Imagined(lambda c: 1.0 / c.merged)
    world.search(Possible(merges=True, target_batch_size=16, most_samples=5))
    assert world.asked == [{}, {"merged": 2}, {"merged": 4}, {}]


def test_a_base_that_fails_for_another_reason_than_memory_ends_the_search() -> None:
    rows: list[Choices] = []

    def broken(choices: Choices, **options: Any) -> Measured:
        rows.append(choices)
        return Measured(choices=choices, step_seconds=None, note="ValueError: no such shape")

    broken.data_share = 0.0  # type: ignore[attr-defined]  # the protocol's other half
    everything = Possible(merges=True, target_batch_size=4, threads=(1,), compile_modes=(None,))
    found = Search(broken, clock=lambda: 0.0, steps=10**6, limited=True).run(BASE, everything)  # type: ignore[arg-type]
    assert (len(found), rows) == (1, [BASE])


def test_the_base_is_measured_again_at_the_end_and_the_faster_measurement_counts() -> None:
    seconds = iter([5.0, 1.0, 0.8])
    world = Imagined(lambda c: next(seconds))
    world.search(Possible(threads=(1,)))
    assert [row.step_seconds for row in world.rows] == [0.8, 1.0]


def test_a_run_that_cannot_earn_a_compilation_back_does_not_compile() -> None:
    step, possible = (
        0.01,
        Possible(merges=True, target_batch_size=2, compile_modes=(None,), compile_seconds=COMPILE_SECONDS),
    )
    enough = int(COMPILE_SECONDS / BUDGET / step)
    for steps, compiles in ((enough // 2, False), (2 * enough, True)):
        world = Imagined(lambda c: step / c.merged / (2 if c.compile else 1), start=COMPILE_SECONDS)
        search = world.search(possible, steps=steps, limited=True)
        assert ({"merged": 2, "compile": True} in world.asked) is compiles
        assert search.complete is compiles


@pytest.mark.parametrize("steps", [300, 2_000, 50_000, 10**6])
def test_a_search_that_finds_nothing_takes_two_percent_of_the_run_and_one_measurement_at_most(steps: int) -> None:
    world = Imagined(lambda c: 1.0 if c == BASE else 1.1, start=COMPILE_SECONDS)
    everything = Possible(
        merges=True,
        target_batch_size=4,
        threads=(2, 1),
        precisions=("bf16",),
        compile_modes=(None,),
        regional=True,
        unfused=True,
        compile_seconds=COMPILE_SECONDS,
    )
    world.search(everything, steps=steps, limited=True)
    assert world.now <= BUDGET * steps + max(world.steps)


def test_without_a_limit_nothing_is_left_out() -> None:
    world = Imagined(lambda c: 0.001)
    assert world.search(Possible(compile_modes=(None, "reduce-overhead"), regional=True), steps=10).complete
    assert world.asked == [
        {},
        {"compile": True},
        {"compile": True, "compile_mode": "reduce-overhead"},
        {"compile": True, "regional": True},
    ]


@pytest.mark.parametrize(("share", "tried"), [(0.02, []), (0.5, [{"num_workers": 1}, {"num_workers": 2}, {}])])
def test_workers_are_tried_only_where_reading_data_takes_time(share: float, tried: list[Any]) -> None:
    world = Imagined(lambda c: 1.0 / (1 + c.num_workers), data_share=share)
    world.search(Possible(num_workers=(1, 2)))
    assert world.asked == [{}, *tried]


def test_compiled_code_is_tried_with_the_first_number_of_threads_again() -> None:
    world = Imagined(lambda c: (1.0 if c.threads == 1 else 2.0) if not c.compile else (0.5 if c.threads == 1 else 0.3))
    world.search(Possible(threads=(1,), compile_modes=(None,)))
    assert world.asked == [{}, {"threads": 1}, {"threads": 1, "compile": True}, {"compile": True}, {}]
