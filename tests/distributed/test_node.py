"""A node that runs: what it sends, what it installs, and what it makes of a store or a disk that fails."""

from __future__ import annotations

import json
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from speedtronic.checkpoint import CheckpointManager
from speedtronic.distributed.codec import make_codec
from speedtronic.distributed.delta import DeltaHeader, Predecessor, open_delta, pack_delta, read_header
from speedtronic.distributed.ledger import LEDGER, SPOOL, Ledger
from speedtronic.distributed.node import LOOKS_PER_CHECK, MAX_PENDING
from speedtronic.distributed.protocol import DeltaId, head_name
from speedtronic.distributed.records import Position
from speedtronic.distributed.requests import Get, Procedure, Put, answer
from speedtronic.distributed.schema import Schema, rebase_, snapshot
from speedtronic.distributed.stores.memory import MemoryStore
from speedtronic.errors import StoreContentError, StoreRefusedError, StoreUnavailableError
from tests.support.nodes import (
    FULL_DISK,
    NEW,
    AddingMaster,
    Counter,
    MemoryFiles,
    NodeProcess,
    delta_name,
    each_once,
    session,
    started,
)

# ---------------------------------------------------------------------- handing over


def test_a_boundary_comes_every_inner_steps() -> None:
    _, _, process = started()
    wanted = []
    for _ in range(6):
        process.train()
        wanted.append(process.node.wants_boundary())
        if wanted[-1]:
            process.train_and_send(0)
    assert wanted == [False, True] * 3


def test_a_delta_says_what_it_holds_and_is_base_minus_local() -> None:
    store, master, process = started()
    process.train_and_send(3)
    data = store.get(delta_name(session(1), 1), limit=2**20)
    assert data is not None
    delta = open_delta(data, Schema.of(process.model), make_codec("fp32"))
    assert [float(value) for value in delta.tensors["done"]] == [-value for value in each_once(3)]
    assert delta.buffers["average"].item() == 3
    assert delta.buffers["count"].item() == 3
    header = delta.header
    assert (header.base_version, header.steps, header.samples, header.tokens) == (0, 3, 6, 30)
    assert header.position == Position(3, 6, 30)
    assert header.seconds == 1.5


def test_numbers_of_tokens_may_be_tensors() -> None:
    store, _, process = started()
    for step, tokens in enumerate([torch.tensor(7), 5, torch.tensor(1)], start=1):
        process.node.count(1, tokens)
        process.node.stepped(step)
    process.train_and_send(0)
    data = store.get(delta_name(session(1), 1), limit=2**20)
    assert data is not None
    assert read_header(data).tokens == 13


def test_the_base_moves_when_the_spool_is_written_and_not_at_the_upload() -> None:
    _, _, process = started()
    process.train(2)
    process.boundary()
    assert process.node.has_snapshot
    process.run(process.node.spool())
    assert not process.node.has_snapshot
    assert process.node.unsent_steps == 0
    assert process.node.state_dict()["base"]["done"].tolist() == process.values
    assert process.node.has_spooled
    assert process.payloads("delta_upload_queued") == [
        {"step": 2, "seq": 1, "bytes": len(process.files.contents[SPOOL])}
    ]


def test_the_uploaded_bytes_are_those_of_the_spool_which_is_then_free() -> None:
    store, _, process = started()
    process.train(2)
    process.boundary()
    process.run(process.node.spool())
    spooled = process.files.contents[SPOOL]
    assert process.run(process.node.upload())
    assert store.get(delta_name(session(1), 1), limit=2**20) == spooled
    assert SPOOL not in process.files.contents
    assert process.payloads("delta_uploaded") == [{"seq": 1, "bytes": len(spooled), "session": session(1)}]
    assert not process.run(process.node.upload())


def test_a_boundary_with_a_full_spool_is_skipped_and_the_next_delta_is_cumulative() -> None:
    store, master, process = started()
    process.train(2)
    process.boundary()
    process.run(process.node.spool())
    process.train(2)
    assert process.boundary() == "full"
    assert process.payloads("delta_upload_skipped") == [{"step": 4, "reason": "delta 1 is not uploaded yet"}]
    process.run(process.node.upload())
    assert process.train_and_send(2) == "queued"
    assert read_header(store.get(delta_name(session(1), 2), limit=2**20) or b"").steps == 4
    master.apply_deltas()
    process.receive()
    assert process.values == each_once(6)


def test_a_boundary_while_the_snapshot_before_waits_is_skipped() -> None:
    _, _, process = started()
    process.train(2)
    assert process.boundary() == "queued"
    process.train(2)
    assert process.boundary() == "full"


def test_a_boundary_with_nothing_new_sends_nothing() -> None:
    _, _, process = started()
    process.train_and_send(2)
    assert process.boundary() == "idle"


def test_a_full_disk_makes_the_next_delta_cumulative() -> None:
    store, master, process = started()
    process.files.full = True
    process.train(2)
    process.boundary()
    assert not process.run(process.node.spool())
    assert process.payloads("delta_upload_failed") == [
        {"step": 2, "error": f"the spool cannot be written: {FULL_DISK.strerror}"}
    ]
    assert process.node.unsent_steps == 2
    process.files.full = False
    process.train_and_send(2)
    header = read_header(store.get(delta_name(session(1), 1), limit=2**20) or b"")
    assert (header.seq, header.steps, header.position.step) == (1, 4, 4)
    master.apply_deltas()
    process.receive()
    assert process.values == each_once(4)


