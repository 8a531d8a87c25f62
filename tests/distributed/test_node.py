"""A node that runs: what it sends, what it installs, and what it makes of a store or a disk that fails."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from speedtronic.checkpoint import CheckpointManager
from speedtronic.distributed.codec import make_codec
from speedtronic.distributed.delta import open_delta, read_header
from speedtronic.distributed.ledger import SPOOL
from speedtronic.distributed.node import MAX_PENDING
from speedtronic.distributed.records import Position
from speedtronic.distributed.requests import Get, Procedure, Put
from speedtronic.distributed.schema import Schema, rebase_, snapshot
from speedtronic.distributed.stores.memory import MemoryStore
from speedtronic.errors import StoreContentError, StoreUnavailableError
from tests.support.nodes import (
    FULL_DISK,
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
