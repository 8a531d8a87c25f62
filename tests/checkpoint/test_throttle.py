from __future__ import annotations

import threading

import pytest
import torch

from speedtronic.checkpoint import throttle
from speedtronic.checkpoint.throttle import Throttle


class Thread:
    """Its work and the time are what the test says; waiting is written down."""

    def __init__(self, share: float) -> None:
        self.worked = 0.0
        self.time = 100.0
        self.waits: list[float] = []
        self.throttle = Throttle(share, work=lambda: self.worked, clock=lambda: self.time)
        self.throttle._hurried.wait = self._wait  # type: ignore[method-assign]
        self.throttle.pause()

    def _wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        self.waits.append(timeout)
        self.time += timeout
        return False

    def work(self, seconds: float, *, elapsed: float | None = None) -> None:
        self.worked += seconds
        self.time += seconds if elapsed is None else elapsed
        self.throttle.pause()


def test_a_thread_works_its_share_of_the_time() -> None:
    thread = Thread(0.1)
    thread.work(0.01)
    thread.work(0.02)
    assert thread.waits == pytest.approx([0.09, 0.18])
    assert thread.worked / (thread.time - 100) == pytest.approx(0.1)


def test_time_that_the_disk_takes_is_a_pause() -> None:
    thread = Thread(0.1)
    thread.work(0.01, elapsed=0.06)
    thread.work(0.01, elapsed=5.0)
    assert thread.waits == pytest.approx([0.04, 0.0])


def test_a_slow_disk_is_no_credit_for_later() -> None:
    thread = Thread(0.1)
    thread.work(0.01, elapsed=5.0)
    thread.work(0.01)
    assert thread.waits[1] == pytest.approx(0.09)


def test_a_whole_share_never_waits() -> None:
    thread = Thread(1.0)
    thread.work(3.0)
    assert thread.waits == [0.0]


@pytest.mark.parametrize(
    ("processors", "threads", "on_cpu", "share"),
    [(2, 2, True, 0.03), (2, 4, True, 0.03), (2, 1, True, 1.0), (2, 2, False, 1.0), (64, 32, True, 1.0)],
)
def test_a_writer_takes_little_where_training_keeps_all_processors_busy(
    processors: int, threads: int, on_cpu: bool, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(throttle, "_processors", lambda: processors)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert throttle.background_share(training_on_cpu=on_cpu) == share


def test_hurrying_ends_a_pause_and_all_later_ones() -> None:
    work = iter([0.0, 0.0, 1e6, 1e6, 2e6, 2e6])
    waiting = Throttle(0.1, work=lambda: next(work), clock=lambda: 0.0)
    waiting.pause()
    thread = threading.Thread(target=lambda: (waiting.pause(), waiting.pause()))
    thread.start()
    waiting.hurry()
    thread.join(10)
    assert not thread.is_alive()