def test_a_failed_write_that_took_effect_leaves_no_spool() -> None:
    class Liar(MemoryFiles):
        def write(self, name: str, data: Any) -> None:
            super().write(name, data)
            if name == SPOOL:
                raise OSError(5, "Input/output error")

    store = MemoryStore()
    AddingMaster(store)
    process = NodeProcess(store, Liar(), 1)
    process.receive()
    process.train(2)
    process.boundary()
    process.run(process.node.spool())
    assert SPOOL not in process.files.contents


def test_a_disk_that_is_full_after_the_upload_keeps_the_spool_and_uploads_no_second_time() -> None:
    store, _, process = started()
    process.train(2)
    process.boundary()
    process.run(process.node.spool())
    process.files.full = True
    assert not process.run(process.node.upload())
    assert process.node.has_spooled
    store.delete(delta_name(session(1), 1))  # as a master does that has taken it in
    process.files.full = False
    assert process.run(process.node.upload())
    assert store.get(delta_name(session(1), 1), limit=2**20) is None


@pytest.mark.parametrize("lost", [1, 2, 3])
def test_lost_acknowledgements_send_the_same_bytes_under_the_same_name(lost: int) -> None:
    store, master, process = started()
    process.train(2)
    process.boundary()
    process.run(process.node.spool())
    spooled = process.files.contents[SPOOL]
    sent = []
    for _ in range(lost):
        upload = process.node.upload()
        next(upload)
        put = upload.send(process.files.read(SPOOL))
        assert isinstance(put, Put)
        sent.append((put.name, bytes(put.data)))
        store.put_if_absent(put.name, put.data)
        with pytest.raises(StopIteration) as end:
            upload.throw(StoreUnavailableError("no answer"))
        assert end.value.value is False
    assert set(sent) == {(delta_name(session(1), 1), spooled)}
    assert [payload["error"] for payload in process.payloads("delta_upload_failed")] == ["no answer"] * lost
    assert process.run(process.node.upload())
    assert master.apply_deltas() == 1


def test_a_refused_upload_is_raised_so_that_its_thread_waits_longer_and_longer() -> None:
    _, _, process = started()
    process.train(2)
    process.boundary()
    process.run(process.node.spool())
    upload = process.node.upload()
    next(upload)
    upload.send(process.files.read(SPOOL))
    with pytest.raises(StoreRefusedError, match="403"):
        upload.throw(StoreRefusedError("403"))
    assert [payload["error"] for payload in process.payloads("delta_upload_failed")] == ["403"]
    assert process.run(process.node.upload())


def test_without_a_master_boundaries_are_skipped_after_some_deltas_and_nothing_is_lost() -> None:
    store, master, process = started()
    taken = [process.train_and_send(2) for _ in range(MAX_PENDING + 2)]
    assert taken == ["queued"] * MAX_PENDING + ["full"] * 2
    assert "wait for the master" in process.payloads("delta_upload_skipped")[0]["reason"]
    assert len(process.node.state_dict()["pending"]) == MAX_PENDING
    master.apply_deltas()
    process.receive()
    assert process.train_and_send(2) == "queued"
    master.apply_deltas()
    process.receive()
    assert process.values == each_once(2 * MAX_PENDING + 6)


def test_the_next_delta_holds_what_bf16_lost() -> None:
    _, master, process = started(codec="bf16")
    with torch.no_grad():
        process.model.done[0] = 1.0 + 2**-10  # eight bits of bf16 keep 1.0 of it
    process.train_and_send(2)
    master.apply_deltas()
    assert master.weights["done"][0].item() == 1.0
    process.train_and_send(2)
    master.apply_deltas()
    assert master.weights["done"][0].item() == 1.0 + 2**-10
    assert master.weights["done"][1:5].tolist() == [-1.0] * 4


# ---------------------------------------------------------------------- taking up


def test_a_first_version_with_the_initial_weights_keeps_earlier_progress() -> None:
    store = MemoryStore()
    process = NodeProcess(store, MemoryFiles(), 1)
    process.train(3)
    AddingMaster(store)
    install = process.receive()
    assert install is not None
    assert not install.adopt
    assert process.values == each_once(3)
    assert process.train_and_send(0) == "queued"


def test_a_first_version_with_other_weights_is_adopted_and_dropped_steps_are_logged() -> None:
    store = MemoryStore()
    process = NodeProcess(store, MemoryFiles(), 1)
    process.train(3)
    master = AddingMaster(store)
    other = master.weights
    other["done"][0] = 5.0
    master.publish(other)
    install = process.receive()
    assert install is not None
    assert install.adopt
    assert process.values == [5.0] + [0.0] * (len(process.values) - 1)
    assert process.logged("INFO")[-1] == "version 1 is adopted; 3 local steps made before it are dropped"
    process.train_and_send(2)
    header = read_header(store.get(delta_name(session(1), 1), limit=2**20) or b"")
    assert (header.steps, header.position.step) == (2, 5)


def test_a_version_that_comes_between_the_first_one_and_its_installation_drops_nothing() -> None:
    store = MemoryStore()
    process = NodeProcess(store, MemoryFiles(), 1)
    process.train(1)
    master = AddingMaster(store)
    process.run(process.node.poll())
    first = process.node.installable()
    assert first is not None
    other = master.weights
    other["done"][0] = 5.0
    master.publish(other)
    process.run(process.node.poll())  # before the training thread has installed what it was given
    rebase_(process.model, first.new_base, first.base, adopt=first.adopt)
    process.node.installed(first)
    process.train(1)
    second = process.install()
    assert second is not None
    assert not second.adopt
    assert process.values[:3] == [5.0, -1.0, -1.0]


