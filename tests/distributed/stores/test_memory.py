"""The store in memory."""

from __future__ import annotations

import pytest

from speedtronic.distributed.stores import MemoryStore, open_store
from tests.distributed.stores.conformance import NAMES, StoreConformance


class TestMemoryStore(StoreConformance):
    @pytest.fixture
    def store(self) -> MemoryStore:
        return MemoryStore("test")


def test_a_listing_ascends_by_the_whole_name() -> None:
    store = MemoryStore()
    for name in NAMES:
        store.put_if_absent(name, b"x")
    for marker in ("", *NAMES, "a", "a/5", "zz"):
        listed = [entry.name for entry in store.list_after("a", marker).entries]
        assert listed == sorted(name for name in NAMES if name.startswith("a") and name > marker)


def test_an_object_does_not_change_with_the_buffer_that_it_came_from() -> None:
    store = MemoryStore()
    data = bytearray(b"before")
    store.put_if_absent("w/1", data)
    data[:] = b"after!"
    assert store.get("w/1", limit=10) == b"before"


def test_stores_of_one_name_are_one_store_in_a_process() -> None:
    one, same, other = open_store("memory://one"), open_store("memory://one"), open_store("memory://other")
    one.put_if_absent("a", b"1")
    assert same.get("a", limit=1) == b"1"
    assert other.get("a", limit=1) is None
    assert one.url == "memory://one"
