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
from speedtronic.distributed.protocol import Position
from speedtronic.distributed.requests import Get, Procedure, Put
from speedtronic.distributed.schema import Schema, rebase_, snapshot
from speedtronic.distributed.stores.memory import MemoryStore
from speedtronic.errors import StoreContentError, StoreUnavailableError
from tests.support.nodes import FULL_DISK, AddingMaster, Counter, Life, MemoryFiles, each_once, started

# ---------------------------------------------------------------------- handing over


def test_a_boundary_comes_every_inner_steps() -> None:
    _, _, life = started()
    wanted = []
    for _ in range(6):
        life.train()
        wanted.append(life.node.wants_boundary())
        if wanted[-1]:
            life.hand_over(0)
    assert wanted == [False, True] * 3


def test_a_delta_says_what_it_holds_and_is_base_minus_local() -> None:
    store, master, life = started()
    life.hand_over(3)
    data = store.get("in/n/s1/00000001.safetensors", limit=2**20)
    assert data is not None
    delta = open_delta(data, Schema.of(life.model), make_codec("fp32"))
    assert [float(value) for value in delta.tensors["done"]] == [-value for value in each_once(3)]
    assert delta.buffers["average"].item() == 3
    assert delta.buffers["count"].item() == 3
    header = delta.header
    assert (header.base_version, header.steps, header.samples, header.tokens) == (0, 3, 6, 30)
    assert header.position == Position(3, 6, 30)
    assert header.seconds == 1.5


def test_numbers_of_tokens_may_be_tensors() -> None:
    store, _, life = started()
    for step, tokens in enumerate([torch.tensor(7), 5, torch.tensor(1)], start=1):
        life.node.count(1, tokens)
        life.node.stepped(step)
    life.hand_over(0)
    data = store.get("in/n/s1/00000001.safetensors", limit=2**20)
    assert data is not None
    assert read_header(data).tokens == 13


def test_the_base_moves_when_the_spool_is_written_and_not_at_the_upload() -> None:
    _, _, life = started()
    life.train(2)
    life.boundary()
    assert life.node.has_snapshot
    life.run(life.node.spool())
    assert not life.node.has_snapshot
    assert life.node.unsent_steps == 0
    assert life.node.state_dict()["base"]["done"].tolist() == life.values
    assert life.node.has_spooled
    assert life.payloads("delta_upload_queued") == [{"step": 2, "seq": 1, "bytes": len(life.files.contents[SPOOL])}]


def test_the_uploaded_bytes_are_those_of_the_spool_which_is_then_free() -> None:
    store, _, life = started()
    life.train(2)
    life.boundary()
    life.run(life.node.spool())
    spooled = life.files.contents[SPOOL]
    assert life.run(life.node.upload())
    assert store.get("in/n/s1/00000001.safetensors", limit=2**20) == spooled
    assert SPOOL not in life.files.contents
    assert life.payloads("delta_uploaded") == [{"seq": 1, "bytes": len(spooled), "session": "s1"}]
    assert not life.run(life.node.upload())


def test_a_boundary_with_a_full_spool_is_skipped_and_the_next_delta_is_cumulative() -> None:
    store, master, life = started()
    life.train(2)
    life.boundary()
    life.run(life.node.spool())
    life.train(2)
    assert life.boundary() == "full"
    assert life.payloads("delta_upload_skipped") == [{"step": 4, "reason": "delta 1 is not uploaded yet"}]
    life.run(life.node.upload())
    assert life.hand_over(2) == "queued"
    assert read_header(store.get("in/n/s1/00000002.safetensors", limit=2**20) or b"").steps == 4
    master.take_in()
    life.take_up()
    assert life.values == each_once(6)


def test_a_boundary_while_the_snapshot_before_waits_is_skipped() -> None:
    _, _, life = started()
    life.train(2)
    assert life.boundary() == "queued"
    life.train(2)
    assert life.boundary() == "full"


def test_a_boundary_with_nothing_new_sends_nothing() -> None:
    _, _, life = started()
    life.hand_over(2)
    assert life.boundary() == "idle"


