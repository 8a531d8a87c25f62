"""Stores that are made to fail, and that count."""

from __future__ import annotations

import pytest

from speedtronic.distributed.stores import MemoryStore
from speedtronic.errors import StoreUnavailableError
from tests.support.counting_store import CountingStore
from tests.support.faulty_store import Faults, FaultyStore


def outcomes(seed: int, failing: float = 0.3, requests: int = 2000) -> tuple[list[str], MemoryStore]:
    inner = MemoryStore()
    store = FaultyStore(inner, Faults(seed=seed, failing=failing))
    said = []
    for index in range(requests):
        try:
            store.put_if_absent(f"in/{index}", b"x")
        except StoreUnavailableError as error:
            said.append(str(error))
        else:
            said.append("created")
    return said, inner


def test_the_configured_share_of_requests_fails_half_of_them_after_taking_effect() -> None:
    said, inner = outcomes(seed=1)
    failed = [index for index, what in enumerate(said) if what != "created"]
    took_effect = [index for index in failed if inner.get(f"in/{index}", limit=1)]
    assert 500 < len(failed) < 700
    assert 0.4 < len(took_effect) / len(failed) < 0.6
    assert len(set(said)) == 4, "success, 503, timeout, reset"


def test_a_seed_repeats_its_faults_and_another_has_others() -> None:
    assert outcomes(seed=1)[0] == outcomes(seed=1)[0] != outcomes(seed=2)[0]


def test_a_torn_upload_leaves_the_first_bytes_of_large_objects_only() -> None:
    inner = MemoryStore()
    store = FaultyStore(inner, Faults(torn=1.0))
    data = bytes(range(200))
    for name in ("in/node/1", "w/1", "opt/1"):
        with pytest.raises(StoreUnavailableError, match="connection reset after"):
            store.put_if_absent(name, data)
        part = inner.get(name, limit=200)
        assert part is not None
        assert len(part) < 200
        assert data.startswith(part)
    assert store.put_if_absent("head/1", data)
    assert inner.get("head/1", limit=200) == data


def test_a_lagging_listing_hides_what_is_new_and_shows_what_is_gone_until_it_has_caught_up() -> None:
    inner = MemoryStore()
    store = FaultyStore(inner, Faults(seed=3, lagging=0.5))

    def listed() -> set[str]:
        return {entry.name for entry in store.list_after("in/").entries}

    names = {f"in/{index:02d}" for index in range(40)}
    for name in sorted(names):
        inner.put_if_absent(name, b"x")
    seen = [listed() for _ in range(20)]
    assert set() < seen[0] < names
    assert all(earlier <= later for earlier, later in zip(seen, seen[1:], strict=False)), "what was seen stays seen"
    assert seen[-1] == names
    for name in names:
        inner.delete(name)
    seen = [listed() for _ in range(20)]
    assert set() < seen[0] < names
    assert seen[-1] == set()
    assert store.get("in/00", limit=1) is None, "reads do not lag"


def test_requests_take_their_latency_and_the_time_of_their_bytes() -> None:
    pauses: list[float] = []
    store = FaultyStore(MemoryStore(), Faults(latency=5.0, bandwidth=100.0), sleep=pauses.append)
    store.put_if_absent("w/1", bytes(200))
    store.get("w/1", limit=200)
    store.get("w/2", limit=200)
    store.list_after("w/")
    store.delete("w/1")
    assert pauses == [7.0, 7.0, 5.0, 5.0, 5.0]


def test_requests_and_bytes_are_counted_also_where_they_fail() -> None:
    store = CountingStore(FaultyStore(MemoryStore(), Faults(failing=1.0)))
    with pytest.raises(StoreUnavailableError):
        store.put_if_absent("w/1", bytes(10))
    with pytest.raises(StoreUnavailableError):
        store.get("w/1", limit=10)
    assert store.requests == {"put": 1, "get": 1}
    assert store.bytes["put"] == 10
    assert store.bytes["get"] == 0
    store = CountingStore(MemoryStore())
    store.put_if_absent("w/1", bytes(10))
    store.get("w/1", limit=10)
    store.get("w/1", limit=5)
    store.list_after("")
    store.delete("w/1")
    assert store.requests == {"put": 1, "get": 2, "list": 1, "delete": 1}
    assert store.reads == {"w/1": 1}
    assert store.bytes["get"] == 10
    store.reset()
    assert store.requests == {}
