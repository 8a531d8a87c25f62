"""Several processes that work on one list of units; the results come in the order of the list."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from itertools import chain, islice
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from speedtronic.data.prepare.encode import Unit
from speedtronic.errors import DataError

R = TypeVar("R")

_DONE_HERE = 4  # units; so few are done before other processes have started
_IN_FLIGHT = 2  # units for each process


class ProcessLostError(DataError):
    """A worker process has ended without being asked to."""


def available_cpus() -> int:
    """The CPUs that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def map_in_order(task: Callable[[Unit], R], units: Iterable[Unit], *, processes: int) -> Generator[tuple[Unit, R]]:
    """Each unit with the result of `task` for it, in the order of the units.

    With one process, or for a few units, the work is done in this process. Units are taken from the iterable when they
    are needed: a few are in flight for each process. The processes end when the iterator is closed, and also when this
    process ends, in whatever way.

    Args:
        task: can be sent to another process, as its results and errors can; runs without threads of its own.
        units: iterated in this process.
        processes: at least 1.

    Raises:
        ProcessLostError: a process was killed, or could not start.
    """
    units = iter(units)
    first = list(islice(units, _DONE_HERE + 1))
    units = chain(first, units)
    if processes == 1 or len(first) <= _DONE_HERE:
        with _one_thread_for_tokenizers():
            for unit in units:
                yield unit, task(unit)
        return

    context = multiprocessing.get_context("spawn")
    # Nothing is ever sent through this pipe. When this end is closed, or gone with its process, the workers end.
    watched_end, held_end = context.Pipe(duplex=False)
    executor = ProcessPoolExecutor(processes, context, initializer=_start_worker, initargs=(task, watched_end))
    pending: deque[tuple[Unit, Future[R]]] = deque()
    try:
        for unit in units:
            with _signals_blocked():  # a worker may start here
                pending.append((unit, executor.submit(_run, unit)))
            if len(pending) == _IN_FLIGHT * processes:
                # Enough is in flight: wait for the oldest unit before the next one is submitted.
                unit, future = pending.popleft()
                yield unit, future.result()
        for unit, future in pending:
            yield unit, future.result()
    except BrokenProcessPool as error:
        raise ProcessLostError(
            "a process that prepared data was killed or could not start; when memory is short, use fewer --processes "
            "(a script that prepares data must do so under `if __name__ == '__main__':`)"
        ) from error
    finally:
        held_end.close()  # first, so that the shutdown does not wait for work that nobody needs
        executor.shutdown(cancel_futures=True)
        watched_end.close()


@contextmanager
def _one_thread_for_tokenizers() -> Iterator[None]:
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ["TOKENIZERS_PARALLELISM"]
        else:
            os.environ["TOKENIZERS_PARALLELISM"] = before


if sys.platform == "win32":

    @contextmanager
    def _signals_blocked() -> Iterator[None]:
        """Windows has no signal masks. There `_start_worker` makes a worker ignore Ctrl-C."""
        yield

else:
    from multiprocessing import resource_tracker

    @contextmanager
    def _signals_blocked() -> Iterator[None]:
        """A process that starts in this block never gets Ctrl-C, SIGTERM and SIGHUP. A worker ends with its parent."""
        resource_tracker.ensure_running()  # if it were started in the block, it would lift the mask
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


_task: Callable[[Unit], Any]


def _start_worker(task: Callable[[Unit], Any], watched_end: Connection) -> None:
    def end_with_parent() -> None:
        watched_end.poll(None)  # returns when the other end is closed
        os._exit(1)

    global _task
    _task = task
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=end_with_parent, daemon=True).start()


def _run(unit: Unit) -> Any:
    return _task(unit)
