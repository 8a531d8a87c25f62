"""What a row measures, and the rule by which: contenders take turns, and a figure is the median of the rounds."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field


class _Plain(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Settings(_Plain):
    """How a row is measured.

    Attributes:
        quick: the smallest sizes and one round, to see that it runs; the figures say nothing.
        rounds: how many; None is the row's own number.
        device: where the rows run that can run on a card.
        text: a text of about a megabyte, for the time to a loss.
    """

    quick: bool = False
    rounds: int | None = Field(default=None, ge=1)
    device: str = "cpu"
    text: Path | None = None

    def rounds_or(self, usual: int) -> int:
        """How many rounds to take, where a row takes `usual` ones by itself."""
        return self.rounds or (1 if self.quick else usual)


class Figure(_Plain):
    """One number, mostly a ratio.

    Attributes:
        name: what it is of, such as `fit ÷ by hand, tiny`.
        rounds: its value in each round.
        at_most, at_least: the goal, where there is one.
    """

    name: str
    rounds: tuple[float, ...] = Field(min_length=1)
    at_most: float | None = None
    at_least: float | None = None

    @property
    def value(self) -> float:
        """The median of the rounds."""
        return statistics.median(self.rounds)

    @property
    def goal(self) -> float | None:
        return self.at_most if self.at_least is None else self.at_least

    @property
    def met(self) -> bool:
        """Whether the goal is reached; True without one."""
        high = self.at_most is not None and self.value > self.at_most
        return not high and (self.at_least is None or self.value >= self.at_least)


class Outcome(_Plain):
    """What came of a row: figures, or the reason why there are none.

    Attributes:
        left_out: what this machine lacks for it.
        failed: what went wrong.
    """

    figures: tuple[Figure, ...] = ()
    left_out: str | None = None
    failed: str | None = None


class LeftOutError(Exception):
    """This machine lacks what a row needs. The message says what."""


Clock = Callable[[], float]
"""Does its work once more, and returns the seconds that it took."""


def interleaved(contenders: Mapping[str, Clock], rounds: int) -> dict[str, list[float]]:
    """The seconds of each contender in each round.

    All take part in each round, in turned order (A B C, B C A, …), so that a slow spell of the machine meets all alike.
    """
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    names = list(contenders)
    for number in range(rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            seconds[name].append(contenders[name]())
    return seconds


def ratios(top: list[float], bottom: list[float]) -> tuple[float, ...]:
    """One over the other, round by round."""
    return tuple(one / other for one, other in zip(top, bottom, strict=True))


def seconds_of(work: Callable[[], object]) -> float:
    """Seconds until it returns."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started