def test_a_full_disk_makes_the_next_delta_cumulative() -> None:
    store, master, life = started()
    life.files.full = True
    life.train(2)
    life.boundary()
    assert not life.run(life.node.spool())
    assert life.payloads("delta_upload_failed") == [
        {"step": 2, "error": f"the spool cannot be written: {FULL_DISK.strerror}"}
    ]
    assert life.node.unsent_steps == 2
    life.files.full = False
    life.hand_over(2)
    header = read_header(store.get("in/n/s1/00000001.safetensors", limit=2**20) or b"")
    assert (header.seq, header.steps, header.position.step) == (1, 4, 4)
    master.take_in()
    life.take_up()
    assert life.values == each_once(4)


def test_a_failed_write_that_took_effect_leaves_no_spool() -> None:
    class Liar(MemoryFiles):
        def write(self, name: str, data: Any) -> None:
            super().write(name, data)
            if name == SPOOL:
                raise OSError(5, "Input/output error")

    store = MemoryStore()
    AddingMaster(store)
    life = Life(store, Liar(), "s1")
    life.take_up()
    life.train(2)
    life.boundary()
    life.run(life.node.spool())
    assert SPOOL not in life.files.contents


def test_a_disk_that_is_full_after_the_upload_keeps_the_spool_and_uploads_no_second_time() -> None:
    store, _, life = started()
    life.train(2)
    life.boundary()
    life.run(life.node.spool())
    life.files.full = True
    assert not life.run(life.node.upload())
    assert life.node.has_spooled
    store.delete("in/n/s1/00000001.safetensors")  # as a master does that has taken it in
    life.files.full = False
    assert life.run(life.node.upload())
    assert store.get("in/n/s1/00000001.safetensors", limit=2**20) is None


@pytest.mark.parametrize("lost", [1, 2, 3])
def test_lost_acknowledgements_send_the_same_bytes_under_the_same_name(lost: int) -> None:
    store, master, life = started()
    life.train(2)
    life.boundary()
    life.run(life.node.spool())
    spooled = life.files.contents[SPOOL]
    sent = []
    for _ in range(lost):
        upload = life.node.upload()
        next(upload)
        put = upload.send(life.files.read(SPOOL))
        assert isinstance(put, Put)
        sent.append((put.name, bytes(put.data)))
        store.put_if_absent(put.name, put.data)
        with pytest.raises(StopIteration) as end:
            upload.throw(StoreUnavailableError("no answer"))
        assert end.value.value is False
    assert set(sent) == {("in/n/s1/00000001.safetensors", spooled)}
    assert [payload["error"] for payload in life.payloads("delta_upload_failed")] == ["no answer"] * lost
    assert life.run(life.node.upload())
    assert master.take_in() == 1


def test_without_a_master_boundaries_are_skipped_after_some_deltas_and_nothing_is_lost() -> None:
    store, master, life = started()
    taken = [life.hand_over(2) for _ in range(MAX_PENDING + 2)]
    assert taken == ["queued"] * MAX_PENDING + ["full"] * 2
    assert "wait for the master" in life.payloads("delta_upload_skipped")[0]["reason"]
    assert len(life.node.state_dict()["pending"]) == MAX_PENDING
    master.take_in()
    life.take_up()
    assert life.hand_over(2) == "queued"
    master.take_in()
    life.take_up()
    assert life.values == each_once(2 * MAX_PENDING + 6)


def test_the_next_delta_holds_what_bf16_lost() -> None:
    _, master, life = started(codec="bf16")
    with torch.no_grad():
        life.model.done[0] = 1.0 + 2**-10  # eight bits of bf16 keep 1.0 of it
    life.hand_over(2)
    master.take_in()
    assert master.weights["done"][0].item() == 1.0
    life.hand_over(2)
    master.take_in()
    assert master.weights["done"][0].item() == 1.0 + 2**-10
    assert master.weights["done"][1:5].tolist() == [-1.0] * 4


# ---------------------------------------------------------------------- taking up


