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
# A way that is so much slower after a few updates is left.
HOPELESS = 1.3
# The note of a way that does not fit: another one may.
OUT_OF_MEMORY = "out of memory"
# Reading data is worth a worker where it takes this share of an update.
WORTH_A_WORKER = 0.1


@dataclass(frozen=True)
class Possible:
    """What this run may choose, besides what its configuration says.

    Attributes:
        target_batch_size: samples of an update.
        larger, smaller: other sizes of a micro batch, each from the base's on.
        merges: whether micro batches may run as one.
        most_samples: no more samples in one forward pass, so that a system without errors for it keeps some memory.
        threads: other numbers of CPU threads, largest first.
        precisions: other modes.
        compile_modes: modes to compile with; the first is the cheapest to compile.
        regional: whether blocks may be compiled one by one.
        num_workers: other numbers of processes that read data, fewest first.
        unfused: whether the optimizer may be left without its fused kernel.
        compile_seconds: what a compilation takes, as far as that is known before one was seen.
    """

    target_batch_size: int = 1
    larger: tuple[int, ...] = ()
    smaller: tuple[int, ...] = ()
    merges: bool = False
    most_samples: int = 2**31
    threads: tuple[int, ...] = ()
    precisions: tuple[str, ...] = ()
    compile_modes: tuple[str | None, ...] = ()
    regional: bool = False
    num_workers: tuple[int, ...] = ()
    unfused: bool = False
    compile_seconds: float = 0.0


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
        self._rows, self._best, self._compile_seconds = [first], first, possible.compile_seconds
        if first.step_seconds is None and first.note != OUT_OF_MEMORY:
            return self._rows  # nothing else would run either, and the run itself says why
        if self._limited and first.step_seconds is not None:
            self._budget = BUDGET * self._steps * first.step_seconds
        for stage in self._stages(possible, data_share):
            for choices in stage:
                if choices != self._best.choices and not self._try(choices):
                    break
        if self._best is not first and self._affordable(base):
            # The machine may have been busy with something else just then. Of two measurements the faster one counts.
            again = self._measure(base, steps=self._trial, hopeless=None).step_seconds
            if again is not None and (first.step_seconds is None or again < first.step_seconds):
                self._rows[0] = first.model_copy(update={"step_seconds": again, "note": ""})
        return self._rows

    def _stages(self, possible: Possible, data_share: float) -> Iterator[Iterator[Choices]]:
        """The ways to try, choice by choice. Each stage stops at the first way that is no better."""
        sizes = possible.smaller if self._rows[0].step_seconds is None else possible.larger
        yield (self._now.but(micro_batch_size=size) for size in sizes)
        if possible.merges:
            micro_batches = possible.target_batch_size // self._now.micro_batch_size
            most = possible.most_samples // self._now.micro_batch_size
            yield (self._now.but(merged=n) for n in range(2, min(micro_batches, most) + 1) if micro_batches % n == 0)
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
        if not self._affordable(choices):
            self.complete = False
            return False
        step = best.step_seconds or 0.0
        row = self._measure(choices, steps=self._trial, hopeless=HOPELESS * step if step else None)
        self._rows.append(row)
        if choices.compile:
            self._compile_seconds = max(self._compile_seconds, row.start_seconds)
        if row.step_seconds is None:
            return True
        if best.step_seconds is not None and row.step_seconds > (1 - MARGIN) * best.step_seconds:
            return False
        self._best = row
        return True

    def _affordable(self, choices: Choices) -> bool:
        """Whether the budget is likely to hold another measurement."""
        expected = (WARM + self._trial) * (self._rows[0].step_seconds or 0.0)
        expected += self._compile_seconds if choices.compile else 0.0
        return self._clock() - self._started + expected <= self._budget
