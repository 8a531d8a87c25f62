"""What both loaders share: batches fetched here or by worker processes, and the errors and random numbers there."""

from __future__ import annotations

import atexit
import ctypes
import multiprocessing
import os
import random
import signal
import sys
import sysconfig
import threading
import traceback
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from pickle import PicklingError
from typing import Any
from weakref import WeakSet, finalize

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from speedtronic.errors import DataError, DataWorkerError

_ENDED_WORKER = (
    "a worker process that reads {name} has ended ({reason}). If it was killed, memory was probably short, or a "
    "container's shared memory: lower data.num_workers, data.prefetch_factor or data.micro_batch_size. If it ended by "
    "itself, its reason is printed above; with data.num_workers: 0 the error is raised in the training process"
)
_LIBRARIES = tuple(
    os.path.join(folder, "")
    for folder in (
        str(Path(__file__).parents[1]),
        *(sysconfig.get_path(key) for key in ("stdlib", "purelib", "platlib")),
    )
)


# ---------------------------------------------------------------------- errors


def type_name(value: object) -> str:
    """The module and name of an object's type, as a person would import it."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


def blame(thing: str, error: Exception) -> DataError:
    """A DataError that names the thing that failed, the error in the user's code, and its place in that code.

    For instance "sample 17 of my_data.Squares: ValueError: boom (my_data.py, line 12)".
    """
    if isinstance(error, DataError):
        return DataError(f"{thing}: {error}")
    reason = "".join(traceback.format_exception_only(error)).strip()
    # The innermost frame that is neither ours nor a library's is the user's.
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(_LIBRARIES)]
    place = f" ({os.path.basename(frames[-1].filename)}, line {frames[-1].lineno})" if frames else ""
    return DataError(f"{thing}: {reason}{place}")


@dataclass(frozen=True)
class _Failure:
    """A DataError on its way out of a worker. torch would wrap the exception itself in a message of its own."""

    message: str
    traceback: str


class _WorkerTraceback(Exception):  # noqa: N818 - the cause of an error, shown above it, and never raised itself
    """The traceback of a worker process."""

    def __str__(self) -> str:
        return f'\n"""\n{self.args[0]}"""'


class BatchMaker(Dataset[Any], ABC):
    """A dataset of whole batches: torch's loader distributes the keys, and `make` decides what a batch holds."""

    @abstractmethod
    def make(self, key: Any) -> Any:
        """The batch for a key."""

    def __getitem__(self, key: Any) -> Any:
        try:
            return self.make(key)
        except DataError as error:
            if get_worker_info() is None:
                raise
            return _Failure(str(error), traceback.format_exc())


# ---------------------------------------------------------------------- random numbers

GeneratorStates = tuple[Any, Any, torch.Tensor]


def _states() -> GeneratorStates:
    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def _set_states(states: GeneratorStates) -> None:
    python, numpy, cpu = states
    random.setstate(python)
    np.random.set_state(numpy)
    torch.set_rng_state(cpu)


@contextmanager
def generators_kept() -> Iterator[None]:
    """Leave Python's, NumPy's and torch's CPU generators as they were before the block."""
    before = _states()
    try:
        yield
    finally:
        _set_states(before)