def test_a_first_version_with_the_initial_weights_keeps_earlier_progress() -> None:
    store = MemoryStore()
    life = Life(store, MemoryFiles(), "s1")
    life.train(3)
    AddingMaster(store)
    install = life.take_up()
    assert install is not None
    assert not install.adopt
    assert life.values == each_once(3)
    assert life.hand_over(0) == "queued"


def test_a_first_version_with_other_weights_is_adopted_and_dropped_steps_are_logged() -> None:
    store = MemoryStore()
    life = Life(store, MemoryFiles(), "s1")
    life.train(3)
    master = AddingMaster(store)
    other = master.weights
    other["done"][0] = 5.0
    master.publish(other)
    install = life.take_up()
    assert install is not None
    assert install.adopt
    assert life.values == [5.0] + [0.0] * (len(life.values) - 1)
    assert life.words("INFO")[-1] == "version 1 is adopted; 3 local steps made before it are dropped"
    life.hand_over(2)
    header = read_header(store.get("in/n/s1/00000001.safetensors", limit=2**20) or b"")
    assert (header.steps, header.position.step) == (2, 5)


def test_a_version_that_comes_between_the_first_one_and_its_installation_drops_nothing() -> None:
    store = MemoryStore()
    life = Life(store, MemoryFiles(), "s1")
    life.train(1)
    master = AddingMaster(store)
    life.run(life.node.poll())
    first = life.node.installable()
    assert first is not None
    other = master.weights
    other["done"][0] = 5.0
    master.publish(other)
    life.run(life.node.poll())  # before the training thread has installed what it was given
    rebase_(life.model, first.new_base, first.base, adopt=first.adopt)
    life.node.installed(first)
    life.train(1)
    second = life.install()
    assert second is not None
    assert not second.adopt
    assert life.values[:3] == [5.0, -1.0, -1.0]


def test_a_version_is_installed_once_and_reported() -> None:
    store, master, life = started()
    life.hand_over()
    master.take_in()
    assert life.take_up() is not None
    assert life.take_up() is None
    assert life.payloads("global_installed") == [
        {"step": 0, "version": 0, "staleness": 0.0, "pending": 0},
        {"step": 2, "version": 1, "staleness": 1.0, "pending": 0},
    ]
    assert life.node.version == 1


def test_buffers_come_from_the_version() -> None:
    _, master, life = started()
    life.train(3)
    other = master.weights
    other["average"].fill_(0.5)
    other["count"].fill_(7)
    master.publish(other)
    life.take_up()
    assert life.model.average.item() == 0.5
    assert life.model.count.item() == 7
    assert life.values == each_once(3)


def test_nothing_is_installed_while_a_snapshot_waits_for_its_commit() -> None:
    _, master, life = started()
    life.train(2)
    life.boundary()
    master.publish(master.weights)
    assert life.run(life.node.poll())
    assert life.node.installable() is None
    life.run(life.node.spool())
    assert life.install() is not None
    assert life.values == each_once(2)


def test_a_commit_between_the_arrival_of_a_version_and_its_installation_is_kept_once() -> None:
    _, master, life = started()
    life.hand_over()
    master.take_in()
    life.run(life.node.poll())  # covers the first delta
    life.train(2)
    life.boundary()
    life.run(life.node.spool())  # the second, which the version does not know
    life.train(1)
    install = life.install()
    assert install is not None
    assert life.values == each_once(5)
    assert [float(value) for value in install.new_base["done"]] == each_once(4)


def test_an_idle_look_is_one_request() -> None:
    store, master, life = started()
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

    assert not watched(life.node.poll())
    assert len(requests) == 1


