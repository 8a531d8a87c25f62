"""A hook that hangs or is slow does not hold up the sender for long; the sender waits for any other hook."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from speedtronic.metrics import MetricLogger
from speedtronic.metrics.hooks import HookThread
from speedtronic.metrics.records import Hook

SOON = 0.02  # seconds of patience that a hanging hook uses up
ENOUGH = 0.5  # the same, where a thread has to end within it once there is nothing left to do
LONG = 30.0  # seconds of patience that nothing here uses up


class Hanging:
    """A hook that does not return until the test lets it go."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.came_back = threading.Semaphore(0)
        self.heard: list[Any] = []

    def on_event(self, event: str, payload: dict[str, Any]) -> None:
        assert self.go.wait(LONG)
        self.heard.append(payload.get("step"))
        self.came_back.release()

    def wait_for(self, events: int) -> None:
        for _ in range(events):
            assert self.came_back.acquire(timeout=LONG)


@pytest.fixture
def hanging() -> Iterator[Hanging]:
    hook = Hanging()
    yield hook
    hook.go.set()


@pytest.fixture
def messages() -> list[str]:
    return []


@pytest.fixture
def thread_of(messages: list[str]) -> Iterator[Callable[..., HookThread]]:
    threads = []

    def make(hook: Hook, patience: float = LONG) -> HookThread:
        threads.append(HookThread(hook, patience, report, messages.append))
        return threads[-1]

    def report(hook: Hook, event: str, error: BaseException) -> None:
        messages.append(f"{event}: {error}")

    yield make
    for thread in threads:
        thread.close()


def test_a_hook_has_finished_when_the_sender_goes_on(thread_of: Callable[..., HookThread]) -> None:
    heard: list[int] = []
    thread = thread_of(lambda event, payload: heard.append(payload["step"]))
    for step in range(50):
        thread.tell("eval", {"step": step})
        assert heard[-1] == step


def test_a_hook_is_always_called_on_the_same_thread_but_not_the_senders(
    thread_of: Callable[..., HookThread],
) -> None:
    threads = []
    thread = thread_of(lambda event, payload: threads.append(threading.current_thread()))
    thread.tell("eval", {})
    thread.tell("eval", {})
    assert threads[0] is threads[1]
    assert threads[0] is not threading.current_thread()


def test_a_hanging_hook_is_waited_for_once_and_gets_the_other_events_when_it_returns(
    thread_of: Callable[..., HookThread], hanging: Hanging, messages: list[str]
) -> None:
    thread = thread_of(hanging, SOON)
    for step in range(1, 6):
        thread.tell("train_step", {"step": step})
    assert hanging.heard == []
    assert messages == [
        "hook Hanging takes too long, now on train_step: training no longer waits for it, so it gets events late, "
        "and misses some if it falls far behind"
    ]
    hanging.go.set()
    hanging.wait_for(5)
    assert hanging.heard == [1, 2, 3, 4, 5]


def test_the_queue_of_a_hanging_hook_is_bounded(
    thread_of: Callable[..., HookThread], hanging: Hanging, messages: list[str]
) -> None:
    thread = thread_of(hanging, ENOUGH)
    for step in range(1500):
        thread.tell("train_step", {"step": step})
    hanging.go.set()
    hanging.wait_for(1001)  # the one that it hung on, and the thousand that found a place
    thread.close()
    assert hanging.heard == list(range(1001))
    assert messages[1:] == ["hook Hanging was too slow and missed 499 events"]


def test_patience_is_for_all_events_together(thread_of: Callable[..., HookThread], messages: list[str]) -> None:
    """A hook that uses a part of it on each event falls behind like a hook that hangs."""
    stopped = threading.Event()
    thread = thread_of(lambda event, payload: stopped.wait(SOON), 3 * SOON)
    for _ in range(20):
        thread.tell("train_step", {})
    stopped.set()
    assert len(messages) == 1
    assert "takes too long" in messages[0]


def test_closing_waits_no_longer_than_the_patience(
    thread_of: Callable[..., HookThread], hanging: Hanging, messages: list[str]
) -> None:
    thread = thread_of(hanging, SOON)
    thread.tell("train_start", {"step": 0})
    thread.tell("train_end", {"step": 1})
    thread.close()
    assert hanging.heard == []
    assert messages[1:] == ["hook Hanging has not returned; 1 events did not reach it"]


def test_closing_waits_for_a_slow_hook(
    thread_of: Callable[..., HookThread], hanging: Hanging, messages: list[str]
) -> None:
    thread = thread_of(hanging, ENOUGH)
    thread.tell("train_start", {"step": 0})
    thread.tell("train_end", {"step": 1})
    hanging.go.set()
    hanging.wait_for(2)
    thread.close()
    assert hanging.heard == [0, 1]
    assert len(messages) == 1


def test_a_hooks_exception_is_reported_whether_the_sender_waited_or_not(
    thread_of: Callable[..., HookThread], hanging: Hanging, messages: list[str]
) -> None:
    def failing(event: str, payload: dict[str, Any]) -> None:
        hanging.on_event(event, payload)
        raise RuntimeError("no network")

    thread = thread_of(failing, ENOUGH)
    thread.tell("train_start", {})
    hanging.go.set()
    thread.tell("eval", {})
    hanging.wait_for(2)
    thread.close()
    assert messages[1:] == ["train_start: no network", "eval: no network"]

    in_time = thread_of(failing)
    in_time.tell("train_end", {})
    assert messages[-1] == "train_end: no network"


def test_an_interrupt_in_a_hook_reaches_the_sender(thread_of: Callable[..., HookThread]) -> None:
    def interrupting(event: str, payload: dict[str, Any]) -> None:
        raise KeyboardInterrupt

    thread = thread_of(interrupting)
    with pytest.raises(KeyboardInterrupt):
        thread.tell("eval", {})


def test_a_hook_may_send_an_event_that_it_gets_itself(thread_of: Callable[..., HookThread]) -> None:
    heard = []

    def echo(event: str, payload: dict[str, Any]) -> None:
        heard.append(event)
        if event == "eval":
            thread.tell("echo", {})

    thread = thread_of(echo)
    thread.tell("eval", {})
    assert heard == ["eval", "echo"]


def test_a_hook_gets_events_that_are_sent_after_closing(thread_of: Callable[..., HookThread]) -> None:
    heard = []
    thread = thread_of(lambda event, payload: heard.append(event))
    thread.tell("a", {})
    thread.close()
    thread.close()
    thread.tell("b", {})
    assert heard == ["a", "b"]


def test_closing_ends_the_thread_of_a_hook_with_a_full_queue(hanging: Hanging) -> None:
    thread = HookThread(hanging, SOON, print, print)
    before = set(threading.enumerate())
    for step in range(1500):
        thread.tell("train_step", {"step": step})
    (worker,) = set(threading.enumerate()) - before
    thread.close()
    hanging.go.set()
    worker.join(LONG)
    assert not worker.is_alive()


def test_a_dropped_logger_leaves_no_thread() -> None:
    threads = []
    logger = MetricLogger(hooks=[lambda event, payload: threads.append(threading.current_thread())])
    logger.emit("eval")
    del logger
    gc.collect()
    threads[0].join(LONG)
    assert not threads[0].is_alive()


def test_a_dropped_hook_leaves_no_thread() -> None:
    threads = []
    thread = HookThread(lambda event, payload: threads.append(threading.current_thread()), LONG, print, print)
    thread.tell("eval", {})
    del thread
    gc.collect()
    threads[0].join(LONG)
    assert not threads[0].is_alive()