def test_a_version_is_installed_once_and_reported() -> None:
    store, master, process = started()
    process.train_and_send()
    master.apply_deltas()
    assert process.receive() is not None
    assert process.receive() is None
    assert process.payloads("global_installed") == [
        {"step": 0, "version": 0, "staleness": 0.0, "pending": 0},
        {"step": 2, "version": 1, "staleness": 1.0, "pending": 0},
    ]
    assert process.node.version == 1


def test_buffers_come_from_the_version() -> None:
    _, master, process = started()
    process.train(3)
    other = master.weights
    other["average"].fill_(0.5)
    other["count"].fill_(7)
    master.publish(other)
    process.receive()
    assert process.model.average.item() == 0.5
    assert process.model.count.item() == 7
    assert process.values == each_once(3)


def test_nothing_is_installed_while_a_snapshot_waits_for_its_commit() -> None:
    _, master, process = started()
    process.train(2)
    process.boundary()
    master.publish(master.weights)
    assert process.run(process.node.poll())
    assert process.node.installable() is None
    process.run(process.node.spool())
    assert process.install() is not None
    assert process.values == each_once(2)


def test_a_commit_between_the_arrival_of_a_version_and_its_installation_is_kept_once() -> None:
    _, master, process = started()
    process.train_and_send()
    master.apply_deltas()
    process.run(process.node.poll())  # covers the first delta
    process.train(2)
    process.boundary()
    process.run(process.node.spool())  # the second, which the version does not know
    process.train(1)
    install = process.install()
    assert install is not None
    assert process.values == each_once(5)
    assert [float(value) for value in install.new_base["done"]] == each_once(4)


def test_an_idle_look_is_one_request() -> None:
    store, master, process = started()
    requests: list[Any] = []

    def watched(procedure: Procedure[bool]) -> bool:
        answer: Any = None
        try:
            while True:
                effect = procedure.send(answer)
                requests.append(effect)
                assert isinstance(effect, Get)
                answer = store.get(effect.name, limit=effect.limit)
        except StopIteration as end:
            return bool(end.value)

    assert not watched(process.node.poll())
    assert len(requests) == 1


def _random_walk(seed: int) -> tuple[Tensor, list[float], Tensor]:
    """Run a node against late versions; return its parameter, and the reference's base and local values in float64."""
    generator = torch.Generator().manual_seed(seed)
    store = MemoryStore()
    master = AddingMaster(store)
    process = NodeProcess(store, MemoryFiles(), 1)
    process.receive()
    size = len(process.values)
    local = torch.zeros(size, dtype=torch.float64)
    base = local.clone()
    pending: dict[int, Tensor] = {}
    seq = 0
    for _ in range(40):
        learned = torch.randn(size, generator=generator)
        with torch.no_grad():
            process.model.done += learned
        local = local + learned.double()
        process.node.count(1, 1)
        process.step += 1
        process.node.stepped(process.step)
        if torch.rand((), generator=generator) < 0.5 and process.train_and_send(0) == "queued":
            seq += 1
            pending[seq] = base - local
            base = local.clone()
        if torch.rand((), generator=generator) < 0.3:  # the master takes some of what is there, and moves elsewhere
            master.apply_deltas(most=int(torch.randint(1, 4, (), generator=generator)))
        if torch.rand((), generator=generator) < 0.3 and process.receive() is not None:
            mark = master.head.session("n", session(1))
            pending = {s: delta for s, delta in pending.items() if mark is None or s > mark.seq}
            new_base = master.weights["done"].double() - sum(pending.values(), torch.zeros(size, dtype=torch.float64))
            local = new_base + (local - base)
            base = new_base
    return process.model.done.detach(), process.node.state_dict()["base"]["done"].tolist(), torch.stack([base, local])


@pytest.mark.parametrize("seed", range(8))
def test_an_installation_keeps_pending_and_unsent_progress(seed: int) -> None:
    local, base, reference = _random_walk(seed)
    assert (torch.tensor(base).double() - reference[0]).abs().max() < 1e-4
    assert (local.double() - reference[1]).abs().max() < 1e-4
    assert reference.abs().max() > 1


def test_a_delta_that_was_refused_is_no_longer_kept() -> None:
    _, master, process = started()
    process.train_and_send(2)
    master.apply_deltas(refuse=True)
    process.train(1)
    process.receive()
    assert process.payloads("delta_rejected") == [{"seq": 1, "session": session(1), "reason": "for a test"}]
    assert process.values == each_once(0), "what it learned since was learned on refused weights"
    process.receive()
    assert len(process.payloads("delta_rejected")) == 1
    assert process.node.recoveries == 1
    process.train_and_send(2)
    master.apply_deltas()
    process.receive()
    assert process.values == [0.0, 0.0, 0.0, 0.0, -1.0, -1.0, *each_once(0)[6:]]
    assert master.head.nodes["n"].sessions.keys() == {session(1)}, "the session is open, and goes on"


def test_a_version_with_pruned_weights_is_replaced_by_the_next() -> None:
    store, master, process = started()
    process.train_and_send()
    master.apply_deltas()
    store.delete(master.head.weights.path)
    assert process.receive() is None
    assert process.train_and_send() == "queued"
    master.head = master._publish(master.head, {**snapshot(Counter())}, master.head.nodes)
    install = process.receive()
    assert install is not None
    assert install.manifest.version == 2