def _random_walk(seed: int) -> tuple[Tensor, list[float], Tensor]:
    """Run a node against late versions; return its parameter, and the reference's base and local values in float64."""
    generator = torch.Generator().manual_seed(seed)
    store = MemoryStore()
    master = AddingMaster(store)
    life = Life(store, MemoryFiles(), "s1")
    life.take_up()
    size = len(life.values)
    local = torch.zeros(size, dtype=torch.float64)
    base = local.clone()
    pending: dict[int, Tensor] = {}
    seq = 0
    for _ in range(40):
        learnt = torch.randn(size, generator=generator)
        with torch.no_grad():
            life.model.done += learnt
        local = local + learnt.double()
        life.node.count(1, 1)
        life.step += 1
        life.node.stepped(life.step)
        if torch.rand((), generator=generator) < 0.5 and life.hand_over(0) == "queued":
            seq += 1
            pending[seq] = base - local
            base = local.clone()
        if torch.rand((), generator=generator) < 0.3:  # the master takes some of what is there, and moves elsewhere
            master.take_in(most=int(torch.randint(1, 4, (), generator=generator)))
        if torch.rand((), generator=generator) < 0.3 and life.take_up() is not None:
            mark = master.head.marks.get("n/s1")
            pending = {s: delta for s, delta in pending.items() if mark is None or s > mark.seq}
            new_base = master.weights["done"].double() - sum(pending.values(), torch.zeros(size, dtype=torch.float64))
            local = new_base + (local - base)
            base = new_base
    return life.model.done.detach(), life.node.state_dict()["base"]["done"].tolist(), torch.stack([base, local])


@pytest.mark.parametrize("seed", range(8))
def test_an_installation_keeps_pending_and_unsent_progress(seed: int) -> None:
    local, base, reference = _random_walk(seed)
    assert (torch.tensor(base).double() - reference[0]).abs().max() < 1e-4
    assert (local.double() - reference[1]).abs().max() < 1e-4
    assert reference.abs().max() > 1


def test_a_delta_that_was_refused_is_no_longer_kept() -> None:
    _, master, life = started()
    life.hand_over(2)
    master.take_in(refuse=True)
    life.train(1)
    life.take_up()
    assert life.payloads("delta_rejected") == [{"seq": 1, "session": "s1", "reason": "for a test"}]
    assert life.values[:4] == [0.0, 0.0, 0.0, -1.0]
    life.take_up()
    assert len(life.payloads("delta_rejected")) == 1


def test_a_version_with_pruned_weights_is_replaced_by_the_next() -> None:
    store, master, life = started()
    life.hand_over()
    master.take_in()
    store.delete(master.head.weights.path)
    assert life.take_up() is None
    assert life.hand_over() == "queued"
    master.head = master._publish(master.head, {**snapshot(Counter())}, dict(master.head.marks))
    install = life.take_up()
    assert install is not None
    assert install.manifest.version == 2


def test_missing_newest_weights_are_reported_once() -> None:
    store, master, life = started()
    life.hand_over()
    master.take_in()
    store.delete(master.head.weights.path)
    life.take_up()
    assert life.words("WARNING") == [], "a newer version may be there already"
    life.take_up()
    life.take_up()
    assert len(life.words("WARNING")) == 1
    assert master.head.weights.path in life.words("WARNING")[0]


def test_weights_of_another_model_are_refused_by_name() -> None:
    store, master, life = started()
    wide = nn.Linear(3, 3)
    master.head = master._publish(master.head, snapshot(wide), {})
    with pytest.raises(StoreContentError, match=master.head.weights.path):
        life.run(life.node.poll())
    assert life.node.installable() is None


# ---------------------------------------------------------------------- others


def test_a_node_without_a_master_trains_and_logs_it_less_and_less_often() -> None:
    store = MemoryStore()
    life = Life(store, MemoryFiles(), "s1")
    for _ in range(20):
        assert not life.run(life.node.poll())
        life.train(2)
        assert life.boundary() == "waiting"
    assert len(life.words("INFO")) == 5  # at the boundaries 1, 2, 4, 8 and 16
    assert "trains alone until a version" in life.words("INFO")[0]
    AddingMaster(store)
    life.take_up()
    assert life.hand_over(2) == "queued"
    assert life.values == each_once(42)


def test_a_store_of_another_model_is_one_error_and_training_continues() -> None:
    store = MemoryStore()
    AddingMaster(store, nn.Linear(2, 2))
    life = Life(store, MemoryFiles(), "s1")
    for _ in range(3):
        assert not life.run(life.node.poll())
        life.train(2)
        assert life.boundary() == "waiting"
    assert len(life.words("ERROR")) == 1
    assert "of another model" in life.words("ERROR")[0]


