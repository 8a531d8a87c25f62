"""What the loaders share: items fetched here or by worker processes, and what may go wrong there."""

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
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
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
    "itself, it said why above; with data.num_workers: 0 it fails here"
)
_HERE = str(Path(__file__).parents[1])
_LIBRARIES = tuple(
    os.path.join(folder, "")
    for folder in (_HERE, *(sysconfig.get_path(key) for key in ("stdlib", "purelib", "platlib")))
)


# ---------------------------------------------------------------------- errors


def type_name(value: object) -> str:
    """The module and name of an object's type, as a person would import it."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


def blame(thing: str, error: Exception) -> DataError:
    """A DataError that says what the user's code raised on which thing, and where in that code.

    For instance "sample 17 of my_data.Squares: ValueError: boom (my_data.py, line 12)".
    """
    if isinstance(error, DataError):
        return DataError(f"{thing}: {error}")
    return DataError(f"{thing}: {''.join(traceback.format_exception_only(error)).strip()}{_place(error)}")


def _place(error: Exception) -> str:
    """The innermost place that is not in a library, if there is one."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(_LIBRARIES)]
    return "".join(f" ({os.path.basename(frame.filename)}, line {frame.lineno})" for frame in own[-1:])


@dataclass(frozen=True)
class _Failure:
    """A DataError on its way out of a worker: the exception itself would arrive as another one."""

    message: str
    traceback: str


class _WorkerTraceback(Exception):  # noqa: N818 - the cause of an error, shown above it, and never raised itself
    """The traceback of a worker process."""

    def __str__(self) -> str:
        return f'\n"""\n{self.args[0]}"""'