def test_missing_newest_weights_are_reported_once() -> None:
    store, master, process = started()
    process.train_and_send()
    master.apply_deltas()
    store.delete(master.head.weights.path)
    process.receive()
    assert process.logged("WARNING") == [], "a newer version may be there already"
    process.receive()
    process.receive()
    assert len(process.logged("WARNING")) == 1
    assert master.head.weights.path in process.logged("WARNING")[0]


def test_weights_of_another_model_are_refused_by_name() -> None:
    store, master, process = started()
    wide = nn.Linear(3, 3)
    master.head = master._publish(master.head, snapshot(wide), {})
    with pytest.raises(StoreContentError, match=master.head.weights.path):
        process.run(process.node.poll())
    assert process.node.installable() is None


# ---------------------------------------------------------------------- others


def test_a_node_without_a_master_trains_and_logs_it_less_and_less_often() -> None:
    store = MemoryStore()
    process = NodeProcess(store, MemoryFiles(), 1)
    for _ in range(20):
        assert not process.run(process.node.poll())
        process.train(2)
        assert process.boundary() == "waiting"
    assert len(process.logged("INFO")) == 5  # at the boundaries 1, 2, 4, 8 and 16
    assert "trains alone until a version" in process.logged("INFO")[0]
    AddingMaster(store)
    process.receive()
    assert process.train_and_send(2) == "queued"
    assert process.values == each_once(42)


def test_a_store_of_another_model_is_one_error_and_training_continues() -> None:
    store = MemoryStore()
    AddingMaster(store, nn.Linear(2, 2))
    process = NodeProcess(store, MemoryFiles(), 1)
    for _ in range(3):
        assert not process.run(process.node.poll())
        process.train(2)
        assert process.boundary() == "waiting"
    assert len(process.logged("ERROR")) == 1
    assert "of another model" in process.logged("ERROR")[0]


def test_two_nodes_of_one_name_are_warned_of_once_by_both() -> None:
    store = MemoryStore()
    master = AddingMaster(store)
    processes = [NodeProcess(store, MemoryFiles(), number) for number in (1, 2)]
    for _ in range(3):
        for process in processes:
            process.receive()
            process.train_and_send()
        master.apply_deltas()
    for process in processes:
        process.receive()
        assert sum("another machine sends deltas as node 'n'" in line for line in process.logged("WARNING")) == 1


def test_other_nodes_are_not_taken_for_nodes_of_its_name() -> None:
    store = MemoryStore()
    master = AddingMaster(store)
    processes = [NodeProcess(store, MemoryFiles(), number, node=f"n{number}") for number in (1, 2)]
    for _ in range(3):
        for process in processes:
            process.receive()
            process.train_and_send()
        master.apply_deltas()
    assert not [word for process in processes for word in process.logged("WARNING")]


def test_own_earlier_sessions_are_not_taken_for_another_machine() -> None:
    store, master, first = started()
    first.train_and_send()
    second = NodeProcess(store, first.files, 2, first.checkpoint())
    second.receive()
    second.train_and_send()
    third = NodeProcess(store, first.files, 3, second.checkpoint())
    third.receive()
    master.apply_deltas()
    third.receive()
    assert third.logged("WARNING") == []
    assert third.values == each_once(4)


# ---------------------------------------------------------------------- threads and states


def test_a_checkpoint_waits_for_a_commit_in_progress() -> None:
    _, _, process = started()
    process.train(2)
    process.boundary()
    states: list[Any] = []
    saver = threading.Thread(target=lambda: states.append(process.node.state_dict(patience=30)))
    saver.start()
    process.run(process.node.spool())
    saver.join(30)
    assert states[0]["covered"] == {"step": 2, "samples": 4, "tokens": 20}
    assert states[0]["pending_upload"] == {"step": 2}
    assert [entry["seq"] for entry in states[0]["pending"]] == [1]


def test_a_commit_that_never_ends_is_left_out_of_a_checkpoint() -> None:
    _, _, process = started()
    process.train(2)
    process.boundary()
    state = process.node.state_dict(patience=0)
    assert state["covered"]["step"] == 0
    assert state["pending"] == []
    assert state["pending_upload"] == {"step": 2}


def test_a_state_shares_no_memory_that_is_written_later() -> None:
    _, master, process = started()
    process.train_and_send()
    state = process.node.state_dict()
    before = {name: tensor.clone() for name, tensor in state["base"].items()}
    process.train_and_send()
    master.apply_deltas()
    process.receive()
    assert all(torch.equal(tensor, before[name]) for name, tensor in state["base"].items())


def test_a_state_comes_back_equal_from_a_checkpoint(tmp_path: Any) -> None:
    store, master, process = started(codec="bf16")
    with torch.no_grad():
        process.model.done[0] = 1.0 + 2**-10
    process.train_and_send()
    process.train(1)
    state = process.node.state_dict()
    manager = CheckpointManager(tmp_path)
    manager.save(3, {"coordinator": state})
    loaded = manager.load_latest()
    assert loaded is not None
    again = NodeProcess(store, MemoryFiles(process.files.contents), 2, codec="bf16")
    again.run(again.node.begin(loaded["coordinator"]))
    restored = again.node.state_dict()
    assert (state.pop("session"), restored.pop("session")) == (session(1), None)
    assert _plain(restored) == _plain(state)