def test_two_nodes_of_one_name_are_warned_of_once_by_both() -> None:
    store = MemoryStore()
    master = AddingMaster(store)
    lives = [Life(store, MemoryFiles(), f"s{number}") for number in (1, 2)]
    for _ in range(3):
        for life in lives:
            life.take_up()
            life.hand_over()
        master.take_in()
    for life in lives:
        life.take_up()
        assert len(life.words("WARNING")) == 1
        assert "another machine sends deltas as node 'n'" in life.words("WARNING")[0]


def test_other_nodes_are_not_taken_for_nodes_of_its_name() -> None:
    store = MemoryStore()
    master = AddingMaster(store)
    lives = [Life(store, MemoryFiles(), f"s{number}", node=f"n{number}") for number in (1, 2)]
    for _ in range(3):
        for life in lives:
            life.take_up()
            life.hand_over()
        master.take_in()
    assert not [word for life in lives for word in life.words("WARNING")]


def test_own_earlier_sessions_are_not_taken_for_another_machine() -> None:
    store, master, first = started()
    first.hand_over()
    second = Life(store, first.files, "s2", first.checkpoint())
    second.take_up()
    second.hand_over()
    third = Life(store, first.files, "s3", second.checkpoint())
    third.take_up()
    master.take_in()
    third.take_up()
    assert third.words("WARNING") == []
    assert third.values == each_once(4)


# ---------------------------------------------------------------------- threads and states


def test_a_checkpoint_waits_for_a_commit_in_progress() -> None:
    _, _, life = started()
    life.train(2)
    life.boundary()
    states: list[Any] = []
    saver = threading.Thread(target=lambda: states.append(life.node.state_dict(patience=30)))
    saver.start()
    life.run(life.node.spool())
    saver.join(30)
    assert states[0]["covered"] == {"step": 2, "samples": 4, "tokens": 20}
    assert states[0]["pending_upload"] == {"step": 2}
    assert [entry["seq"] for entry in states[0]["pending"]] == [1]


def test_a_commit_that_never_ends_is_left_out_of_a_checkpoint() -> None:
    _, _, life = started()
    life.train(2)
    life.boundary()
    state = life.node.state_dict(patience=0)
    assert state["covered"]["step"] == 0
    assert state["pending"] == []
    assert state["pending_upload"] == {"step": 2}


def test_a_state_shares_no_memory_that_is_written_later() -> None:
    _, master, life = started()
    life.hand_over()
    state = life.node.state_dict()
    before = {name: tensor.clone() for name, tensor in state["base"].items()}
    life.hand_over()
    master.take_in()
    life.take_up()
    assert all(torch.equal(tensor, before[name]) for name, tensor in state["base"].items())


def test_a_state_comes_back_equal_from_a_checkpoint(tmp_path: Any) -> None:
    store, master, life = started(codec="bf16")
    with torch.no_grad():
        life.model.done[0] = 1.0 + 2**-10
    life.hand_over()
    life.train(1)
    state = life.node.state_dict()
    manager = CheckpointManager(tmp_path)
    manager.save(3, {"coordinator": state})
    loaded = manager.load_latest()
    assert loaded is not None
    again = Life(store, MemoryFiles(life.files.contents), "s2", codec="bf16")
    again.run(again.node.begin(loaded["coordinator"]))
    restored = again.node.state_dict()
    assert restored.pop("session") == "s2"
    assert state.pop("session") == "s1"
    assert _plain(restored) == _plain(state)


def _plain(tree: Any) -> Any:
    if isinstance(tree, Tensor):
        return tree.tolist()
    if isinstance(tree, dict):
        return {key: _plain(value) for key, value in tree.items()}
    return [_plain(item) for item in tree] if isinstance(tree, list) else tree


