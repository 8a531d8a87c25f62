"""A background thread that leaves the processors to the training loop."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

import torch

# Share of one processor where training keeps all of them busy. Training steps get slower by about this share.
_SMALL = 0.03


def background_share(*, training_on_cpu: bool) -> float:
    """The share of one processor that a background thread may take: all of it if training leaves one free.

    Call it in the thread that trains.
    """
    busy = training_on_cpu and torch.get_num_threads() >= _processors()
    return _SMALL if busy else 1.0


def _processors() -> int:
    """The number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Throttle:
    """Lets a thread work for no more than its share of the time, until somebody waits for it.

    The threads of an operation wait for the slowest of them, so time that a writer takes on one processor is lost on
    all of them. Pauses work on all platforms, and end at once when they should. A lower priority of the thread could
    not be raised again without privileges, and the thread would starve on a machine with other work.

    Args:
        share: of one processor, over 0 and at most 1; 1 never pauses.
        work: the processor time that the calling thread has used, in seconds.
        clock: the time, in seconds.
    """

    def __init__(
        self,
        share: float,
        *,
        work: Callable[[], float] = time.thread_time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._share = share
        self._work = work
        self._clock = clock
        self._hurried = threading.Event()
        self._last: tuple[float, float] | None = None

    def pause(self) -> None:
        """Wait so long that the calling thread has worked for its share since the last call. Waiting for a disk counts.

        The first call only starts the count.
        """
        if self._last is not None:
            work, elapsed = self._work() - self._last[0], self._clock() - self._last[1]
            self._hurried.wait(max(0.0, work / self._share - elapsed))
        self._last = self._work(), self._clock()

    def hurry(self) -> None:
        """End the current pause, and make no more."""
        self._hurried.set()