def _plain(tree: Any) -> Any:
    if isinstance(tree, Tensor):
        return tree.tolist()
    if isinstance(tree, dict):
        return {key: _plain(value) for key, value in tree.items()}
    return [_plain(item) for item in tree] if isinstance(tree, list) else tree


def test_a_node_holds_no_model_longer_than_it_is_needed() -> None:
    """At rest it has its base, and memory for one snapshot."""
    _, master, process = started()
    first = weakref.ref(process.node.state_dict()["base"]["done"])
    for _ in range(3):
        process.train_and_send()
        delta = weakref.ref(process.node.state_dict()["pending"][0]["tensors"]["done"])
        master.apply_deltas()
        process.run(process.node.poll())
        prepared = process.node.installable()
        assert prepared is not None
        version = [weakref.ref(prepared.new_base[name]) for name in ("average", "count")]
        del prepared
        process.install()
        assert [copy() for copy in (first, delta, *version)] == [None] * 4


def test_snapshots_use_the_memory_of_the_base_before() -> None:
    _, master, process = started()
    places = []
    for _ in range(6):
        process.train(2)
        assert process.node.start_boundary() == "queued"
        values = snapshot(process.model, process.node.spare(), names=process.node.exchanged)
        places.append({name: tensor.data_ptr() for name, tensor in values.items()})
        process.node.give_snapshot(values, 1.0)
        process.run(process.node.spool())
        process.run(process.node.upload())
        master.apply_deltas()
        process.receive()
    assert places[1:] == places[:-1]  # each was replaced by a version before the next
    assert [float(value) for value in master.weights["done"]] == process.values == each_once(12)


def test_memory_that_a_checkpoint_was_given_is_not_used_again() -> None:
    _, master, process = started()
    process.train_and_send()
    for take_up in (False, True):
        state = process.node.state_dict()
        before = state["base"]["done"].clone()
        for _ in range(3 if take_up else MAX_PENDING - 1):
            if take_up:
                master.apply_deltas()
                process.receive()
            assert process.train_and_send() == "queued"
        assert torch.equal(state["base"]["done"], before)


def test_without_a_master_a_node_holds_its_base_and_the_pending_deltas() -> None:
    _, master, process = started()
    copies = []
    for _ in range(MAX_PENDING + 2):
        process.train(2)
        if process.node.start_boundary() == "queued":
            values = snapshot(process.model, process.node.spare(), names=process.node.exchanged)
            copies.append(weakref.ref(values["done"]))
            process.node.give_snapshot(values, 1.0)
            del values
            process.run(process.node.spool())
            process.run(process.node.upload())
    assert [copy() is not None for copy in copies] == [False] * (MAX_PENDING - 1) + [True]
    assert process.node.spare() is None
    master.apply_deltas()
    process.receive()
    assert process.node.spare() is not None, "the base before, for the next snapshot"


def test_a_snapshot_that_could_not_be_spooled_is_memory_for_the_next() -> None:
    _, _, process = started()
    process.files.full = True
    process.train(2)
    process.boundary()
    process.run(process.node.spool())
    spare = process.node.spare()
    assert spare is not None
    assert spare.keys() == set(process.node.exchanged)
    assert process.node.spare() is None


def test_background_threads_and_training_may_run_at_once() -> None:
    """A training thread that never waits, and threads and a master that work as they can: each step counts once."""
    store, master, process = started()
    finished = threading.Event()
    failures: list[BaseException] = []

    def loop(*works: Any) -> None:
        try:
            while not finished.is_set():
                for work in works:
                    work()
        except BaseException as error:  # noqa: BLE001 - the thread's edge; the test raises it
            failures.append(error)

    threads = [
        threading.Thread(
            target=loop, args=(lambda: process.run(process.node.spool()), lambda: process.run(process.node.upload()))
        ),
        threading.Thread(target=loop, args=(lambda: process.run(process.node.poll()),)),
        threading.Thread(target=loop, args=(master.apply_deltas,)),
    ]
    for thread in threads:
        thread.start()
    for _ in range(60):
        process.install()
        process.train()
        if process.node.wants_boundary():
            process.boundary()
    finished.set()
    for thread in threads:
        thread.join(30)
    assert failures == []
    process.run(process.node.spool())
    process.run(process.node.upload())
    master.apply_deltas()
    process.receive()  # so that the last delta is not one too many without a version
    process.train_and_send(0)
    master.apply_deltas()
    process.receive()
    assert process.values == each_once(60)
    assert [float(value) for value in master.weights["done"]] == each_once(60)


def test_a_half_precision_model_learns_the_same() -> None:
    store = MemoryStore()
    master = AddingMaster(store, Counter(torch.bfloat16))
    process = NodeProcess(store, MemoryFiles(), 1, model=Counter(torch.bfloat16))
    for _ in range(4):
        process.receive()
        process.train_and_send()
        master.apply_deltas()
    process.receive()
    assert process.model.done.dtype == torch.bfloat16
    assert process.values == each_once(8)


def test_frozen_parameters_come_from_the_version_and_are_not_sent() -> None:
    model = Counter()
    model.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
    store = MemoryStore()
    master = AddingMaster(store, model)
    other = master.weights
    other["frozen"].fill_(2.0)
    master.publish(other)
    process = NodeProcess(store, MemoryFiles(), 1, model=model)
    process.receive()
    assert model.frozen.tolist() == [2.0] * 3
    assert "frozen" not in process.node.exchanged
    assert set(process.node.state_dict()["base"]) == {"done"}