def test_a_node_holds_no_model_longer_than_it_is_needed() -> None:
    """At rest it has its base, and memory for one snapshot."""
    _, master, life = started()
    first = weakref.ref(life.node.state_dict()["base"]["done"])
    for _ in range(3):
        life.hand_over()
        delta = weakref.ref(life.node.state_dict()["pending"][0]["tensors"]["done"])
        master.take_in()
        life.run(life.node.poll())
        prepared = life.node.installable()
        assert prepared is not None
        version = [weakref.ref(prepared.new_base[name]) for name in ("average", "count")]
        del prepared
        life.install()
        assert [copy() for copy in (first, delta, *version)] == [None] * 4


def test_snapshots_use_the_memory_of_the_base_before() -> None:
    _, master, life = started()
    places = []
    for _ in range(6):
        life.train(2)
        assert life.node.start_boundary() == "queued"
        values = snapshot(life.model, life.node.spare(), names=life.node.exchanged)
        places.append({name: tensor.data_ptr() for name, tensor in values.items()})
        life.node.give_snapshot(values, 1.0)
        life.run(life.node.spool())
        life.run(life.node.upload())
        master.take_in()
        life.take_up()
    assert places[1:] == places[:-1]  # each was replaced by a version before the next
    assert [float(value) for value in master.weights["done"]] == life.values == each_once(12)


def test_memory_that_a_checkpoint_was_given_is_not_used_again() -> None:
    _, master, life = started()
    life.hand_over()
    for take_up in (False, True):
        state = life.node.state_dict()
        before = state["base"]["done"].clone()
        for _ in range(3):
            assert life.hand_over() == "queued"
            if take_up:
                master.take_in()
                life.take_up()
        assert torch.equal(state["base"]["done"], before)


def test_a_snapshot_that_could_not_be_spooled_is_memory_for_the_next() -> None:
    _, _, life = started()
    life.files.full = True
    life.train(2)
    life.boundary()
    life.run(life.node.spool())
    spare = life.node.spare()
    assert spare is not None
    assert spare.keys() == set(life.node.exchanged)
    assert life.node.spare() is None


def test_background_threads_and_training_may_run_at_once() -> None:
    """A training thread that never waits, and lanes and a master that work as they can: each step counts once."""
    store, master, life = started()
    finished = threading.Event()
    failures: list[BaseException] = []

    def lane(*works: Any) -> None:
        try:
            while not finished.is_set():
                for work in works:
                    work()
        except BaseException as error:  # noqa: BLE001 - the thread's edge; the test raises it
            failures.append(error)

    threads = [
        threading.Thread(target=lane, args=(lambda: life.run(life.node.spool()), lambda: life.run(life.node.upload()))),
        threading.Thread(target=lane, args=(lambda: life.run(life.node.poll()),)),
        threading.Thread(target=lane, args=(master.take_in,)),
    ]
    for thread in threads:
        thread.start()
    for _ in range(60):
        life.install()
        life.train()
        if life.node.wants_boundary():
            life.boundary()
    finished.set()
    for thread in threads:
        thread.join(30)
    assert failures == []
    life.run(life.node.spool())
    life.run(life.node.upload())
    life.hand_over(0)
    master.take_in()
    life.take_up()
    assert life.values == each_once(60)
    assert [float(value) for value in master.weights["done"]] == each_once(60)


def test_a_half_precision_model_learns_the_same() -> None:
    store = MemoryStore()
    master = AddingMaster(store, Counter(torch.bfloat16))
    life = Life(store, MemoryFiles(), "s1", model=Counter(torch.bfloat16))
    for _ in range(4):
        life.take_up()
        life.hand_over()
        master.take_in()
    life.take_up()
    assert life.model.done.dtype == torch.bfloat16
    assert life.values == each_once(8)


def test_frozen_parameters_come_from_the_version_and_are_not_sent() -> None:
    model = Counter()
    model.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
    store = MemoryStore()
    master = AddingMaster(store, model)
    other = master.weights
    other["frozen"].fill_(2.0)
    master.publish(other)
    life = Life(store, MemoryFiles(), "s1", model=model)
    life.take_up()
    assert model.frozen.tolist() == [2.0] * 3
    assert "frozen" not in life.node.exchanged
    assert set(life.node.state_dict()["base"]) == {"done"}