class Guarded(Dataset[Any]):
    """Items by key, of which a DataError leaves a worker as it is."""

    def __init__(self, items: Dataset[Any]) -> None:
        self._items = items

    def __getitem__(self, key: Any) -> Any:
        try:
            return self._items[key]
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
    """Put Python's, NumPy's and torch's CPU generators back to where they were."""
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
    """States of the three generators that belong to one piece of code, which runs in `in_use()`.

    What is drawn there goes on where it ended the last time, and the rest of the process does not notice.

    Args:
        start: a seed, or the `states` of an earlier one.
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


class _EndsOfWorkers:
    """Keeps to itself that a worker has ended until somebody waits for one.

    torch raises it from a handler of SIGCHLD, so wherever this process then is: in the middle of an update, or of a
    save. The handler is set when a loader first starts workers, and once.
    """

    def __init__(self) -> None:
        self._handler: Any = None
        self._heard = False
        self._missed: RuntimeError | None = None

    @contextmanager
    def heard(self) -> Iterator[None]:
        """Here it may be raised, also for what has ended before. Raises RuntimeError, as torch does."""
        if _CHILD_ENDED is None or threading.current_thread() is not threading.main_thread():
            yield  # signals reach the main thread alone
            return
        self._heard = True
        try:
            missed, self._missed = self._missed, None
            if missed is not None:
                raise missed
            yield
        finally:
            self._heard = False
            self._take_over(_CHILD_ENDED)

    def _take_over(self, number: int) -> None:
        handler = signal.getsignal(number)
        if getattr(handler, "__module__", None) == _SETS_THE_HANDLER:
            self._handler = handler
            signal.signal(number, self._notice)

    def _notice(self, number: int, frame: Any) -> None:
        try:
            self._handler(number, frame)
        except RuntimeError as error:
            if self._heard:
                raise
            self._missed = error


ends_of_workers = _EndsOfWorkers()


# ---------------------------------------------------------------------- fetching


class Fetcher:
    """The items of a map-style dataset in the order of its keys, fetched here or ahead of time by workers.

    Workers live until `close`, until nothing refers to the fetcher any more, or until this process ends. The
    n-th key after a (re)start goes to worker n mod `num_workers`.

    Args:
        items: what is fetched from; must pickle unless workers are forked.
        keys: an endless iterable; every (re)start iterates it anew.
        name: what the items are of, for messages.
        seed: of the workers' generators.
        num_workers, prefetch_factor, pin_memory, multiprocessing_context: as for `TokenLoader`.
    """

    def __init__(
        self,
        items: Dataset[Any],
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
        self._context = multiprocessing_context
        self._ending: Any = None  # in memory that the workers share: whether they may end when they are told to
        self._make_dataloader = partial(
            DataLoader,
            Guarded(items),
            batch_size=None,
            sampler=keys,
            num_workers=num_workers,
            collate_fn=_unchanged,
            pin_memory=pin_memory,
            prefetch_factor=prefetch_factor if num_workers else None,
            persistent_workers=num_workers > 0,
            # With its own generator the library leaves the global one alone.
            generator=torch.Generator().manual_seed(seed % 2**63),
        )

    def next(self) -> Any:
        """The item of the next key.

        Raises:
            DataError: raised by the dataset, or the dataset cannot be sent to a worker.
            DataWorkerError: a worker process has ended.
        """
        try:
            with ends_of_workers.heard():
                if self._replies is None:
                    self._replies = self._start()
                reply = next(self._replies)
        except BaseException as error:
            # What the library has handed out and what has arrived no longer go together.
            self.restart()
            if isinstance(error, RuntimeError) and str(error).startswith("DataLoader worker (pid"):
                self.close()
                raise DataWorkerError(_ENDED_WORKER.format(name=self._name, reason=str(error).strip(" ."))) from error
            raise
        if isinstance(reply, _Failure):
            self.restart()
            raise DataError(reply.message) from _WorkerTraceback(reply.traceback)
        return reply

    def _start(self) -> Iterator[Any]:
        if not self._working:
            return iter(self._make_dataloader())
        if self._dataloader is None:
            self._dataloader = self._with_workers()
        try:
            with warnings.catch_warnings():
                # The library warns of what the error below says.
                warnings.filterwarnings("ignore", "Got pickle error")
                return iter(self._dataloader)
        except (PicklingError, AttributeError, TypeError, ValueError) as error:  # a pointer of ctypes is the last
            self.close()
            raise DataError(
                f"{self._name} cannot be sent to a worker process: {error}; define its classes and functions at the "
                f"top level of a module and open files and connections when the first sample is asked for, or set "
                f"data.num_workers to 0"
            ) from error

    def _with_workers(self) -> DataLoader[Any]:
        context = multiprocessing.get_context(self._context)
        self._ending = context.RawValue(ctypes.c_bool, False)
        finalize(self, _allow_ending, self._ending)
        _open_fetchers.add(self)
        return self._make_dataloader(
            multiprocessing_context=context,
            worker_init_fn=partial(_leave_signals_to_the_trainer, self._ending),
        )

    def restart(self) -> None:
        """Begin with the keys anew at the next item; the workers stay."""
        self._replies = None

    def close(self) -> None:
        """End the workers. Asking for another item starts new ones."""
        if self._dataloader is not None:
            _allow_ending(self._ending)
        self._replies = None
        self._dataloader = None


def _unchanged(item: Any) -> Any:
    return item


def _allow_ending(ending: Any) -> None:
    ending.value = True


_open_fetchers: WeakSet[Fetcher] = WeakSet()


# At its end this process terminates the workers that are left and waits for them, so they must be told before.
@atexit.register
def _close_all() -> None:
    for fetcher in list(_open_fetchers):
        fetcher.close()


def _leave_signals_to_the_trainer(ending: Any, worker: int) -> None:
    """Let a worker survive what tells the whole job to stop: the training process finishes its step first, and needs
    data for that. Ctrl-C reaches every process of the terminal, SIGTERM every process of a container or a job."""
    training_process = os.getppid()

    def end_if_the_trainer_says_so(number: int, frame: object) -> None:
        if ending.value or os.getppid() != training_process:
            os._exit(0)

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, end_if_the_trainer_says_so)
    if sys.platform != "win32":
        os.setpgrp()
