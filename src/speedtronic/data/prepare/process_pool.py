"""Several processes at work on one list of units; the results come in the order of the list."""

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

from speedtronic.data.prepare.work_units import Unit
from speedtronic.errors import DataError

R = TypeVar("R")

_WORTH_PROCESSES = 4  # units; fewer are done before processes have started
_IN_FLIGHT = 2  # units for each process


class ProcessLostError(DataError):
    """A worker process has ended without being asked to."""


def available_cpus() -> int:
    """The CPUs that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def in_order(task: Callable[[Unit], R], units: Iterable[Unit], *, processes: int) -> Generator[tuple[Unit, R]]:
    """Each unit with what `task` makes of it, in the order of the units.

    With one process, or for a few units, the work is done here. Units are asked for as they are needed: a few are
    in flight for each process. Closing the iterator ends the processes, and so does the end of this one, however
    it comes.

    Args:
        task: can be sent to another process, as its results and errors can; called with no parallelism of its own.
        units: read in this process.
        processes: at least 1.

    Raises:
        ProcessLostError: a process was killed, or could not start.
    """
    units = iter(units)
    first = list(islice(units, _WORTH_PROCESSES + 1))
    units = chain(first, units)
    if processes == 1 or len(first) <= _WORTH_PROCESSES:
        with _one_thread_for_tokenizers():
            for unit in units:
                yield unit, task(unit)
    else:
        yield from _by_processes(task, units, processes)


def _by_processes(task: Callable[[Unit], R], units: Iterable[Unit], processes: int) -> Iterator[tuple[Unit, R]]:
    context = multiprocessing.get_context("spawn")
    # Nothing is ever sent: that this end is closed, or gone with its process, tells the workers to end.
    listening, held = context.Pipe(duplex=False)
    executor = ProcessPoolExecutor(processes, context, initializer=_start, initargs=(task, listening))
    pending: deque[tuple[Unit, Future[R]]] = deque()
    try:
        for unit in units:
            with _signals_held_back():
                pending.append((unit, executor.submit(_run, unit)))
            if len(pending) == _IN_FLIGHT * processes:
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
        held.close()
        executor.shutdown(cancel_futures=True)
        listening.close()


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
    def _signals_held_back() -> Iterator[None]:
        """Windows has no signal masks; `_start` makes a worker deaf to Ctrl-C."""
        yield

else:
    from multiprocessing import resource_tracker

    @contextmanager
    def _signals_held_back() -> Iterator[None]:
        """What starts here is deaf to Ctrl-C and SIGTERM from its first moment: a worker ends with its parent."""
        resource_tracker.ensure_running()  # which would lift the mask, if it were started below
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


_task: Callable[[Unit], Any]


def _start(task: Callable[[Unit], Any], parent: Connection) -> None:
    global _task
    _task = task
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: Connection) -> None:
    parent.poll(None)
    os._exit(1)


def _run(unit: Unit) -> Any:
    return _task(unit)