# ---------------------------------------------------------------------- sessions


def _header(store: MemoryStore, name: str) -> DeltaHeader:
    return read_header(store.get(name, limit=2**20) or b"")


def test_a_session_has_the_next_number_and_names_the_one_before_in_every_delta() -> None:
    store, master, first = started()
    first.train_and_send()
    first.train_and_send()
    assert first.node.session == session(1)
    assert _header(store, delta_name(session(1), 2)).predecessor is None
    second = NodeProcess(store, first.files, 2, first.checkpoint())
    assert second.node.session is None, "its number is known after the first look"
    second.receive()
    for seq in (1, 2):
        master.apply_deltas()
        second.receive()
        second.train_and_send()
        assert _header(store, delta_name(session(2, 2), seq)).predecessor == Predecessor(session=session(1), last=2)


def test_a_process_that_sent_nothing_leaves_its_number_to_the_next() -> None:
    store, master, first = started()
    first.train_and_send()
    idle = NodeProcess(store, first.files, 2, first.checkpoint())
    idle.receive()
    third = NodeProcess(store, first.files, 3, idle.checkpoint())
    third.receive()
    assert (idle.node.session, third.node.session) == (session(2, 2), session(3, 3))
    third.train_and_send()
    assert _header(store, delta_name(session(3, 3), 1)).predecessor == Predecessor(session=session(1), last=1)
    fourth = NodeProcess(store, idle.files, 4)
    fourth.receive()
    assert fourth.node.session == session(4, 4)


def test_a_number_is_not_below_what_the_store_has_closed() -> None:
    store = MemoryStore()
    master = AddingMaster(store)
    master.publish(nodes={"n": NEW.model_copy(update={"closed_below": 40})})
    process = NodeProcess(store, MemoryFiles(), 1)
    process.receive()
    assert process.node.session == session(40)


def test_a_delta_of_a_session_of_protocol_1_is_the_predecessor_of_the_first_numbered_one() -> None:
    store, _, _ = started()
    ledger = Ledger.of(DeltaId("n", "20310506T070809Z-0a1b2c3d", 7), Position(2, 4, 20), (), origin=None)
    older = {key: value for key, value in json.loads(ledger.to_bytes()).items() if key not in {"store", "residual"}}
    process = NodeProcess(store, MemoryFiles({LEDGER: json.dumps(older).encode()}), 1)
    process.receive()
    process.train_and_send()
    header = _header(store, delta_name(session(1), 1))
    assert header.predecessor == Predecessor(session="20310506T070809Z-0a1b2c3d", last=7)
    assert header.position == Position(4, 8, 40)


def test_a_node_whose_session_was_closed_opens_another_and_adopts() -> None:
    store, master, process = started()
    process.train_and_send()
    master.publish(nodes={"n": NEW.model_copy(update={"closed_below": 9})})
    process.train(1)
    process.receive()
    assert process.node.session == session(9)
    assert process.values == each_once(0)
    assert "was closed" in process.logged("WARNING")[0]
    assert process.node.state_dict()["pending"] == []
    store.delete(delta_name(session(1), 1))
    process.train_and_send()
    assert _header(store, delta_name(session(9), 1)).predecessor == Predecessor(session=session(1), last=1)
    assert master.apply_deltas() == 1


def test_a_node_that_the_master_forgot_opens_another_session_and_adopts() -> None:
    store, master, process = started()
    process.train_and_send()
    master.apply_deltas()
    process.receive()
    process.train_and_send()
    master.publish(nodes={})
    process.receive()
    assert process.node.session == session(2)
    assert process.values == each_once(2)
    assert process.node.recoveries == 1


def test_a_closed_session_without_a_delta_on_its_way_costs_nothing() -> None:
    _, master, process = started()
    process.train(1)
    master.publish(nodes={"n": NEW.model_copy(update={"closed_below": 9})})
    process.receive()
    assert (process.node.session, process.node.recoveries) == (session(9), 0)
    assert process.values == each_once(1)


def test_a_commit_that_began_before_its_session_was_closed_is_the_predecessor_s_last() -> None:
    store, master, process = started()
    process.train(2)
    process.boundary()
    commit = process.node.spool()
    write = next(commit)
    master.publish(nodes={"n": NEW.model_copy(update={"closed_below": 9})})
    process.run(process.node.poll())
    answer(write, store, process.files)
    with pytest.raises(StopIteration):
        commit.send(None)
    process.run(process.node.upload())
    process.install()
    process.train_and_send(2)
    header = _header(store, delta_name(session(9), 1))
    assert (header.seq, header.predecessor) == (1, Predecessor(session=session(1), last=1))


# ---------------------------------------------------------------------- refused, and not finite


@pytest.mark.parametrize("value", [torch.nan, torch.inf, 2.0**65])
@pytest.mark.parametrize("codec", ["fp32", "bf16"])
def test_a_node_with_weights_that_nobody_can_use_recovers_and_its_next_delta_is_admitted(
    value: float, codec: str
) -> None:
    store, master, process = started(codec)
    process.train_and_send(2)
    process.train(1)
    with torch.no_grad():
        process.model.done[:] = value
    assert process.boundary() == "queued"
    assert not process.run(process.node.spool())
    assert SPOOL not in process.files.contents
    assert "done has values that are not finite" in process.logged("WARNING")[0]
    assert process.node.wants_version
    process.train(1)
    assert process.boundary() == "waiting"
    install = process.receive()  # there is no newer version: the same is taken once more
    assert install is not None
    assert (install.manifest.version, install.adopt, install.resets_optimizer) == (0, True, True)
    assert process.values == each_once(2), "what is on its way is kept"
    process.train_and_send(2)
    master.apply_deltas()
    learned = process.receive()
    assert learned is not None
    assert not learned.resets_optimizer
    expected = [0.0, -1, -1, 0, 0, -1, -1, *each_once(0)[7:]]
    assert process.values == [float(value) for value in master.weights["done"]] == expected
    assert process.node.recoveries == 1


