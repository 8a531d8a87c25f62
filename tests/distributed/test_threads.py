"""The threads: when their work is done, what becomes of an error, how they end."""

from __future__ import annotations

import threading
from collections.abc import Callable

from speedtronic.distributed.threads import BackgroundThread

SOON = 5.0  # seconds that a test waits for a thread before it fails
NEVER = 3600.0


def ignore(error: Exception) -> None:
    raise AssertionError(f"the thread failed: {error}") from error


def counting(enough: int) -> tuple[Callable[[], bool], threading.Event]:
    """Work that asks to be called again until it was called `enough` times."""
    calls, done = 0, threading.Event()

    def work() -> bool:
        nonlocal calls
        calls += 1
        if calls == enough:
            done.set()
        return calls < enough

    return work, done


def test_work_that_asks_for_more_is_called_again_at_once() -> None:
    work, done = counting(5)
    thread = BackgroundThread("test", work, interval=NEVER, failed=ignore)
    thread.start()
    assert done.wait(SOON)
    assert thread.stop(SOON)


def test_work_is_done_again_after_the_interval() -> None:
    done, calls = threading.Event(), []

    def work() -> bool:
        calls.append(1)
        if len(calls) == 3:
            done.set()
        return False

    thread = BackgroundThread("test", work, interval=0.001, failed=ignore)
    thread.start()
    assert done.wait(SOON)
    assert thread.stop(SOON)


def test_a_thread_woken_during_its_work_does_it_once_more() -> None:
    begun, go_on, twice, calls = threading.Event(), threading.Event(), threading.Event(), []

    def work() -> bool:
        calls.append(1)
        if len(calls) == 2:
            twice.set()
        begun.set()
        go_on.wait(SOON)
        return False

    thread = BackgroundThread("test", work, interval=NEVER, failed=ignore)
    thread.start()
    assert begun.wait(SOON)
    thread.wake()
    go_on.set()
    assert twice.wait(SOON)
    assert thread.stop(SOON)
    assert len(calls) == 2, "and not again and again"


def test_an_error_is_reported_and_the_thread_continues() -> None:
    told: list[Exception] = []
    done = threading.Event()

    def work() -> bool:
        if told:
            done.set()
            return False
        raise OSError("the disk is full")

    thread = BackgroundThread("test", work, interval=0.001, failed=told.append)
    thread.start()
    assert done.wait(SOON)
    assert thread.stop(SOON)
    assert [str(error) for error in told] == ["the disk is full"]


def test_a_hanging_thread_is_left_to_end_by_itself() -> None:
    begun, go_on = threading.Event(), threading.Event()

    def work() -> bool:
        begun.set()
        go_on.wait(SOON)
        return True

    thread = BackgroundThread("test", work, interval=NEVER, failed=ignore)
    thread.start()
    assert begun.wait(SOON)
    assert not thread.stop(0.0)
    go_on.set()
    assert thread.stop(SOON), "it does no more work, though it asked for it"


def test_threads_that_share_a_stop_event_end_together() -> None:
    stopping = threading.Event()
    begun = threading.Event()

    def work() -> bool:
        begun.set()
        stopping.wait(NEVER)
        return True

    waiting = BackgroundThread("waiting", work, interval=NEVER, failed=ignore, stopping=stopping)
    idle = BackgroundThread("idle", lambda: False, interval=NEVER, failed=ignore, stopping=stopping)
    waiting.start()
    idle.start()
    assert begun.wait(SOON)
    assert idle.stop(SOON)
    assert waiting.stop(SOON)


def test_a_thread_that_never_started_stops_without_waiting() -> None:
    assert BackgroundThread("test", lambda: False, interval=NEVER, failed=ignore).stop(0.0)
