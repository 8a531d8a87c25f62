from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from speedtronic.data import TokenLoader
from speedtronic.data.loading.batch_stream import BatchStream
from speedtronic.data.loading.iterable_loader import StreamLoader
from speedtronic.data.loading.workers import OwnGenerators, blame
from speedtronic.durable.processes import process_is_alive
from speedtronic.errors import DataError, DataWorkerError
from tests.support.datasets import Killed, Unsendable, numbers_of_chance

ROOT = Path(__file__).parents[3]


class ProcessIds(Dataset[int]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return os.getpid()


class UnsendablePointer(ProcessIds):
    """Holds what the standard library refuses to pickle with a ValueError."""

    def __init__(self, size: int) -> None:
        self.size = ctypes.pointer(ctypes.c_int(size))


class ProcessIdStream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return repeat(os.getpid(), 8)


Make = Callable[[], Any]

EACH_KIND = pytest.mark.parametrize(
    "make",
    [lambda: TokenLoader(ProcessIds(), 1, num_workers=2), lambda: StreamLoader(ProcessIdStream(), 1, num_workers=2)],
    ids=["map-style", "stream"],
)


@contextmanager
def closing(loader: Any) -> Iterator[Any]:
    try:
        yield loader
    finally:
        loader.close()


@EACH_KIND
def test_workers_stay_alive_from_epoch_to_epoch_and_end_with_close(make: Make) -> None:
    loader = make()
    first, second = ({batch.item() for batch in loader} for _ in range(2))
    loader.restart()
    third = {batch.item() for batch in loader}

    loader.close()

    assert first == second == third
    assert len(first) == 2
    assert not any(map(process_is_alive, first))


@EACH_KIND
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_the_whole_job_leaves_the_workers_at_work(make: Make, number: signal.Signals) -> None:
    with closing(make()) as loader:
        processes = {batch.item() for batch in loader}

        for process in processes:
            os.kill(process, number)

        assert {batch.item() for batch in chain.from_iterable([loader] * 3)} == processes
    assert not any(map(process_is_alive, processes))


def test_workers_end_with_the_last_reference_to_the_loader() -> None:
    loader = TokenLoader(ProcessIds(), 1, num_workers=2)
    processes = {batch.item() for batch in loader}

    del loader

    assert not any(map(process_is_alive, processes))


# What the temporary folder leaves to be done at the end is done last, after this process has waited for its children.
LEFT_OPEN = """
from tempfile import TemporaryDirectory
folder = TemporaryDirectory()
import os, signal
from speedtronic.data import TokenLoader
from tests.data.loading.test_workers import ProcessIds
loader = TokenLoader(ProcessIds(), 1, num_workers=2)
workers = {batch.item() for batch in loader}
for worker in workers:
    os.kill(worker, signal.SIGTERM)
print(*workers)
"""


@pytest.mark.slow
def test_a_program_ends_while_a_loader_is_open() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", LEFT_OPEN], capture_output=True, text=True, timeout=100, check=True, cwd=ROOT
    )

    assert ended.stderr == ""
    assert not any(process_is_alive(int(worker)) for worker in ended.stdout.split())


def test_a_worker_that_is_killed_is_one_error_with_what_to_do() -> None:
    with closing(TokenLoader(Killed(8), 1, num_workers=1)) as loader, pytest.raises(DataWorkerError) as failure:
        next(iter(loader))

    assert str(failure.value).startswith(
        "a worker process that reads tests.support.datasets.Killed has ended (DataLoader"
    )
    assert "lower data.num_workers, data.prefetch_factor or data.micro_batch_size" in str(failure.value)
    assert failure.value.exit_code == 1


def kill_and_wait(process: int) -> None:
    """Kill a child and go on when the signal of its end has been handled here."""
    time.sleep(0.5)  # it waits for work by now: with a lock of torch's in its hand, its end would be waited for forever
    os.kill(process, signal.SIGKILL)
    os.waitid(os.P_PID, process, os.WEXITED | os.WNOWAIT)
    time.sleep(0.1)


@EACH_KIND
def test_the_end_of_a_worker_is_an_error_only_where_a_batch_is_asked_for(make: Make) -> None:
    with closing(make()) as loader:
        batches = BatchStream(loader, capture_rng=dict, restore_rng=lambda state: None)
        worker = int(next(batches))

        kill_and_wait(worker)  # nothing is raised here: it could be in the middle of an update or of a save

        with pytest.raises(DataWorkerError, match=f"has ended .*{worker}.* killed by signal: Killed"):
            next(batches)


def test_the_end_of_a_worker_of_another_loader_is_an_error_only_where_a_batch_is_asked_for() -> None:
    loader = DataLoader(ProcessIds(), num_workers=2, prefetch_factor=1)
    stream = BatchStream(loader, capture_rng=dict, restore_rng=lambda state: None)
    worker = int(next(stream))

    kill_and_wait(worker)

    with pytest.raises(RuntimeError, match="killed by signal: Killed"):
        next(stream)


@pytest.mark.slow
@pytest.mark.parametrize("cannot", [Unsendable(8), UnsendablePointer(8)])
def test_a_dataset_that_cannot_be_sent_is_one_error_with_what_to_do(cannot: Dataset[Any]) -> None:
    loader = TokenLoader(cannot, 1, num_workers=1, multiprocessing_context="spawn")

    with pytest.raises(
        DataError, match=r"Unsendable\w* cannot be sent to a worker process: .*(lambda|pointer).*; define"
    ):
        next(iter(loader))


def parsed(text: str) -> Any:
    return json.loads(text)


def test_blame_names_the_innermost_place_that_is_not_in_a_library() -> None:
    with pytest.raises(json.JSONDecodeError) as failure:
        parsed("")

    line = parsed.__code__.co_firstlineno + 1
    assert str(blame("sample 1 of mine", failure.value)) == (
        "sample 1 of mine: json.decoder.JSONDecodeError: Expecting value: line 1 column 1 (char 0) "
        f"(test_workers.py, line {line})"
    )


def test_own_generators_continue_where_they_ended_and_leave_the_others_alone() -> None:
    def draw(generators: OwnGenerators) -> list[float]:
        with generators.in_use():
            return numbers_of_chance()

    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    own = OwnGenerators(5)
    first = draw(own)
    saved = own.states
    second = draw(own)

    assert torch.equal(torch.rand(1), expected)
    assert first != second
    assert draw(OwnGenerators(5)) == first
    assert draw(OwnGenerators(saved)) == second