def test_a_residual_is_still_owed_after_weights_that_were_not_finite() -> None:
    _, master, process = started("bf16")
    with torch.no_grad():
        process.model.done[0] = 1.0 + 2**-10
    process.train_and_send(2)
    with torch.no_grad():
        process.model.done[1] = torch.nan
    process.train(2)
    process.boundary()
    process.run(process.node.spool())
    process.receive()
    process.train_and_send(2)
    master.apply_deltas()
    assert master.weights["done"][0].item() == 1.0 + 2**-10


def _refuse_first_delta(gone: bool) -> tuple[MemoryStore, AddingMaster, NodeProcess]:
    """A node whose first delta was refused by a master that noted it nowhere."""
    store, master, process = started()
    process.train_and_send(2)
    if gone:
        store.delete(delta_name(session(1), 1))
    return store, master, process


def test_a_first_delta_that_was_refused_and_deleted_is_noticed_after_a_round() -> None:
    store, master, process = _refuse_first_delta(gone=True)
    master.publish()
    process.receive()
    assert process.node.recoveries == 0, "this version may be older than the upload"
    process.train(1)
    assert process.values == each_once(3)
    master.publish()
    process.receive()
    assert process.payloads("delta_rejected") == [
        {"seq": 1, "session": session(1), "reason": "the master took it into no version; its log says why"}
    ]
    assert process.values == each_once(0)
    assert process.node.session == session(2)
    process.train_and_send(2)
    assert _header(store, delta_name(session(2), 1)).predecessor == Predecessor(session=session(1), last=1)
    master.publish()
    process.receive()
    assert len(process.payloads("delta_rejected")) == 1


def test_a_first_delta_that_still_stands_after_three_rounds_was_refused() -> None:
    _, master, process = _refuse_first_delta(gone=False)
    for rounds in range(4):
        assert process.node.recoveries == 0, rounds
        master.publish()
        process.receive()
    assert process.node.recoveries == 1
    assert process.node.session == session(2)


def test_a_delta_that_a_still_newer_version_took_was_not_refused() -> None:
    store, master, process = started()
    process.train_and_send(2)
    for _ in range(2):
        master.publish()
        if process.receive() is None:
            pytest.fail("there is a version")
    master.publish()

    def polled() -> None:
        """A look, during which the master takes the delta in and deletes it."""
        poll = process.node.poll()
        effect = next(poll)
        try:
            while True:
                if isinstance(effect, Get) and effect.name == delta_name(session(1), 1):
                    master.apply_deltas()
                effect = poll.send(answer(effect, store, process.files))
        except StopIteration:
            return

    polled()
    install = process.install()
    assert install is not None
    assert install.manifest.version == 4
    assert process.node.recoveries == 0
    assert process.values == each_once(2)


# ---------------------------------------------------------------------- who else writes in its name


def _forge(store: MemoryStore, process: NodeProcess, number: int = 1, step: int = 10**6) -> DeltaId:
    """A delta of zeros that claims to be of this node, and far ahead."""
    forged = DeltaId("n", session(number, 0xF0), 1)
    header = DeltaHeader(
        node="n",
        session=forged.session,
        seq=1,
        base_version=0,
        steps=1,
        samples=1,
        tokens=1,
        seconds=1.0,
        position=Position(step, step, step),
        schema_id=Schema.of(process.model).fingerprint,
        codec="fp32",
        time="",
    )
    zeros = {name: torch.zeros_like(value) for name, value in snapshot(process.model).items()}
    store.put_if_absent(forged.name, pack_delta(header, {"done": zeros.pop("done")}, zeros))
    return forged


def test_a_forged_delta_in_the_name_of_a_running_node_moves_nothing_of_it() -> None:
    store, master, process = started()
    process.train_and_send(2)
    _forge(store, process)
    master.apply_deltas()
    process.receive()
    assert master.head.nodes["n"].position.step == 10**6
    process.train_and_send(2)
    master.apply_deltas()
    process.receive()
    assert process.step == 4
    assert process.values == each_once(4)
    assert ["another machine sends deltas" in line for line in process.logged("WARNING")] == [True]


@pytest.mark.parametrize("with_checkpoint", [True, False])
@pytest.mark.parametrize("taken_in", [True, False])
def test_a_forged_delta_does_not_move_a_node_that_was_down_and_has_its_ledger(
    with_checkpoint: bool, taken_in: bool
) -> None:
    store, master, process = started()
    process.train_and_send(2)
    checkpoint = process.checkpoint() if with_checkpoint else None
    _forge(store, process)
    if taken_in:
        master.apply_deltas()
    again = NodeProcess(store, process.files, 2, checkpoint)
    again.receive()
    assert again.step == 2
    again.train_and_send(2)
    master.apply_deltas()
    again.receive()
    assert again.values == each_once(4)


