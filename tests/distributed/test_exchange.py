"""Real nodes and a real master over every store: what faults change (nothing), and what is asked of the store."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from speedtronic.distributed.requests import perform
from speedtronic.distributed.stores import FolderStore, MemoryStore, Store
from speedtronic.distributed.stores.retrying import RetryingStore
from tests.distributed.stores.servers import ON_SERVERS, PLACES, Place
from tests.support.counting_store import CountingStore
from tests.support.faulty_store import Faults, FaultyStore
from tests.support.masters import history_of, names
from tests.support.together import assert_same, together

NODES, ROUNDS, KEPT = 4, 6, 3

New = Callable[[], Store]  # an empty store of its own


@pytest.fixture(scope="module", params=["memory", "folder", *ON_SERVERS])
def new_store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[New]:
    if request.param in PLACES:
        with PLACES[request.param]() as place:
            yield from _on(place)
    elif request.param == "folder":
        yield lambda: FolderStore(Path(tmp_path_factory.mktemp("store")))
    else:
        yield MemoryStore


def _on(place: Place) -> Iterator[New]:
    opened: list[Store] = []

    def new() -> Store:
        opened.append(place.open(f"run-{len(opened)}"))
        return opened[-1]

    yield new
    for store in opened:
        store.close()


def applied(store: Store) -> list[str]:
    """The names of all deltas that entered, in order; the history is a linear one."""
    return list(itertools.chain.from_iterable(manifest.applied for manifest in history_of(store)))


def each_delta_once(rounds: int) -> list[str]:
    return [
        f"in/n{node}/00000001-00000001/{seq:08d}.safetensors" for seq in range(1, rounds + 1) for node in range(NODES)
    ]


def test_faults_in_a_third_of_all_requests_change_no_bit(new_store: New) -> None:
    undisturbed, _, _ = together(NODES, ROUNDS)
    inner = new_store()
    waits: list[float] = []
    faulty = FaultyStore(inner, Faults(failing=0.3, torn=0.1, seed=4), sleep=waits.append)
    store = RetryingStore(faulty, attempts=30, sleep=waits.append)
    disturbed, workers, _ = together(NODES, ROUNDS, store=store)
    assert_same(disturbed, undisturbed)
    for worker in workers:
        assert_same(worker.model, undisturbed)
    assert len(waits) > 50, "requests did fail"
    assert applied(inner) == each_delta_once(ROUNDS)


def test_each_delta_is_downloaded_once_and_an_idle_look_is_one_request_or_two(new_store: New) -> None:
    store = CountingStore(new_store())
    _, workers, loop = together(NODES, ROUNDS, store=store)
    assert {name: times for name, times in store.reads.items() if name.startswith("in/")} == dict.fromkeys(
        each_delta_once(ROUNDS), 1
    )
    store.reset()
    assert not perform(workers[0].node.poll(), store)
    assert store.requests == {"get": 1}
    store.reset()
    assert loop.sync_once() == 0
    assert store.requests == {"get": 1, "list": 1}
    assert store.bytes.total() == 0


def test_after_many_rounds_the_store_holds_only_kept_versions_and_manifests(new_store: New) -> None:
    store, rounds = new_store(), 4 * KEPT
    together(NODES, rounds, store=store, keep_versions=KEPT, inner=1)
    assert names(store, "in/") == []
    assert len(names(store, "w/")) == KEPT
    assert len(names(store, "opt/")) == KEPT
    assert len(names(store, "head/")) == rounds + 1
