"""The order in which ways to run are measured: greedy, one choice after the other, within a budget of time.

It knows no model: what measures is handed in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from speedtronic.tuning.plan import MARGIN, Choices, Measured

# Updates before the first one that counts: caches fill, and a compiler compiles.
WARM = 2
# The fewest that count, and the seconds and updates after which one more says little.
LEAST, MOST, ENOUGH_SECONDS = 3, 100, 0.4
# The share of a run's time that looking for a faster way may take.
BUDGET = 0.02
# The share of the updates of a run that one measurement may take.
SHARE = 0.004
# What a compilation takes before one was seen; two cores need this for a few layers.
COMPILE_SECONDS = 25.0
# A way that is so much slower after a few updates is left.
HOPELESS = 1.3
# Reading data is worth a worker where it takes this share of an update.
WORTH_A_WORKER = 0.1


@dataclass(frozen=True)
class Possible:
    """What this run may choose, besides what its configuration says.

    Attributes:
        micro_batch_sizes: other sizes, largest first.
        merged: numbers of micro batches that may run as one, largest first.
        threads: other numbers of CPU threads, largest first.
        precisions: other modes.
        compile_modes: modes to compile with; the first is the cheapest to compile.
        regional: whether blocks may be compiled one by one.
        num_workers: other numbers of processes that read data, fewest first.
        unfused: whether the optimizer may be left without its fused kernel.
    """

    micro_batch_sizes: tuple[int, ...] = ()
    merged: tuple[int, ...] = ()
    threads: tuple[int, ...] = ()
    precisions: tuple[str, ...] = ()
    compile_modes: tuple[str | None, ...] = ()
    regional: bool = False
    num_workers: tuple[int, ...] = ()
    unfused: bool = False


class Measure(Protocol):
    """Measures a way to run on a copy of the state."""

    def __call__(self, choices: Choices, *, steps: int, hopeless: float | None) -> Measured:
        """Take at most `steps` updates that count, and stop early where they take `hopeless` seconds or more each."""

    @property
    def data_share(self) -> float:
        """Share of an update that the last measurement waited for data."""


class Search:
    """One search. `run` returns what was measured, the base first.

    Args:
        measure: measures a way.
        clock: seconds.
        steps: updates of the run.
        limited: whether the search keeps to `BUDGET` of the run; without, nothing is left out.

    Attributes:
        complete: whether no way was left out for lack of time.
    """

    def __init__(self, measure: Measure, *, clock: Callable[[], float], steps: int, limited: bool) -> None:
        self.complete = True
        self._measure = measure
        self._clock = clock
        self._started = clock()
        self._budget = float("inf")
        self._steps = steps
        self._limited = limited
        self._trial = max(LEAST, min(MOST, int(SHARE * steps))) if limited else MOST
        self._rows: list[Measured] = []
        self._best: Measured | None = None

    def run(self, base: Choices, possible: Possible) -> list[Measured]:
        """Measure the base, then each choice on top of the best so far."""
        first = self._measure(base, steps=self._trial, hopeless=None)
        # What starting a process costs is no cost of the base: each way pays it.
        first = first.model_copy(update={"start_seconds": 0.0})
        data_share = self._measure.data_share
        self._rows, self._best = [first], first
        # Without a base, such as a micro batch beyond the memory, the others are tried in turn until one runs.
        if self._limited and first.step_seconds is not None:
            self._budget = BUDGET * self._steps * first.step_seconds
        for stage in self._stages(possible, data_share):
            for choices in stage:
                if choices != self._best.choices and not self._try(choices):
                    break
        return self._rows

    def _stages(self, possible: Possible, data_share: float) -> Iterator[Iterator[Choices]]:
        """The ways to try, choice by choice. Each stage stops at the first way that is no better."""
        yield (self._now.but(micro_batch_size=size) for size in possible.micro_batch_sizes)
        yield (self._now.but(merged=number) for number in possible.merged)
        yield (self._now.but(threads=number) for number in possible.threads)
        yield (self._now.but(precision=mode) for mode in possible.precisions)
        if data_share > WORTH_A_WORKER:
            yield (self._now.but(num_workers=number) for number in possible.num_workers)
        if possible.unfused:
            yield iter([self._now.but(fused=False)])
        # Last, because it takes the longest. Compiled, more threads may be faster again.
        for mode in possible.compile_modes:
            yield iter([self._now.but(compile=True, compile_mode=mode)])
        if possible.regional:
            yield iter([self._now.but(compile=True, regional=True)])
        if self._now.compile and self._rows[0].choices.threads != self._now.threads:
            yield iter([self._now.but(threads=self._rows[0].choices.threads)])

    @property
    def _now(self) -> Choices:
        assert self._best is not None
        return self._best.choices

    def _try(self, choices: Choices) -> bool:
        """Measure a way; true where the next one of its kind is worth a look: this one was better, or did not run."""
        best = self._best
        assert best is not None
        step = best.step_seconds or 0.0
        expected = (WARM + self._trial) * step + (COMPILE_SECONDS if choices.compile else 0.0)
        if self._clock() - self._started + expected > self._budget:
            self.complete = False
            return False
        row = self._measure(choices, steps=self._trial, hopeless=HOPELESS * step if step else None)
        self._rows.append(row)
        if row.step_seconds is None:
            return True
        if best.step_seconds is not None and row.step_seconds > (1 - MARGIN) * best.step_seconds:
            return False
        self._best = row
        return True
