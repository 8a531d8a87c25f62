"""Names the rank that the others wait for, if they wait too long.

A thread in each process writes a line about it into the store of the launcher every second or two: a count, its place,
and whether it waits for others. Who has waited for too long reads all lines twice. A rank whose count stands still is
stopped or gone; one that does not wait is busy with something else. Then the process ends, since nothing can get its
training thread out of a collective operation.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Protocol


class LineStore(Protocol):
    """What the watch needs of torch's stores."""

    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> bytes: ...

    def check(self, keys: list[str]) -> bool: ...


@dataclass(frozen=True)
class Line:
    """What a rank says of itself.

    Attributes:
        beat: counts the lines; one that stands still is of a process that does nothing any more.
        place: where in its work the rank is.
        waiting: for what it waits with the others; None while it computes.
    """

    beat: int
    place: str
    waiting: str | None

    def __str__(self) -> str:
        return self.place if self.waiting is None else f"{self.place}, waiting for {self.waiting}"


class Watch:
    """Watches over the training thread of one rank.

    Args:
        store: shared by all ranks.
        rank, size: which rank this is, and of how many.
        timeout: seconds that the training thread may wait for other ranks.
        give_up: called with the message when it has waited for so long. It must not return to the training thread.
        clock, pause: monotonic seconds, and what waits for some.
    """

    def __init__(
        self,
        store: LineStore,
        rank: int,
        size: int,
        timeout: float,
        *,
        give_up: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._timeout = timeout
        self._give_up = give_up or end_process
        self._clock = clock
        self._interval = min(2.0, timeout / 8)
        self._beat = 0
        self._place = "the start"
        self._waiting: tuple[str, float] | None = None
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Write the first line, and start the thread."""
        self._publish()
        self._thread = threading.Thread(target=self._run, name="rank-watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join()

    def note(self, place: str) -> None:
        """The training thread is somewhere else now."""
        self._place = place

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """The training thread waits for the other ranks inside."""
        self._waiting = (what, self._clock())
        try:
            yield
        finally:
            self._waiting = None

    def look(self) -> str | None:
        """Write this rank's line. If it has waited for too long, return which rank does not come, and where it is."""
        self._publish()
        # Two more intervals pass below, and the rank is to be named within the timeout.
        waiting = self._waiting
        if waiting is None or self._clock() - waiting[1] < self._timeout - 3 * self._interval:
            return None
        before = self._read()
        for _ in range(2):
            if self._over.wait(self._interval):
                return None
            self._publish()
        if self._waiting is not waiting:
            return None  # they have come
        now = self._read()
        silent = {rank for rank, line in now.items() if rank in before and line.beat == before[rank].beat}
        return diagnosis(self._rank, self._clock() - waiting[1], range(self._size), now, silent)

    def _run(self) -> None:
        while not self._over.wait(self._interval):
            try:
                message = self.look()
            except Exception as error:  # noqa: BLE001 - torch's stores raise errors of several kinds
                if self._waiting is None:
                    continue  # it may answer again
                message = (
                    f"rank {self._rank}: the store where ranks meet, which the launcher or rank 0 keeps, does not "
                    f"answer ({type(error).__name__}: {error}): its process is stopped or gone"
                )
            if message is not None and not self._over.is_set():
                self._give_up(message)
                return

    def _publish(self) -> None:
        self._beat += 1
        waiting = self._waiting
        line = Line(self._beat, self._place, None if waiting is None else waiting[0])
        self._store.set(str(self._rank), json.dumps(asdict(line)))

    def _read(self) -> dict[int, Line]:
        found = {}
        for rank in range(self._size):
            if self._store.check([str(rank)]):
                found[rank] = Line(**json.loads(self._store.get(str(rank))))
        return found


def diagnosis(rank: int, waited: float, ranks: range, lines: Mapping[int, Line], silent: set[int]) -> str:
    """Which ranks do not come, as far as their lines tell.

    Args:
        rank: the one that has waited.
        waited: for so many seconds.
        ranks: all.
        lines: what each rank says of itself; those that have said nothing yet are not in it.
        silent: the ranks that have stopped saying anything.
    """
    begin = f"rank {rank} has waited for {waited:.0f} s at {lines[rank]}" if rank in lines else f"rank {rank} waits"
    others = [other for other in ranks if other != rank]
    blamed = [f"rank {other} has never answered" for other in others if other not in lines]
    blamed += [
        f"rank {other} does not answer any more, and was last at {lines[other]}" for other in others if other in silent
    ]
    blamed += [
        f"rank {other} is still at {lines[other]}"
        for other in others
        if other in lines and other not in silent and lines[other].waiting is None
    ]
    if not blamed:
        blamed = [f"rank {other} waits too, at {lines[other]}" for other in others if other in lines]
        blamed.append("so each waits for something else: a callback, an evaluator or a loader acts on some ranks only")
    return f"{begin}: {'; '.join(blamed)} (parallel.timeout)"


def end_process(message: str) -> None:
    """Say why, and end this process at once: its training thread is where no Python code reaches it."""
    print(f"error: {message}", file=sys.stderr, flush=True)
    os._exit(1)
