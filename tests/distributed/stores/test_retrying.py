"""Requests that are made again."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any, cast

import pytest

from speedtronic.distributed.stores import MemoryStore, RetryingStore, Store
from speedtronic.errors import StoreRefusedError, StoreUnavailableError

MIB = 2**20


class Failing(MemoryStore):
    """Fails as often as it is told, and notes the timeouts that it is given."""

    def __init__(self, failures: int, error: Exception | None = None) -> None:
        super().__init__()
        self.failures = failures
        self.error = error or StoreUnavailableError("busy")
        self.timeouts: list[float] = []

    def get(self, name, *, limit, size=None, sha256=None, partial=False, timeout=60.0):  # type: ignore[no-untyped-def]
        self._asked(timeout)
        return super().get(name, limit=limit, size=size, sha256=sha256, partial=partial)

    def put_if_absent(self, name, data, *, timeout=60.0):  # type: ignore[no-untyped-def]
        self._asked(timeout)
        return super().put_if_absent(name, data)

    def list_after(self, prefix, marker="", *, timeout=60.0):  # type: ignore[no-untyped-def]
        self._asked(timeout)
        return super().list_after(prefix, marker)

    def delete(self, name, *, timeout=60.0):  # type: ignore[no-untyped-def]
        self._asked(timeout)
        super().delete(name)

    def _asked(self, timeout: float) -> None:
        self.timeouts.append(timeout)
        if len(self.timeouts) <= self.failures:
            raise self.error


REQUESTS: dict[str, Callable[[RetryingStore], object]] = {
    "put": lambda store: store.put_if_absent("a", b"1"),
    "get": lambda store: store.get("a", limit=1),
    "list": lambda store: store.list_after(""),
    "delete": lambda store: store.delete("a"),
}


@pytest.mark.parametrize("request_kind", REQUESTS)
def test_each_kind_of_request_is_retried_until_it_succeeds(request_kind: str) -> None:
    store = Failing(5)
    REQUESTS[request_kind](RetryingStore(store, attempts=6, sleep=lambda _: None))
    assert len(store.timeouts) == 6


def test_after_the_last_attempt_the_error_is_raised_without_a_pause() -> None:
    pauses: list[float] = []
    store = Failing(100)
    with pytest.raises(StoreUnavailableError, match="busy"):
        RetryingStore(store, attempts=4, sleep=pauses.append).get("a", limit=1)
    assert len(store.timeouts) == 4
    assert len(pauses) == 3


def test_the_pauses_double_up_to_the_longest_and_are_drawn_up_to_their_length() -> None:
    pauses: list[float] = []
    store = RetryingStore(Failing(100), initial=1.0, maximum=5.0, attempts=6, sleep=pauses.append, random=lambda: 0.5)
    with pytest.raises(StoreUnavailableError):
        store.get("a", limit=1)
    assert pauses == [0.5, 1.0, 2.0, 2.5, 2.5]


def test_thousands_of_attempts_do_not_overflow_the_pause() -> None:
    pauses: list[float] = []
    store = RetryingStore(Failing(2000), maximum=60.0, attempts=2001, sleep=pauses.append, random=lambda: 1.0)
    store.get("a", limit=1)
    assert max(pauses) == pauses[-1] == 60.0


@pytest.mark.parametrize("error", [StoreRefusedError("no access"), ValueError("a bug")])
def test_a_lasting_error_is_not_retried(error: Exception) -> None:
    store = Failing(1, error)
    with pytest.raises(type(error)):
        RetryingStore(store, sleep=lambda _: None).get("a", limit=1)
    assert len(store.timeouts) == 1


@pytest.mark.parametrize(("given_up_after", "attempts"), [(0, 1), (1, 1), (2, 2), (3, 2)])
def test_giving_up_ends_the_attempts_before_or_after_a_pause(given_up_after: int, attempts: int) -> None:
    asked = 0

    def give_up() -> bool:
        nonlocal asked
        asked += 1
        return asked > given_up_after

    store = Failing(100)
    with pytest.raises(StoreUnavailableError):
        RetryingStore(store, attempts=10, sleep=lambda _: None, give_up=give_up).get("a", limit=1)
    assert len(store.timeouts) == attempts


def test_a_request_has_more_time_the_more_bytes_it_may_carry() -> None:
    store = Failing(0)
    retrying = RetryingStore(store, clock=lambda: 0.0)
    retrying.put_if_absent("a", bytes(3 * MIB), timeout=10.0)
    retrying.get("a", limit=100 * MIB, timeout=10.0)
    retrying.get("a", limit=100 * MIB, size=MIB, timeout=10.0)
    retrying.delete("a", timeout=10.0)
    assert store.timeouts == [13.0, 110.0, 11.0, 10.0]


class Linked:
    """A store behind a link with a clock of its own, and what it was given time for.

    Attributes:
        speed: bytes per second; 0 if requests hang.
    """

    def __init__(self, speed: float) -> None:
        self.speed = speed
        self.now = 0.0
        self.timeouts: list[float] = []
        self.there: dict[str, Any] = {}
        self.url = "test://linked"
        self.retrying = RetryingStore(cast(Store, self), sleep=lambda _: None, clock=lambda: self.now)

    def put_if_absent(self, name: str, data: Any, *, timeout: float) -> bool:
        self._take(len(data), timeout)
        return self.there.setdefault(name, data) is data

    def get(self, name: str, *, limit: int, timeout: float, **_: Any) -> Any:
        self._take(len(self.there.get(name, b"")), timeout)
        return self.there.get(name)

    def _take(self, size: int, timeout: float) -> None:
        self.timeouts.append(timeout)
        seconds = size / self.speed if self.speed else math.inf
        self.now += min(seconds, timeout)
        if seconds >= timeout:
            raise StoreUnavailableError("no answer in time")


WEIGHTS = bytes(500 * MIB)


def test_a_first_request_that_hangs_is_given_up_within_minutes() -> None:
    store = Linked(speed=0)
    with pytest.raises(StoreUnavailableError):
        store.retrying.put_if_absent("w/1", WEIGHTS)
    assert store.timeouts[0] == 560.0


def test_over_the_slowest_link_a_request_gets_through_after_timeouts() -> None:
    store = Linked(speed=80 * 1024)
    assert store.retrying.put_if_absent("w/1", WEIGHTS)
    assert store.timeouts == [560.0, 1060.0, 2060.0, 4060.0, 8060.0]
    store.retrying.put_if_absent("w/2", WEIGHTS)
    assert store.timeouts[5:] == [8060.0], "and what was learnt is kept"


def test_a_link_that_becomes_slow_is_found_as_soon_as_one_that_was_never_measured() -> None:
    store = Linked(speed=1000 * MIB)
    store.retrying.put_if_absent("w/1", WEIGHTS)
    store.speed = 80 * 1024
    assert store.retrying.put_if_absent("w/2", WEIGHTS)
    assert store.timeouts == [560.0, 62.0, 560.0, 1060.0, 2060.0, 4060.0, 8060.0]


def test_with_one_attempt_each_the_slowest_link_is_found_too() -> None:
    store = Linked(speed=80 * 1024)
    store.retrying = RetryingStore(cast(Store, store), attempts=1, clock=lambda: store.now)
    for _ in range(4):
        with pytest.raises(StoreUnavailableError):
            store.retrying.put_if_absent("w/1", WEIGHTS)
    assert store.retrying.put_if_absent("w/1", WEIGHTS)


def test_requests_that_hang_together_are_one_timeout() -> None:
    hung = threading.Barrier(3)

    class Hanging(Linked):
        def put_if_absent(self, name: str, data: Any, *, timeout: float) -> bool:
            if self.speed == 0:
                hung.wait(30)
            return super().put_if_absent(name, data, timeout=timeout)

    store = Hanging(speed=0)
    store.retrying = RetryingStore(cast(Store, store), attempts=1, clock=lambda: store.now)

    def put() -> None:
        with pytest.raises(StoreUnavailableError):
            store.retrying.put_if_absent("w/1", WEIGHTS)

    threads = [threading.Thread(target=put) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    store.speed = 100 * MIB
    store.retrying.put_if_absent("w/1", WEIGHTS)
    assert store.timeouts == [560.0] * 3 + [1060.0]


def test_the_time_for_bytes_is_four_times_what_the_slowest_of_the_last_eight_took() -> None:
    store = Linked(speed=8 * MIB)
    store.retrying.put_if_absent("w/0", bytes(16 * MIB))
    store.speed = 100 * MIB
    for index in range(1, 10):
        store.retrying.put_if_absent(f"w/{index}", bytes(100 * MIB), timeout=10.0)
    assert store.timeouts[1:] == [10.0 + 50.0] * 8 + [10.0 + 4.0]


def test_the_ways_up_and_down_are_measured_apart() -> None:
    store = Linked(speed=MIB / 2)
    store.retrying.put_if_absent("w/1", bytes(10 * MIB))
    store.retrying.get("w/1", limit=10 * MIB, timeout=60.0)
    store.retrying.put_if_absent("w/2", bytes(10 * MIB), timeout=60.0)
    assert store.timeouts[1:] == [60.0 + 10.0, 60.0 + 80.0]


def test_small_objects_and_taken_names_say_nothing_about_the_link() -> None:
    store = Linked(speed=100.0)
    store.retrying.put_if_absent("small", bytes(1000))
    store.speed = math.inf
    store.retrying.put_if_absent("w/1", bytes(10 * MIB))
    store.speed = 1000 * MIB
    store.retrying.put_if_absent("w/1", bytes(10 * MIB))
    store.retrying.put_if_absent("w/2", bytes(10 * MIB), timeout=10.0)
    assert store.timeouts[-1] == 20.0


def test_a_failure_before_its_time_leaves_the_time_as_it_is() -> None:
    store = Failing(5)
    RetryingStore(store, sleep=lambda _: None).put_if_absent("a", bytes(3 * MIB), timeout=10.0)
    assert store.timeouts == [13.0] * 6
