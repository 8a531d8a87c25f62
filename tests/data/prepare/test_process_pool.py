from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from speedtronic.data.prepare.encode import Position, Unit
from speedtronic.data.prepare.process_pool import ProcessLostError, available_cpus, map_in_order
from speedtronic.data.prepare.tables import RowsChunk
from speedtronic.durable.processes import process_is_alive
from speedtronic.errors import DataError
from tests.support import tasks


def units(count: int) -> Iterator[Unit]:
    for number in range(count):
        yield Unit((RowsChunk("here", 0, ("x" * number,), number),), Position(number))


def until(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.01)


def test_results_come_in_the_order_of_the_units_from_several_processes() -> None:
    results = list(map_in_order(tasks.size, units(40), processes=2))

    assert [unit.next.number for unit, _ in results] == list(range(40))
    assert [size for _, (size, _) in results] == list(range(40))
    assert os.getpid() not in {pid for _, (_, pid) in results}


@pytest.mark.parametrize(("count", "processes"), [(40, 1), (4, 3), (0, 3)])
def test_one_process_or_little_work_needs_no_other_process(count: int, processes: int) -> None:
    results = list(map_in_order(tasks.size, units(count), processes=processes))

    assert [size for _, (size, _) in results] == list(range(count))
    assert {pid for _, (_, pid) in results} <= {os.getpid()}


def test_units_are_taken_when_they_are_needed() -> None:
    asked = 0

    def counted() -> Iterator[Unit]:
        nonlocal asked
        for unit in units(1000):
            asked += 1
            yield unit

    with closing(map_in_order(tasks.size, counted(), processes=2)) as results:
        for _ in range(10):
            next(results)

    assert asked <= 10 + 2 * 2 + 1


@pytest.mark.parametrize("processes", [1, 2])
def test_tokenizers_use_no_threads_of_their_own(monkeypatch: pytest.MonkeyPatch, processes: int) -> None:
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")

    assert {found for _, found in map_in_order(tasks.parallelism, units(8), processes=processes)} == {"false"}
    assert os.environ["TOKENIZERS_PARALLELISM"] == "true"
    monkeypatch.delenv("TOKENIZERS_PARALLELISM")
    list(map_in_order(tasks.parallelism, units(1), processes=1))
    assert "TOKENIZERS_PARALLELISM" not in os.environ


@pytest.mark.parametrize("processes", [1, 2])
def test_an_error_in_a_process_is_raised_here(processes: int) -> None:
    with pytest.raises(DataError, match="this unit is wrong"):
        list(map_in_order(tasks.refuse, units(10), processes=processes))


def test_a_killed_process_is_an_error() -> None:
    with pytest.raises(ProcessLostError, match="was killed or could not start.*fewer --processes"):
        list(map_in_order(tasks.die, units(10), processes=2))


def test_closing_does_not_wait_for_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIGNS", str(tmp_path))

    def interrupt() -> None:
        until(lambda: len(list(tmp_path.iterdir())) == 2)
        os.kill(os.getpid(), signal.SIGINT)

    with ThreadPoolExecutor() as threads:
        threads.submit(interrupt)
        with pytest.raises(KeyboardInterrupt):
            list(map_in_order(tasks.hang, units(10), processes=2))

    pids = [int(path.name) for path in tmp_path.iterdir()]
    assert len(pids) == 2
    assert not any(map(process_is_alive, pids))


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
@pytest.mark.parametrize(
    "number",
    [
        signal.SIGKILL,
        *(pytest.param(n, marks=pytest.mark.slow) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)),
    ],
)
def test_workers_end_with_the_process_that_started_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    monkeypatch.setenv("SIGNS", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))
    code = (
        "from speedtronic.data.prepare.process_pool import map_in_order\n"
        "from tests.data.prepare.test_process_pool import units\n"
        "from tests.support import tasks\nlist(map_in_order(tasks.hang, units(10), processes=2))"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True, start_new_session=True)
    until(lambda: len(list(tmp_path.iterdir())) == 2)
    # To all of them, as a terminal sends Ctrl-C; what cannot be ignored only to the parent.
    (os.kill if number == signal.SIGKILL else os.killpg)(parent.pid, number)
    _, said = parent.communicate(timeout=60)

    until(lambda: not any(process_is_alive(int(path.name)) for path in tmp_path.iterdir()))
    assert said.count("Traceback") == (1 if number == signal.SIGINT else 0)


def test_this_process_may_use_a_cpu() -> None:
    assert 1 <= available_cpus() <= (os.cpu_count() or 1)
