"""Which part of the data a node reads."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from speedtronic.config import DistributedConfig
from speedtronic.distributed.data_partition import DataPartition, claim_place, data_partition_of
from speedtronic.distributed.identity import NodeLock, node_folder
from speedtronic.distributed.ledger import LEDGER, START, Ledger
from speedtronic.distributed.node_files import NodeFiles
from speedtronic.distributed.requests import Put, answer, perform
from speedtronic.distributed.stores import RetryingStore
from speedtronic.distributed.stores.memory import MemoryStore
from speedtronic.errors import RunLockedError, StoreUnavailableError
from tests.support.counting_store import CountingStore
from tests.support.failing import Failing
from tests.support.masters import Fault


def settings(folder: Path, node: str, **keys: Any) -> DistributedConfig:
    return DistributedConfig(enabled=True, repo_id="memory://test", node_id=node, state_dir=str(folder / node), **keys)


def test_nodes_take_places_in_the_order_in_which_they_come(tmp_path: Path) -> None:
    store = MemoryStore()
    shares = [
        data_partition_of(settings(tmp_path, node, expected_nodes=2), store, seed=1) for node in ("ann", "bob", "cid")
    ]
    assert [(share.place, share.part, share.parts, share.order_seed) for share in shares] == [
        (0, 0, 2, None),
        (1, 1, 2, None),
        (2, 0, 2, None),
    ]


def test_a_place_is_remembered_and_kept_when_the_disk_forgets_it(tmp_path: Path) -> None:
    counting = CountingStore(MemoryStore())
    data_partition_of(settings(tmp_path, "ann", expected_nodes=4), counting, seed=1)
    first = data_partition_of(settings(tmp_path, "bob", expected_nodes=4), counting, seed=1)
    counting.reset()
    assert data_partition_of(settings(tmp_path, "bob", expected_nodes=4), counting, seed=1) == first
    assert not counting.requests
    assert data_partition_of(settings(tmp_path / "new", "bob", expected_nodes=4), counting, seed=1) == first
    assert counting.requests["put"] == 0


def test_a_damaged_place_file_is_asked_for_again(tmp_path: Path) -> None:
    store = MemoryStore()
    config = settings(tmp_path, "ann", expected_nodes=2)
    data_partition_of(config, store, seed=1)
    (note,) = tmp_path.rglob("place")
    note.write_bytes(b"-7")
    assert data_partition_of(config, store, seed=1).place == 0
    assert note.read_bytes() == b"0"


def test_without_a_number_of_nodes_the_store_is_not_asked_and_each_has_an_order(tmp_path: Path) -> None:
    def refuse(kind: str, name: str) -> Exception | None:
        raise AssertionError("the store was asked")

    store: Any = Failing(MemoryStore(), refuse)
    ann, bob = (data_partition_of(settings(tmp_path, node), store, seed=1) for node in ("ann", "bob"))
    assert ann == DataPartition("ann", None, 1, ann.order_seed)
    assert ann.order_seed != bob.order_seed
    assert data_partition_of(settings(tmp_path, "ann"), store, seed=1) == ann
    assert data_partition_of(settings(tmp_path, "ann"), store, seed=2) != ann


def test_a_store_that_does_not_answer_is_an_error_for_a_node_that_must_ask(tmp_path: Path) -> None:
    def down(kind: str, name: str) -> Exception | None:
        return StoreUnavailableError("no answer")

    store: Any = Failing(MemoryStore(), down)
    with pytest.raises(StoreUnavailableError, match="no answer"):
        data_partition_of(settings(tmp_path, "ann", expected_nodes=2), store, seed=1)


def test_a_node_that_knows_its_store_takes_no_place_in_an_empty_folder(tmp_path: Path) -> None:
    config = settings(tmp_path, "ann", expected_nodes=2)
    bare = CountingStore(MemoryStore())
    folder = node_folder(tmp_path / "ann", bare.url, "ann")
    NodeFiles(folder).write(LEDGER, Ledger.of(None, START, (), origin=None, store="ab" * 16).to_bytes())
    with pytest.raises(StoreUnavailableError, match="is the folder mounted"):
        data_partition_of(config, RetryingStore(bare, prove=True), seed=1)
    assert bare.requests == {"get": 1}


def test_a_node_name_in_use_on_this_machine_is_refused(tmp_path: Path) -> None:
    store = MemoryStore()
    with NodeLock(node_folder(tmp_path / "ann", store.url, "ann")), pytest.raises(RunLockedError, match="node 'ann'"):
        data_partition_of(settings(tmp_path, "ann", expected_nodes=2), store, seed=1)


# --- Places


def test_each_node_gets_a_place_of_its_own_and_finds_it_again() -> None:
    store = MemoryStore()
    assert [perform(claim_place(node), store) for node in "abcab"] == [0, 1, 2, 0, 1]


def test_a_place_is_kept_over_a_lost_answer() -> None:
    for done in [True, False]:
        for at in range(4):
            store = MemoryStore()
            perform(claim_place("a"), store)
            with pytest.raises(StoreUnavailableError):
                Fault(at, done=done, kills=False).run(claim_place("b"), store)
            assert [perform(claim_place(node), store) for node in "bca"] == [1, 2, 0]


def test_nodes_that_claim_at_once_get_different_places() -> None:
    for order in sorted(set(itertools.permutations("aaabbb"))):
        store = MemoryStore()
        places: dict[str, int] = {}
        running = {node: claim_place(node) for node in "ab"}
        asked = {node: next(procedure) for node, procedure in running.items()}
        for node in itertools.chain(order, itertools.cycle("ab")):
            if len(places) == 2:
                break
            if node in places:
                continue
            try:
                asked[node] = running[node].send(answer(asked[node], store, None))
            except StopIteration as end:
                places[node] = end.value
        assert sorted(places.values()) == [0, 1]


def test_an_unreadable_place_belongs_to_another_node() -> None:
    store = MemoryStore()
    store.put_if_absent("place/0000.json", b"?")
    assert perform(claim_place("a"), store) == 1


def test_a_place_is_read_before_it_is_claimed() -> None:
    procedure = claim_place("a")
    assert not isinstance(next(procedure), Put)
