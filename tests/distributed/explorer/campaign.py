"""Many schedules, on several processes, up to the first that fails."""

from __future__ import annotations

import concurrent.futures
import gc
import multiprocessing
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch

from tests.distributed.explorer.explore import Exploration, Plan
from tests.distributed.explorer.mutants import MUTANTS

_SLICE = 50  # schedules that a process is given at a time


class Failure(NamedTuple):
    seed: int
    message: str


@dataclass(slots=True)
class Tally:
    """What a number of schedules amounted to."""

    schedules: int = 0
    effects: int = 0
    starts: int = 0
    versions: int = 0
    deltas: int = 0
    troubles: Counter[str] = field(default_factory=Counter)
    failure: Failure | None = None

    def add(self, other: Tally) -> None:
        self.schedules += other.schedules
        self.effects += other.effects
        self.starts += other.starts
        self.versions += other.versions
        self.deltas += other.deltas
        self.troubles += other.troubles
        if other.failure is not None and (self.failure is None or other.failure.seed < self.failure.seed):
            self.failure = other.failure


def one(seed: int, tally: Tally, focus: Mapping[str, Any] | None = None) -> None:
    """Run and judge the schedule of a seed, directed by a focus if there is one. Whatever it raises is a finding."""
    exploration = Exploration(Plan.of(seed).directed(focus or {}))
    try:
        exploration.run()
    except Exception as error:  # noqa: BLE001 - an error of any kind in the protocol's code is what is looked for
        where = traceback.extract_tb(error.__traceback__)[-1]
        tally.failure = Failure(seed, f"{type(error).__name__}: {error} ({where.name})")
    tally.schedules += 1
    tally.effects += exploration.stage.effects
    tally.starts += exploration.starts
    tally.versions += len(exploration.truth.heads)
    tally.deltas += len(exploration.truth.committed)
    tally.troubles += exploration.stage.troubles


def several(seeds: range, mutant: str | None = None) -> Tally:
    """Schedules one after the other, up to the first that fails; of the real protocol, or of a mutant."""
    tally = Tally()
    with pytest.MonkeyPatch.context() as patch:
        if mutant is not None:
            MUTANTS[mutant].change(patch)
        focus = MUTANTS[mutant].focus if mutant is not None else None
        for seed in seeds:
            one(seed, tally, focus)
            if tally.failure is not None:
                break
    return tally


def many(seeds: range, jobs: int, mutant: str | None = None) -> Tally:
    """As `several`, on this many processes. Which of several failures it finds may differ from time to time."""
    if jobs == 1:
        return several(seeds, mutant)
    slices = [seeds[start : start + _SLICE] for start in range(0, len(seeds), _SLICE)]
    tally = Tally()
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(jobs, mp_context=context, initializer=_settle_in) as pool:
        pending = [pool.submit(several, part, mutant) for part in slices]
        for done in _as_they_come(pending):
            tally.add(done)
            if tally.failure is not None:
                pool.shutdown(cancel_futures=True)
                break
    return tally


def _as_they_come(pending: list[concurrent.futures.Future[Tally]]) -> Iterator[Tally]:
    for future in concurrent.futures.as_completed(pending):
        yield future.result()


def _settle_in() -> None:
    """Of a process that does nothing else: collecting garbage is a quarter of the work, and there is little of it."""
    gc.set_threshold(200_000)
    torch.set_num_threads(1)


def story(seed: int, mutant: str | None = None) -> str:
    """All that happens in one schedule, an effect a line, and how it fails if it does."""
    with pytest.MonkeyPatch.context() as patch:
        if mutant is not None:
            MUTANTS[mutant].change(patch)
        focus = MUTANTS[mutant].focus if mutant is not None else {}
        exploration = Exploration(Plan.of(seed).directed(focus), keep_trace=True)
        try:
            exploration.run()
            end = "all is as it should be"
        except Exception:  # noqa: BLE001 - shown, whatever it is
            end = traceback.format_exc()
    return "\n".join([repr(exploration.plan), *exploration.stage.trace, end])