def test_on_a_new_disk_the_store_is_believed_and_a_message_says_so_once() -> None:
    store, master, process = started()
    process.train_and_send(2)
    again = NodeProcess(store, MemoryFiles(), 2)
    for _ in range(3):
        again.receive()
        master.publish()
    assert again.step == 2
    assert [line for line in again.logged("INFO") if "this disk does not know" in line] == [
        "this disk does not know all that node 'n' sent; the store says that its work up to step 2 is there"
    ]


def test_twin_machines_both_go_on_and_lose_no_delta_after_the_first() -> None:
    store = MemoryStore()
    master = AddingMaster(store)
    twins = [NodeProcess(store, MemoryFiles(), number) for number in (1, 2)]
    for twin in twins:
        twin.receive()
        twin.train_and_send()
    for _ in range(4):
        for twin in twins:
            twin.receive()
        master.apply_deltas()
        for twin in twins:
            twin.receive()
            assert twin.train_and_send() == "queued"
    taken = master.apply_deltas()
    assert taken == 2
    for twin in twins:
        twin.receive()
        assert twin.values == [float(value) for value in master.weights["done"]]
    assert sum(twin.node.recoveries for twin in twins) <= 1


def test_a_node_behind_a_version_beside_removed_junk_finds_it() -> None:
    store, master, process = started()
    process.train_and_send()
    name = head_name(master.head.version + 1)
    assert store.put_if_absent(name, b"junk")
    master.apply_deltas()
    store.delete(name)
    assert [process.run(process.node.poll()) for _ in range(LOOKS_PER_CHECK)] == [
        *[False] * (LOOKS_PER_CHECK - 1),
        True,
    ]
    process.install()
    assert process.node.version == master.head.version


# ---------------------------------------------------------------------- a store that goes away


class Mount(MemoryStore):
    """A folder where a store is mounted; while it is `away` there is an empty folder, and what is put there is lost."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = MemoryStore()
        self.bare = MemoryStore()
        self.away = False

    @property
    def _now(self) -> MemoryStore:
        return self.bare if self.away else self.inner

    def put_if_absent(self, name: str, data: Any, **options: Any) -> bool:
        return self._now.put_if_absent(name, data, **options)

    def get(self, name: str, **options: Any) -> bytes | None:
        return self._now.get(name, **options)

    def list_after(self, prefix: str, marker: str = "", **options: Any) -> Any:
        return self._now.list_after(prefix, marker, **options)

    def delete(self, name: str, **options: Any) -> None:
        self._now.delete(name, **options)


def mounted() -> tuple[Mount, AddingMaster, NodeProcess]:
    store = Mount()
    master = AddingMaster(store)
    process = NodeProcess(store, MemoryFiles(), 1)
    process.receive()
    return store, master, process


def test_what_was_put_while_the_store_was_away_is_not_acknowledged() -> None:
    store, master, process = mounted()
    process.train(2)
    process.boundary()
    process.run(process.node.spool())
    store.away = True
    assert not process.run(process.node.upload())
    assert process.node.has_spooled
    assert "mounted" in process.payloads("delta_upload_failed")[0]["error"]
    store.away = False
    assert process.run(process.node.upload())
    assert master.apply_deltas() == 1
    process.receive()
    assert process.values == each_once(2)


def test_a_store_that_is_away_is_noticed_by_looks_that_find_nothing() -> None:
    store, _, process = mounted()
    store.away = True
    for look in range(LOOKS_PER_CHECK):
        if look == LOOKS_PER_CHECK - 1:
            with pytest.raises(StoreUnavailableError, match="is the folder mounted"):
                process.run(process.node.poll())
        else:
            assert not process.run(process.node.poll())


def test_a_node_that_starts_while_the_store_is_away_does_not_take_the_folder_for_an_empty_store() -> None:
    store, _, process = mounted()
    process.train_and_send(2)
    store.away = True
    again = NodeProcess(store, process.files, 2, process.checkpoint())
    with pytest.raises(StoreUnavailableError, match="is the folder mounted"):
        again.run(again.node.poll())
    store.away = False
    again.receive()
    assert again.values == each_once(2)


def test_a_node_learns_the_identity_of_an_older_store_as_soon_as_it_has_one() -> None:
    store = Mount()
    master = AddingMaster(store, anonymous=True)
    process = NodeProcess(store, MemoryFiles(), 1)
    process.receive()
    assert process.train_and_send(2) == "queued"
    assert process.node.store is None
    master.give_identity()
    process.receive()
    assert process.node.store == master.identity
    process.train_and_send(2)
    ledger = Ledger.from_bytes(process.files.contents[LEDGER])
    assert ledger is not None
    assert ledger.store == master.identity
    store.away = True
    again = NodeProcess(store, process.files, 2)
    with pytest.raises(StoreUnavailableError, match="is the folder mounted"):
        again.run(again.node.poll())


def test_a_restart_learns_the_identity_that_the_store_was_given_meanwhile() -> None:
    store = MemoryStore()
    master = AddingMaster(store, anonymous=True)
    process = NodeProcess(store, MemoryFiles(), 1)
    process.receive()
    process.train_and_send(2)
    master.give_identity()
    again = NodeProcess(store, process.files, 2, process.checkpoint())
    again.receive()
    assert again.node.store == master.identity
    ledger = Ledger.from_bytes(process.files.contents[LEDGER])
    assert ledger is not None
    assert (ledger.store, ledger.last("n")) == (master.identity, DeltaId("n", session(1), 1))
    assert again.values == each_once(2)
