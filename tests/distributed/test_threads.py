"""The threads: when their work is done, what becomes of an error, how they end."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from speedtronic.distributed.threads import BackgroundThread
from speedtronic.errors import StoreRefusedError, StoreUnavailableError

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


def pauses_after(answers: list[Exception | bool], interval: float) -> list[float]:
    """The pauses of a thread whose work raises or returns these one after the other. Each is over at once."""
    pauses: list[float] = []
    left = iter(answers)

    def work() -> bool:
        match next(left):
            case Exception() as error:
                raise error
            case again:
                return again

    def wait(event: threading.Event, seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == len(answers):
            stopping.set()

    stopping = threading.Event()
    thread = BackgroundThread("test", work, interval=interval, failed=lambda error: None, stopping=stopping, wait=wait)
    thread.start()
    assert stopping.wait(SOON)
    assert thread.stop(SOON)
    return pauses


REFUSED = StoreRefusedError("401")


def test_what_is_refused_again_and_again_is_asked_for_less_and_less_often() -> None:
    assert pauses_after([REFUSED] * 7, 60.0) == [60.0, 120.0, 240.0, 480.0, 900.0, 900.0, 900.0]
    assert pauses_after([REFUSED] * 3, 3600.0) == [3600.0] * 3


@pytest.mark.parametrize("answer", [False, StoreUnavailableError("503"), OSError("the disk is full")])
def test_any_other_end_of_the_work_makes_the_pause_short_again(answer: Exception | bool) -> None:
    assert pauses_after([REFUSED, REFUSED, answer, REFUSED], 60.0) == [60.0, 120.0, 60.0, 60.0]


@pytest.mark.parametrize(
    ("error", "urgent", "ends"),
    [
        (REFUSED, False, False),
        (REFUSED, True, True),
        (OSError("the disk is full"), False, True),
    ],
)
def test_a_pause_after_a_refusal_is_ended_by_an_urgent_wake_only(error: Exception, urgent: bool, ends: bool) -> None:
    ended: list[bool] = []

    def work() -> bool:
        raise error

    def wait(event: threading.Event, seconds: float) -> None:
        thread.wake(urgent=urgent)
        ended.append(event.is_set())
        stopping.set()

    stopping = threading.Event()
    thread = BackgroundThread("test", work, interval=NEVER, failed=lambda error: None, stopping=stopping, wait=wait)
    thread.start()
    assert stopping.wait(SOON)
    assert thread.stop(SOON)
    assert ended == [ends]


def test_a_stop_ends_a_pause_after_a_refusal() -> None:
    refused = threading.Event()

    def work() -> bool:
        raise REFUSED

    thread = BackgroundThread("test", work, interval=NEVER, failed=lambda error: refused.set())
    thread.start()
    assert refused.wait(SOON)
    assert thread.stop(SOON)


def test_a_stop_at_the_start_of_a_round_is_not_slept_through() -> None:
    class StoppedWhenAsked(threading.Event):
        """Another thread calls `stop` right after it was asked whether it has."""

        def is_set(self) -> bool:
            stopped = super().is_set()
            self.set()
            thread.wake()
            return stopped

    thread = BackgroundThread("test", lambda: False, interval=NEVER, failed=ignore, stopping=StoppedWhenAsked())
    thread.start()
    thread._thread.join(SOON)
    assert not thread._thread.is_alive()
