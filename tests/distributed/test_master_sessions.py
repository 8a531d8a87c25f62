"""The master against what lies in a store: its identity, junk among the versions, sessions new and old, protocol 1."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from speedtronic.distributed.master import DOUBTFUL_LOOKS, Master, MasterSettings
from speedtronic.distributed.protocol import (
    IDENTITY,
    MANIFEST_LIMIT,
    DeltaId,
    copy_name,
    head_name,
    read_identity,
)
from speedtronic.distributed.records import session_name
from speedtronic.distributed.requests import perform
from speedtronic.distributed.schema import Schema, TensorSpec
from speedtronic.distributed.stores.folder import FolderStore
from speedtronic.distributed.stores.memory import MemoryStore
from speedtronic.errors import StoreContentError, StoreUnavailableError
from tests.support.masters import Heard, Watched, head_of, names, new_master, packed_delta, send, weights_of

AVERAGING = MasterSettings(outer_lr=1.0, outer_momentum=0.0, expected_nodes=1)
OLDER = Path(__file__).parents[1] / "fixtures/older/store"
ID = "0123456789abcdef" * 2


def named(number: int) -> str:
    return session_name(number, "0000000a")


def started(settings: MasterSettings = AVERAGING) -> tuple[Watched, Master]:
    store, master = Watched(), new_master(settings)
    perform(master.poll(), store)
    return store, master


def first_weight(store: Watched | MemoryStore | FolderStore) -> float:
    return weights_of(store, head_of(store))["weight"][0].item()


# --- The identity of the store


def test_a_store_has_an_identity_before_its_first_version() -> None:
    store, _ = started()
    puts = [name.partition("/")[0] for kind, name in store.requests if kind == "put"]
    assert puts == [IDENTITY, "w", "head"]
    assert head_of(store).store == perform(read_identity(), store)


def test_all_masters_of_a_store_know_one_identity() -> None:
    store, master = started()
    other = new_master(AVERAGING)
    for seq, one in enumerate((other, master, other), start=1):
        send(store.inner, "a", seq, [1.0] * 3)
        assert perform(one.poll(), store) == 1
    assert head_of(store).store == perform(read_identity(), store)


def test_a_master_that_knows_the_store_publishes_nothing_into_an_empty_folder() -> None:
    store = MemoryStore()
    master = new_master(AVERAGING, store_id=ID)
    for _ in range(2):
        with pytest.raises(StoreUnavailableError, match="is the folder mounted"):
            perform(master.poll(), store)
    assert names(store) == []


def test_another_store_at_the_address_is_refused() -> None:
    store, _ = started()
    with pytest.raises(StoreContentError, match="another store lies at this address"):
        perform(new_master(AVERAGING, store_id=ID).poll(), store)


def test_a_mount_that_goes_away_gets_no_version_and_nothing_is_lost_when_it_returns() -> None:
    store, master = started()
    send(store.inner, "a", 1, [1.0] * 3)
    perform(master.poll(), store)
    send(store.inner, "a", 2, [1.0] * 3, base_version=1)
    mounted, bare = store.inner, MemoryStore()

    # It goes away after the listing: what is written into the bare folder does not count.
    class Vanishing(Watched):
        def put_if_absent(self, name: str, data: object, **options: object) -> bool:
            self.inner = bare
            return super().put_if_absent(name, data, **options)

    with pytest.raises(StoreUnavailableError, match="gone"):
        perform(master.poll(), Vanishing(mounted))
    for _ in range(3):
        with pytest.raises(StoreUnavailableError, match="gone"):
            perform(master.poll(), bare)
    assert names(bare, "head/") == []
    assert perform(master.poll(), mounted) == 1
    assert (head_of(mounted).version, first_weight(mounted)) == (2, -1.0)


# --- Junk among the versions


def junk_version() -> bytes:
    """A version 1 of another history."""
    store, master = started()
    send(store.inner, "x", 1, [1.0] * 3)
    perform(master.poll(), store)
    return head_of(store).to_bytes()


@pytest.mark.parametrize("kind", ["garbage", "oversized", "another history", "far ahead", "many"])
def test_a_master_steps_over_junk_among_the_versions(kind: str) -> None:
    store, master = started()
    match kind:
        case "garbage":
            store.inner.put_if_absent(head_name(1), b"\x00garbage")
        case "oversized":
            store.inner.put_if_absent(head_name(1), bytes(MANIFEST_LIMIT + 1))
        case "another history":
            store.inner.put_if_absent(head_name(1), junk_version())
        case "far ahead":
            for version in (2, 1000, 99_999_999):
                store.inner.put_if_absent(head_name(version), b"{}")
        case "many":
            for copy in range(8):
                store.inner.put_if_absent(copy_name(head_name(1), copy), b"{}")
    for seq in (1, 2, 3):
        send(store.inner, "a", seq, [1.0] * 3, base_version=seq - 1)
        assert perform(master.poll(), store) == 1
        master = new_master(AVERAGING)
        assert perform(master.poll(), store) == 0
    assert (head_of(store).version, first_weight(store)) == (3, -2.0)


def test_a_folder_in_the_place_of_a_version_is_stepped_over(tmp_path: Path) -> None:
    store, master = FolderStore(tmp_path / "store"), new_master(AVERAGING)
    perform(master.poll(), store)
    (tmp_path / "store" / head_name(1)).mkdir()
    send(store, "a", 1, [1.0] * 3)
    assert perform(master.poll(), store) == 1
    assert (tmp_path / "store" / copy_name(head_name(1), 1)).is_file()
    perform(new_master(AVERAGING).poll(), store)
    assert head_of(store).version == 1


def test_a_place_that_is_full_of_junk_is_an_error_with_the_remedy() -> None:
    store, master = started()
    for copy in range(9):
        store.inner.put_if_absent(copy_name(head_name(1), copy), b"{}")
    send(store.inner, "a", 1, [1.0] * 3)
    with pytest.raises(StoreContentError, match="remove these files"):
        perform(master.poll(), store)


# --- Sessions


def test_a_late_copy_of_a_closed_sessions_delta_does_not_enter() -> None:
    store, master = started()
    sent = send(store.inner, "a", 1, [1.0] * 3, session=named(1))
    perform(master.poll(), store)
    send(store.inner, "a", 1, [1.0] * 3, session=named(2), base_version=1, predecessor=(named(1), 1))
    perform(master.poll(), store)
    assert list(head_of(store).nodes["a"].sessions) == [named(2)]
    for one in (master, new_master(AVERAGING)):
        send(store.inner, "a", 1, [1.0] * 3, session=named(1))
        send(store.inner, "a", 2, [1.0] * 3, session=named(1))
        assert perform(one.poll(), store) == 0
        assert names(store, "in/") == [], "it is deleted"
    assert (head_of(store).version, first_weight(store)) == (2, -1.0)
    assert head_of(store).has_processed(sent)


def test_both_sessions_of_a_node_enter_in_one_round_and_fold() -> None:
    store, master = started()
    for seq in (1, 2):
        send(store.inner, "a", seq, [1.0] * 3, session=named(1))
    send(store.inner, "a", 1, [1.0] * 3, session=named(2), predecessor=(named(1), 2))
    assert perform(master.poll(), store) == 3
    mark = head_of(store).nodes["a"]
    assert (list(mark.sessions), mark.closed_below) == ([named(2)], 2)


def test_a_delta_of_the_session_before_that_a_listing_hid_enters_later() -> None:
    store, master = started()
    send(store.inner, "a", 1, [1.0] * 3, session=named(2), predecessor=(named(1), 1))
    assert perform(master.poll(), store) == 1
    late = send(store.inner, "a", 1, [1.0] * 3, session=named(1))
    assert perform(master.poll(), store) == 1
    head = head_of(store)
    assert (head.applied, list(head.nodes["a"].sessions)) == ((late.name,), [named(2)])


def test_a_delta_of_the_session_before_that_never_comes_is_given_up() -> None:
    store, master = started()
    send(store.inner, "a", 1, [1.0] * 3, session=named(2), predecessor=(named(1), 3))
    perform(master.poll(), store)
    for _ in range(2 * DOUBTFUL_LOOKS):
        assert perform(master.poll(), store) == 0
    assert head_of(store).version == 1, "while nothing waits, nothing is made for it"
    store.requests.clear()
    for seq in range(2, 2 + DOUBTFUL_LOOKS):
        send(store.inner, "a", seq, [1.0] * 3, session=named(2), base_version=seq - 1)
        assert perform(master.poll(), store) == 1
    head = head_of(store)
    assert (list(head.nodes["a"].sessions), head.nodes["a"].closed_below) == ([named(2)], 2)
    assert head.has_processed(DeltaId("a", named(1), 1))
    assert sum(name.startswith(f"in/a/{named(1)}") for _, name in store.requests) == 2


def test_a_forged_session_moves_no_position_of_another() -> None:
    store, master = started(MasterSettings(outer_lr=1.0, outer_momentum=0.0, expected_nodes=1, quorum=1))
    send(store.inner, "a", 1, [1.0] * 3, session=named(1), step=10)
    perform(master.poll(), store)
    send(store.inner, "a", 1, [0.0] * 3, session=session_name(2, "0bad0bad"), step=10**9, base_version=1)
    perform(master.poll(), store)
    mine = head_of(store).session("a", named(1))
    assert mine is not None
    assert (mine.seq, mine.position[0]) == (1, 10)
    send(store.inner, "a", 2, [1.0] * 3, session=named(1), step=20, base_version=2)
    assert perform(master.poll(), store) == 1
    assert first_weight(store) == -1.0


def test_a_session_with_a_number_far_beyond_the_last_opens_none_and_is_left_alone() -> None:
    store, master = started()
    far = send(store.inner, "a", 1, [1.0] * 3, session=named(5000))
    assert perform(master.poll(), store) == 0
    assert (head_of(store).version, names(store, "in/")) == (0, [far.name])


# --- Stores of protocol 1


@pytest.fixture
def older(tmp_path: Path) -> FolderStore:
    return FolderStore(shutil.copytree(OLDER, tmp_path / "store"))


def older_master(older: FolderStore, heard: Heard | None = None) -> Master:
    weights = weights_of(older, head_of(older))
    schema = Schema({name: TensorSpec("trained", tuple(value.shape), value.dtype) for name, value in weights.items()})
    master = new_master(AVERAGING, schema=schema, initial=weights, heard=heard)
    assert schema.fingerprint == head_of(older).schema_id
    return master


def test_a_store_of_protocol_1_is_continued_in_protocol_2(older: FolderStore) -> None:
    before = head_of(older)
    waiting = names(older, "in/")
    assert (before.protocol, before.store, before.version) == (1, None, 1)
    heard = Heard()
    master = older_master(older, heard)
    assert perform(master.poll(), older) == len(waiting) == 1
    head = head_of(older)
    assert (head.protocol, head.version, head.parent) == (2, 2, before.sha256)
    assert head.store == perform(read_identity(), older) is not None
    assert head.applied == tuple(waiting)
    assert names(older, "in/") == []
    assert "continues from version 1" in heard.words
    perform(older_master(older).poll(), older)
    assert head_of(older) == head


def test_the_first_numbered_session_of_a_node_closes_the_one_of_protocol_1(older: FolderStore) -> None:
    master = older_master(older)
    (waiting,) = names(older, "in/")
    _, node, session, _ = waiting.split("/")
    perform(master.poll(), older)
    known = head_of(older).session(node, session)
    assert known is not None
    zeros = {name: torch.zeros(spec.shape) for name, spec in master._schema.entries.items()}
    old, new = DeltaId(node, session, known.seq + 1), DeltaId(node, named(1), 1)
    older.put_if_absent(old.name, packed_delta(old, zeros, schema=master._schema, base_version=2, protocol=1))
    data = packed_delta(new, zeros, schema=master._schema, base_version=2, predecessor=(session, old.seq))
    older.put_if_absent(new.name, data)
    assert perform(master.poll(), older) == 2
    mark = head_of(older).nodes[node]
    assert (named(1) in mark.sessions, session in mark.sessions, mark.closed_below) == (True, False, 1)
