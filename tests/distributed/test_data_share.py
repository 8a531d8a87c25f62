"""Which part of the data a node reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from speedtronic.config import DistributedConfig
from speedtronic.distributed.data_share import DataShare, share_of_data
from speedtronic.distributed.identity import NodeLock, node_folder
from speedtronic.distributed.stores.memory import MemoryStore
from speedtronic.errors import RunLockedError, StoreUnavailableError
from tests.support.counting_store import CountingStore
from tests.support.failing import Failing


def settings(folder: Path, node: str, **keys: Any) -> DistributedConfig:
    return DistributedConfig(enabled=True, repo_id="memory://test", node_id=node, state_dir=str(folder / node), **keys)


def test_nodes_take_places_in_the_order_in_which_they_come(tmp_path: Path) -> None:
    store = MemoryStore()
    shares = [
        share_of_data(settings(tmp_path, node, expected_nodes=2), store, seed=1) for node in ("ann", "bob", "cid")
    ]
    assert [(share.place, share.part, share.parts, share.order_seed) for share in shares] == [
        (0, 0, 2, None),
        (1, 1, 2, None),
        (2, 0, 2, None),
    ]


def test_a_place_is_remembered_and_kept_when_the_disk_forgets_it(tmp_path: Path) -> None:
    counting = CountingStore(MemoryStore())
    share_of_data(settings(tmp_path, "ann", expected_nodes=4), counting, seed=1)
    first = share_of_data(settings(tmp_path, "bob", expected_nodes=4), counting, seed=1)
    counting.reset()
    assert share_of_data(settings(tmp_path, "bob", expected_nodes=4), counting, seed=1) == first
    assert not counting.requests
    assert share_of_data(settings(tmp_path / "new", "bob", expected_nodes=4), counting, seed=1) == first
    assert counting.requests["put"] == 0


def test_a_damaged_note_of_the_place_is_asked_for_again(tmp_path: Path) -> None:
    store = MemoryStore()
    config = settings(tmp_path, "ann", expected_nodes=2)
    share_of_data(config, store, seed=1)
    (note,) = tmp_path.rglob("place")
    note.write_bytes(b"-7")
    assert share_of_data(config, store, seed=1).place == 0
    assert note.read_bytes() == b"0"


def test_without_a_number_of_nodes_the_store_is_not_asked_and_each_has_an_order(tmp_path: Path) -> None:
    def refuse(kind: str, name: str) -> Exception | None:
        raise AssertionError("the store was asked")

    store: Any = Failing(MemoryStore(), refuse)
    ann, bob = (share_of_data(settings(tmp_path, node), store, seed=1) for node in ("ann", "bob"))
    assert ann == DataShare("ann", None, 1, ann.order_seed)
    assert ann.order_seed != bob.order_seed
    assert share_of_data(settings(tmp_path, "ann"), store, seed=1) == ann
    assert share_of_data(settings(tmp_path, "ann"), store, seed=2) != ann


def test_a_store_that_does_not_answer_is_an_error_for_a_node_that_must_ask(tmp_path: Path) -> None:
    def down(kind: str, name: str) -> Exception | None:
        return StoreUnavailableError("no answer")

    store: Any = Failing(MemoryStore(), down)
    with pytest.raises(StoreUnavailableError, match="no answer"):
        share_of_data(settings(tmp_path, "ann", expected_nodes=2), store, seed=1)


def test_a_name_that_another_node_here_uses_is_refused(tmp_path: Path) -> None:
    store = MemoryStore()
    with NodeLock(node_folder(tmp_path / "ann", store.url, "ann")), pytest.raises(RunLockedError, match="node 'ann'"):
        share_of_data(settings(tmp_path, "ann", expected_nodes=2), store, seed=1)