def seed_generators(seed: int) -> None:
    """Seed Python's, NumPy's and torch's CPU generators."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    # Not torch.manual_seed, which would also reseed the accelerators.
    torch.default_generator.manual_seed(seed % 2**63)


class OwnGenerators:
    """Separate states of the three generators for one piece of code, which runs in `in_use()`.

    Each use continues where the last one ended. The rest of the process does not notice.

    Args:
        start: a seed, or the saved `states` of another one.
    """

    def __init__(self, start: int | GeneratorStates) -> None:
        if isinstance(start, int):
            with generators_kept():
                seed_generators(start)
                self.states = _states()
        else:
            self.states = start

    @contextmanager
    def in_use(self) -> Iterator[None]:
        with generators_kept():
            _set_states(self.states)
            try:
                yield
            finally:
                self.states = _states()


# ---------------------------------------------------------------------- workers that end by themselves

_CHILD_ENDED: int | None = getattr(signal, "SIGCHLD", None)  # Windows has none, and there torch sets no handler
_SETS_THE_HANDLER = "torch.utils.data._utils.signal_handling"


class _WorkerExits:
    """Delays the error for a worker that has exited until somebody waits for a batch.

    torch raises that error from a handler of SIGCHLD, so anywhere in this process: in the middle of an update, or of a
    save. torch sets the handler once, when a loader first starts workers.
    """

    def __init__(self) -> None:
        self._torch_handler: Any = None
        self._may_raise = False
        self._missed: RuntimeError | None = None

    @contextmanager
    def may_raise(self) -> Iterator[None]:
        """In this block the error may be raised, also for a worker that has exited before. It is a RuntimeError."""
        if _CHILD_ENDED is None or threading.current_thread() is not threading.main_thread():
            yield  # only the main thread receives signals
            return
        self._may_raise = True
        try:
            missed, self._missed = self._missed, None
            if missed is not None:
                raise missed
            yield
        finally:
            self._may_raise = False
            # If torch has just set its handler, put ours in front of it.
            handler = signal.getsignal(_CHILD_ENDED)
            if getattr(handler, "__module__", None) == _SETS_THE_HANDLER:
                self._torch_handler = handler
                signal.signal(_CHILD_ENDED, self._handle)

    def _handle(self, number: int, frame: Any) -> None:
        try:
            self._torch_handler(number, frame)
        except RuntimeError as error:
            if self._may_raise:
                raise
            self._missed = error


worker_exits = _WorkerExits()


# ---------------------------------------------------------------------- fetching


class Fetcher:
    """Batches in the order of their keys, made here or ahead of time by workers.

    Workers live until `close`, until the last reference to the fetcher is gone, or until this process ends. The
    n-th key after a (re)start goes to worker n mod `num_workers`.

    Args:
        batches: makes the batches; must pickle unless workers are forked.
        keys: an endless iterable; every (re)start iterates it again.
        name: the name of the dataset, for messages.
        seed: the seed of the workers' generators.
        num_workers, prefetch_factor, pin_memory, multiprocessing_context: as for `TokenLoader`.
    """

    def __init__(
        self,
        batches: BatchMaker,
        keys: Iterable[Any],
        *,
        name: str,
        seed: int,
        num_workers: int,
        prefetch_factor: int | None,
        pin_memory: bool,
        multiprocessing_context: str | None,
    ) -> None:
        self._name = name
        self._replies: Iterator[Any] | None = None
        self._dataloader: DataLoader[Any] | None = None
        self._working = num_workers > 0
        # Without workers there is nothing that torch's loader would do, unless it pins memory.
        self._direct = None if num_workers or pin_memory else (batches, keys)
        self._context = multiprocessing_context
        self._may_end: Any = None  # in memory shared with the workers: whether they may end when they are told to
        self._make_dataloader = partial(
            DataLoader,
            batches,
            batch_size=None,
            sampler=keys,
            num_workers=num_workers,
            collate_fn=_unchanged,
            pin_memory=pin_memory,
            prefetch_factor=prefetch_factor if num_workers else None,
            persistent_workers=num_workers > 0,
            # With its own generator torch's loader leaves the global one alone.
            generator=torch.Generator().manual_seed(seed % 2**63),
        )

    def next(self) -> Any:
        """The batch for the next key.

        Raises:
            DataError: raised by the dataset, or the dataset cannot be sent to a worker.
            DataWorkerError: a worker process has ended.
        """
        try:
            with worker_exits.may_raise() if self._working else nullcontext():
                if self._replies is None:
                    self._replies = self._start()
                reply = next(self._replies)
        except BaseException as error:
            # torch's loader has handed out keys whose batches did not come, so it must start again.
            self.restart()
            if isinstance(error, RuntimeError) and str(error).startswith("DataLoader worker (pid"):
                self.close()
                raise DataWorkerError(_ENDED_WORKER.format(name=self._name, reason=str(error).strip(" ."))) from error
            raise
        if isinstance(reply, _Failure):
            # A DataError in a worker: raise it here as it was raised there.
            self.restart()
            raise DataError(reply.message) from _WorkerTraceback(reply.traceback)
        return reply

    def _start(self) -> Iterator[Any]:
        if self._direct is not None:
            batches, keys = self._direct
            return map(batches.__getitem__, keys)
        if not self._working:
            return iter(self._make_dataloader())
        if self._dataloader is None:
            context = multiprocessing.get_context(self._context)
            self._may_end = context.RawValue(ctypes.c_bool, False)
            finalize(self, _let_workers_end, self._may_end)
            _open_fetchers.add(self)
            self._dataloader = self._make_dataloader(
                multiprocessing_context=context,
                worker_init_fn=partial(_ignore_signals_to_the_job, self._may_end),
            )
        try:
            with warnings.catch_warnings():
                # torch warns about the error that is raised below.
                warnings.filterwarnings("ignore", "Got pickle error")
                return iter(self._dataloader)
        except (PicklingError, AttributeError, TypeError, ValueError) as error:  # a ctypes pointer is a ValueError
            self.close()
            raise DataError(
                f"{self._name} cannot be sent to a worker process: {error}; define its classes and functions at the "
                f"top level of a module and open files and connections when the first sample is asked for, or set "
                f"data.num_workers to 0"
            ) from error

    def restart(self) -> None:
        """Iterate the keys again from the next batch on; the workers stay."""
        self._replies = None

    def close(self) -> None:
        """End the workers. Asking for another batch starts new ones."""
        if self._dataloader is not None:
            _let_workers_end(self._may_end)
        self._replies = None
        self._dataloader = None


def _unchanged(item: Any) -> Any:
    """The batches come complete; without a function here torch's loader would convert them."""
    return item


def _let_workers_end(may_end: Any) -> None:
    may_end.value = True


_open_fetchers: WeakSet[Fetcher] = WeakSet()


# At the end of this process multiprocessing terminates the workers and waits for them, so they must be told before.
@atexit.register
def _close_all() -> None:
    for fetcher in list(_open_fetchers):
        fetcher.close()


def _ignore_signals_to_the_job(may_end: Any, worker: int) -> None:
    """Let a worker survive a signal that stops the whole job: the training process finishes its step first, and needs
    data for that. Ctrl-C and SIGHUP reach every process of the terminal, SIGTERM every process of a container or a
    job."""
    training_process = os.getppid()

    def end_if_allowed(number: int, frame: object) -> None:
        if may_end.value or os.getppid() != training_process:
            os._exit(0)

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, end_if_allowed)
    if sys.platform != "win32":
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        os.setpgrp()
