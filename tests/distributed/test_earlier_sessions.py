from __future__ import annotations

import pytest
import torch

from speedtronic.distributed.codec import make_codec
from speedtronic.distributed.delta import open_delta, pack_delta, spooled_header
from speedtronic.distributed.earlier_sessions import EarlierSessions, look_back
from speedtronic.distributed.ledger import SPOOL, START
from speedtronic.distributed.protocol import DeltaId
from speedtronic.distributed.records import Position, SessionMark, session_name
from speedtronic.distributed.requests import perform
from speedtronic.distributed.schema import Schema
from speedtronic.distributed.stores.memory import MemoryStore
from tests.support.counting_store import CountingStore
from tests.support.nodes import NEW, AddingMaster, delta_name, session, started

S1 = session(1)
FIRST, SECOND = (delta_name(S1, number) for number in (1, 2))


def two_deltas() -> tuple[MemoryStore, AddingMaster, list[bytes]]:
    """A store without deltas, its master, and two of one session that follow on each other."""
    store, master, process = started()
    deltas = []
    for name in (FIRST, SECOND):
        process.train_and_send(2)
        deltas.append(store.get(name, limit=2**20) or b"")
        store.delete(name)
    return store, master, deltas


def look(store: MemoryStore, master: AddingMaster, node: str = "n") -> EarlierSessions:
    return perform(look_back(node, master.head, master.schema, make_codec("fp32"), ("s9",)), store)


def test_a_store_without_the_node_has_nothing_of_it() -> None:
    store, master, deltas = two_deltas()
    store.put_if_absent(FIRST, deltas[0])
    assert look(store, master, node="another") == EarlierSessions(START, frozenset(), {"s9": 0})


def test_outstanding_deltas_count_one_after_the_other() -> None:
    store, master, deltas = two_deltas()
    store.put_if_absent(FIRST, deltas[0])
    store.put_if_absent(SECOND, deltas[1])
    ids = {DeltaId("n", S1, 1), DeltaId("n", S1, 2)}
    assert look(store, master) == EarlierSessions(Position(4, 8, 40), frozenset(ids), {S1: 2, "s9": 0})


def test_marks_count_and_what_comes_after_them() -> None:
    store, master, deltas = two_deltas()
    store.put_if_absent(FIRST, deltas[0])
    master.apply_deltas()
    assert look(store, master).covered == Position(2, 4, 20)
    store.put_if_absent(SECOND, deltas[1])
    assert look(store, master) == EarlierSessions(
        Position(4, 8, 40), frozenset({DeltaId("n", S1, 2)}), {S1: 2, "s9": 0}
    )


def test_a_node_with_a_thousand_sessions_asks_only_for_the_open_ones() -> None:
    store, master, deltas = two_deltas()
    open_ = SessionMark(seq=7, last=None, position=(2, 4, 20))
    mark = NEW.model_copy(update={"closed_below": 1000, "sessions": {session(999): open_}})
    master.publish(nodes={"n": mark})
    for number in (1, 998):
        store.put_if_absent(delta_name(session(number), 1), deltas[0])
    counting = CountingStore(store)
    known = (session(1), session(998))
    found = perform(look_back("n", master.head, master.schema, make_codec("fp32"), known), counting)
    assert counting.requests == {"list": 1, "get": 1}
    assert found == EarlierSessions(Position(2, 4, 20), frozenset(), {session(999): 7})


def test_a_listed_session_that_no_master_would_open_is_nobody_s() -> None:
    store, master, deltas = two_deltas()
    master.publish(nodes={"n": NEW.model_copy(update={"closed_below": 5})})
    for number in (1004, 1005):
        store.put_if_absent(delta_name(session_name(number, "0" * 8), 1), deltas[0])
    assert look(store, master).last_seq == {session_name(1004, "0" * 8): 0}


def not_finite(data: bytes, schema: Schema) -> bytes:
    delta = open_delta(data, schema, make_codec("fp32"))
    return pack_delta(delta.header, {name: tensor * torch.nan for name, tensor in delta.tensors.items()}, delta.buffers)


@pytest.mark.parametrize("damage", ["torn", "flipped", "another's", "not finite", "nothing of ours"])
def test_a_delta_that_cannot_enter_does_not_count(damage: str) -> None:
    store, master, deltas = two_deltas()
    whole = deltas[0]
    data = {
        "torn": whole[:-4],
        "flipped": whole[:-1] + bytes([whole[-1] ^ 1]),
        "another's": deltas[1],
        "not finite": not_finite(whole, master.schema),
        "nothing of ours": b"x" * 64,
    }[damage]
    store.put_if_absent(FIRST, data)
    assert look(store, master).covered == START
    store.put_if_absent(FIRST.replace(".safe", ".1.safe"), whole)  # the copy that its node put beside
    assert look(store, master).covered == Position(2, 4, 20)


def test_an_object_larger_than_a_delta_is_not_read() -> None:
    store, master, _ = two_deltas()
    store.put_if_absent(FIRST, bytes(2**20))
    assert look(store, master).covered == START


def test_names_that_are_not_deltas_are_ignored() -> None:
    store, master, _ = two_deltas()
    for name in (f"in/n/{S1}/x.safetensors", "in/n/00000001.safetensors", delta_name(S1, 0)):
        store.put_if_absent(name, b"x")
    assert look(store, master) == EarlierSessions(START, frozenset(), {"s9": 0})


def test_a_spool_says_which_delta_it_holds_unless_it_is_damaged() -> None:
    _, _, process = started()
    process.train(2)
    process.boundary()
    process.run(process.node.spool())
    data = process.files.contents[SPOOL]
    header = spooled_header(data)
    assert header is not None
    assert (header.id, header.position) == (DeltaId("n", S1, 1), Position(2, 4, 20))
    for cut in (0, 7, 100, len(data) - 1):
        assert spooled_header(data[:cut]) is None
    assert spooled_header(data[:-1] + bytes([data[-1] ^ 128])) is None
