"""Requests that are made again."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from speedtronic.distributed.stores import MemoryStore, RetryingStore
from speedtronic.errors import StoreRefusedError, StoreUnavailableError


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
    retrying = RetryingStore(store)
    retrying.put_if_absent("a", bytes(64 * 1024 * 3), timeout=10.0)
    retrying.get("a", limit=64 * 1024 * 100, timeout=10.0)
    retrying.get("a", limit=64 * 1024 * 100, size=64 * 1024, timeout=10.0)
    retrying.delete("a", timeout=10.0)
    assert store.timeouts == [13.0, 110.0, 11.0, 10.0]
