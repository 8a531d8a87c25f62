"""How a background thread leaves the processors to the training loop."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

import torch

# Of one processor, where training keeps all of them busy. Its steps take longer by about this share.
_SMALL = 0.03


def background_share(*, training_on_cpu: bool) -> float:
    """What a background thread may take of one processor: all of it where training leaves one free.

    Must be asked in the thread that trains.
    """
    busy = training_on_cpu and torch.get_num_threads() >= _processors()
    return _SMALL if busy else 1.0


def _processors() -> int:
    """The number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Throttle:
    """Lets a thread work no more than its share of the time, until somebody waits for it.

    The threads of an operation wait for the slowest of them: what a writer takes of one processor, it takes of training
    on all of them. Pauses work on all platforms, and end when they should. A lower priority of the thread could not be
    raised again without privileges, and starves on a machine with other work.

    Args:
        share: of one processor, over 0 and at most 1; 1 never pauses.
        work: the processor time that the calling thread has taken, in seconds.
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
        """Wait as long as the calling thread's work since the last call asks for; waiting for a disk counts as pause.

        The first call only begins to count.
        """
        if self._last is not None:
            work, elapsed = self._work() - self._last[0], self._clock() - self._last[1]
            self._hurried.wait(max(0.0, work / self._share - elapsed))
        self._last = self._work(), self._clock()

    def hurry(self) -> None:
        """Pause no more: end the pause in hand, and let there be no other."""
        self._hurried.set()
