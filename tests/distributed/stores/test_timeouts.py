"""Calls that end within a timeout although they cannot be given one."""

from __future__ import annotations

import threading

import pytest

from speedtronic.distributed.stores.timeouts import BoundedCalls
from speedtronic.errors import StoreUnavailableError


def test_results_and_errors_of_the_call_are_passed_on() -> None:
    calls = BoundedCalls("dir:///store")

    def fail() -> int:
        raise KeyError("mine")

    assert calls.within(30.0, lambda: 7) == 7
    with pytest.raises(KeyError, match="mine"):
        calls.within(30.0, fail)


def test_a_dead_mount_costs_a_few_threads_and_is_used_again_when_it_answers() -> None:
    calls = BoundedCalls("dir:///store")
    released = threading.Event()
    begun: list[threading.Thread] = []

    def hang() -> None:
        begun.append(threading.current_thread())
        released.wait(60)

    for _ in range(4):
        with pytest.raises(StoreUnavailableError, match=r"dir:///store: no answer within 0\.01 s"):
            calls.within(0.01, hang)
    for _ in range(10):
        with pytest.raises(StoreUnavailableError, match="4 earlier requests still hang"):
            calls.within(30.0, hang)
    assert len(begun) == 4
    released.set()
    for thread in begun:
        thread.join()
    assert calls.within(30.0, lambda: "back") == "back"
