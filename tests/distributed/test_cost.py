"""What is counted before a run, compared with what real nodes and a real master ask of a store."""

from __future__ import annotations

import pytest

from speedtronic.distributed.cost import ADMIT, LOOK, MASTER_LOOK, PUBLISH, SEND, TAKE, Requests, Sizes, expected_load
from speedtronic.distributed.requests import perform
from speedtronic.distributed.schema import Schema
from speedtronic.distributed.stores import MemoryStore
from tests.support.counting_store import CountingStore
from tests.support.together import network, together

NODES = 3


def counted(store: CountingStore) -> Requests:
    requests = Requests(**{kind: float(store.requests[kind]) for kind in Requests._fields})
    store.reset()
    return requests


def test_each_step_of_a_round_asks_what_is_counted() -> None:
    store = CountingStore(MemoryStore())
    _, workers, loop = together(NODES, 2, store=store, keep_versions=1)
    store.reset()
    for worker in workers:
        worker.train_and_send()
    assert counted(store) == SEND.times(NODES)
    loop.sync_once()
    assert counted(store) == PUBLISH.plus(ADMIT.times(NODES))
    for worker in workers:
        worker.receive()
    assert counted(store) == TAKE.times(NODES)
    perform(workers[0].node.poll(), store)
    assert counted(store) == LOOK
    loop.sync_once()
    assert counted(store) == MASTER_LOOK


def test_the_sizes_are_those_of_the_objects_in_the_store() -> None:
    store = MemoryStore()
    _, workers, _ = together(1, 1, store=store)
    workers[0].train_and_send()
    sizes = Sizes.of(Schema.of(network()), "fp32")
    for prefix, size in (("in/", sizes.delta), ("w/", sizes.weights), ("opt/", sizes.momentum)):
        (*_, newest) = store.list_after(prefix).entries
        assert newest.size <= size < newest.size + 1024, prefix


@pytest.mark.parametrize(("quorum", "versions"), [(4, 2.0), (2, 4.0), (1, 8.0)])
def test_a_load_follows_from_rounds_and_looks(quorum: int, versions: float) -> None:
    load = expected_load(
        Sizes(delta=1000, weights=2000, momentum=500),
        nodes=4,
        hours=10.0,
        steps=2000,
        inner_steps=100,
        poll_interval=360.0,
        quorum=quorum,
        keep=3,
    )
    assert (load.deltas, load.versions) == (8.0, versions)
    assert load.requests.put == 8 + 3 * versions
    assert load.requests.delete == 8 + 2 * versions
    assert load.sent > 8 * 1000 + versions * 2500
    assert load.received == 8 * 1000 + 4 * versions * 2000
    assert load.stored > 3 * 2500 + 4 * 1000
    assert (load.commits, load.commits_in_one) == (versions, versions + 8)


def test_nodes_that_look_seldom_take_fewer_versions() -> None:
    load = expected_load(
        Sizes(1, 1, 1), nodes=2, hours=1.0, steps=1000, inner_steps=1, poll_interval=60.0, quorum=1, keep=1
    )
    assert load.versions == 2000
    assert load.received == 2000 + 2 * 60
