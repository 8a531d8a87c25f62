from __future__ import annotations

import subprocess
import sys

import pytest

from speedtronic.distributed.protocol import head_name
from speedtronic.distributed.status import NodeStatus, StoreStatus, store_status
from speedtronic.distributed.stores import MemoryStore
from speedtronic.errors import StoreContentError
from tests.support.published import publish_two_versions, weights_of


@pytest.fixture
def store() -> MemoryStore:
    """Version 2: `a` is in version 1, `b` in version 2."""
    store = MemoryStore("status")
    publish_two_versions(store)
    return store


def node(status: StoreStatus, name: str) -> NodeStatus:
    return next(node for node in status.nodes if node.name == name)


def test_the_status_shows_the_newest_version(store: MemoryStore) -> None:
    status = store_status(store)

    assert (status.version, status.rounds, status.weights_bytes) == (2, 1.5, len(weights_of(2)))
    assert status.time == "2031-05-06T07:09:00+00:00"
    assert status.url == store.url
    assert [node.name for node in status.nodes] == ["a", "b"]


def test_a_node_is_as_far_behind_as_the_rounds_since_its_last_delta(store: MemoryStore) -> None:
    status = store_status(store)

    (of_a,), (of_b,) = node(status, "a").sessions, node(status, "b").sessions
    assert (of_a.seq, of_a.version, of_a.versions_behind, of_a.rounds_behind) == (3, 1, 1, 0.5)
    assert (of_b.versions_behind, of_b.rounds_behind) == (0, 0.0)
    assert (of_a.step, of_a.samples, of_a.tokens, of_a.bytes) == (75, 1200, 153_600, 3000)
    assert (of_a.rejected, of_a.reason) == (1, "stale")
    assert (of_b.rejected, of_b.reason) == (0, None)


def test_waiting_deltas_are_counted_and_processed_ones_are_not(store: MemoryStore) -> None:
    store.put_if_absent("in/a/old/00000003.safetensors", bytes(900))  # processed, and not removed yet
    store.put_if_absent("in/a/old/00000004.safetensors", bytes(1000))
    store.put_if_absent("in/a/old/00000005.safetensors", bytes(1100))

    status = store_status(store)

    (of_a,) = node(status, "a").sessions
    assert (of_a.outstanding, of_a.outstanding_bytes, of_a.bytes) == (2, 2100, 5100)
    assert (status.outstanding, status.outstanding_bytes) == (2, 2100)


def test_a_torn_delta_and_its_copy_count_as_one(store: MemoryStore) -> None:
    store.put_if_absent("in/b/s/00000004.safetensors", bytes(10))
    store.put_if_absent("in/b/s/00000004-1.safetensors", bytes(1000))

    (of_b,) = node(store_status(store), "b").sessions

    assert (of_b.outstanding, of_b.outstanding_bytes) == (1, 1000)


def test_a_session_that_no_version_knows_is_the_newest_of_its_node(store: MemoryStore) -> None:
    store.put_if_absent("in/a/new/00000001.safetensors", bytes(1000))

    old, new = node(store_status(store), "a").sessions

    assert (old.session, new.session) == ("old", "new")
    assert (new.seq, new.seen, new.version, new.versions_behind, new.rounds_behind) == (0, None, None, None, None)
    assert new.outstanding == 1


def test_a_node_is_shown_before_its_first_delta_is_processed(store: MemoryStore) -> None:
    store.put_if_absent("in/c/s/00000001.safetensors", bytes(1000))

    assert [node.name for node in store_status(store).nodes] == ["a", "b", "c"]


def test_names_that_are_not_deltas_are_ignored(store: MemoryStore) -> None:
    before = store_status(store)
    store.put_if_absent("in/readme.txt", b"hello")
    store.put_if_absent("in/a/old/00000000.safetensors", b"x")

    assert store_status(store) == before


def test_all_pages_of_waiting_deltas_are_counted(store: MemoryStore) -> None:
    for seq in range(4, 2504):
        store.put_if_absent(f"in/b/s/{seq:08d}.safetensors", b"12")

    status = store_status(store)

    assert (status.outstanding, status.outstanding_bytes) == (2500, 5000)


def test_neither_weights_nor_deltas_are_downloaded(store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.put_if_absent("in/a/old/00000004.safetensors", bytes(1000))
    read = []
    get = store.get
    monkeypatch.setattr(store, "get", lambda name, **options: [read.append(name), get(name, **options)][1])

    store_status(store)

    assert read
    assert all(name.startswith("head/") for name in read)


def test_a_store_without_a_version_is_an_error_with_the_remedy() -> None:
    with pytest.raises(StoreContentError, match="no master has published yet.*speedtronic diloco master CONFIG"):
        store_status(MemoryStore("nothing"))


def test_a_manifest_that_cannot_be_read_is_an_error_that_names_the_store() -> None:
    store = MemoryStore("odd")
    store.put_if_absent(head_name(0), b"{}")

    with pytest.raises(StoreContentError, match=r"^memory://odd: head/00000000\.json: not a manifest"):
        store_status(store)


def test_looking_at_a_store_loads_no_torch() -> None:
    code = (
        "import speedtronic.distributed.status, sys\nassert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
