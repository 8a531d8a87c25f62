"""A node that comes back: whatever its checkpoint, its disk and the store know, no step is lost or sent twice."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import pytest
import torch

from speedtronic.distributed.ledger import LEDGER, RESIDUALS, SPOOL
from speedtronic.distributed.node import Node, is_ahead
from speedtronic.distributed.records import Position
from speedtronic.distributed.stores.base import Listing
from speedtronic.distributed.stores.memory import MemoryStore
from speedtronic.errors import CheckpointError
from tests.support.nodes import (
    AddingMaster,
    Checkpoint,
    Counter,
    KilledError,
    MemoryFiles,
    NodeProcess,
    delta_name,
    each_once,
    session,
    started,
)

# What a node may find on its disk: all that it left, or nothing.
Disk = Callable[[NodeProcess], MemoryFiles]


def same_disk(process: NodeProcess) -> MemoryFiles:
    return process.files


def new_disk(process: NodeProcess) -> MemoryFiles:
    return MemoryFiles()


def finish(process: NodeProcess, master: AddingMaster, last: int) -> None:
    """Train up to a step, hand everything over, and take it up again."""
    for _ in range(4):  # what is in the spool, what the master has, what was learned meanwhile
        process.run(process.node.poll())
        process.install()
        process.run(process.node.upload())
        master.apply_deltas()
    process.train_and_send(max(0, last - process.step))
    master.apply_deltas()
    process.receive()


def learned(master: AddingMaster) -> list[float]:
    return [float(value) for value in master.weights["done"]]


# ---------------------------------------------------------------------- the disk is not ahead of the checkpoint


def test_a_node_continues_from_its_checkpoint() -> None:
    store, master, process = started()
    process.train_and_send(2)
    process.train(1)  # not sent when it ends
    again = NodeProcess(store, process.files, 2, process.checkpoint())
    assert again.step == 3
    assert again.node.unsent_steps == 1
    finish(again, master, 6)
    assert again.values == learned(master) == each_once(6)


def test_pending_deltas_of_an_earlier_session_are_kept_until_a_version_covers_them() -> None:
    store, master, process = started()
    process.train_and_send(2)
    again = NodeProcess(store, process.files, 2, process.checkpoint())
    other = master.weights
    other["done"][0] = 5.0
    master.publish(other)
    again.receive()
    assert again.values == [5.0, *each_once(2)[1:]]
    master.apply_deltas()
    again.receive()
    assert again.values == [5.0, *each_once(2)[1:]]


def test_a_delta_in_the_spool_is_sent_first_under_its_old_name() -> None:
    store, master, process = started()
    process.train(2)
    process.boundary()
    process.run(process.node.spool())
    spooled = process.files.contents[SPOOL]
    again = NodeProcess(store, process.files, 2, process.checkpoint())
    again.train(2)
    again.run(again.node.poll())
    assert again.boundary() == "full"
    assert again.run(again.node.upload())
    assert store.get(delta_name(session(1), 1), limit=2**20) == spooled
    finish(again, master, 6)
    assert store.get(delta_name(session(1), 1), limit=2**20) is None
    mark = master.head.nodes["n"]
    assert mark.closed_below == 2
    assert {name: open_.seq for name, open_ in mark.sessions.items()} == {session(2, 2): 1}
    assert again.values == learned(master) == each_once(6)


def test_nothing_is_sent_before_the_first_look_after_a_restart() -> None:
    store, _, process = started()
    process.train(2)
    process.boundary()
    process.run(process.node.spool())
    again = NodeProcess(store, process.files, 2, process.checkpoint())
    again.train(2)
    assert again.boundary() == "waiting"
    assert not again.run(again.node.upload())
    assert store.get(delta_name(session(1), 1), limit=2**20) is None


def test_the_residual_of_a_lossy_codec_survives_a_restart() -> None:
    store, master, process = started(codec="bf16")
    with torch.no_grad():
        process.model.done[0] = 1.0 + 2**-10
    process.train_and_send(2)
    again = NodeProcess(store, process.files, 2, process.checkpoint(), codec="bf16")
    finish(again, master, 4)
    assert learned(master) == [1.0 + 2**-10, *each_once(4)[1:]]


def test_a_restart_before_the_first_version_keeps_local_progress() -> None:
    store = MemoryStore()
    process = NodeProcess(store, MemoryFiles(), 1)
    process.train(3)
    again = NodeProcess(store, process.files, 2, process.checkpoint())
    master = AddingMaster(store)
    finish(again, master, 5)
    assert again.values == learned(master) == each_once(5)


def test_a_restart_keeps_the_boundaries_where_they_were() -> None:
    store, _, process = started()
    process.train_and_send(2)
    process.train(1)
    again = NodeProcess(store, process.files, 2, process.checkpoint())
    again.train(1)
    assert again.node.wants_boundary()


# ---------------------------------------------------------------------- the disk is ahead of the checkpoint


def _older_checkpoint(uploaded: bool) -> tuple[MemoryStore, AddingMaster, NodeProcess, Checkpoint]:
    """A node that has committed four steps, and a checkpoint of its third, of which two were committed."""
    store, master, process = started()
    process.train_and_send(2)
    process.train(1)
    checkpoint = process.checkpoint()
    process.train(1)
    process.boundary()
    process.run(process.node.spool())
    if uploaded:
        process.run(process.node.upload())
    return store, master, process, checkpoint


@pytest.mark.parametrize("uploaded", [True, False])
@pytest.mark.parametrize("taken_in", [True, False])
def test_a_node_behind_its_ledger_continues_after_what_was_sent(uploaded: bool, taken_in: bool) -> None:
    store, master, process, checkpoint = _older_checkpoint(uploaded)
    if taken_in:
        master.apply_deltas()
    again = NodeProcess(store, process.files, 2, checkpoint)
    assert again.step == 4
    assert again.node.unsent_steps == 0
    assert "up to step 4, which its checkpoint of step 3 does not know" in again.logged("INFO")[0]
    finish(again, master, 8)
    assert again.values == learned(master) == each_once(8)


def test_a_node_behind_its_ledger_sends_nothing_before_it_has_a_version() -> None:
    store, _, process, checkpoint = _older_checkpoint(uploaded=True)
    again = NodeProcess(store, process.files, 2, checkpoint)
    again.train(2)
    assert again.boundary() == "waiting"
    again.run(again.node.poll())
    again.install()
    assert again.train_and_send(0) == "queued"


def test_a_checkpoint_beyond_what_was_sent_without_it_reports_how_much_is_dropped() -> None:
    """Of a process that was without checkpoint and without store: its steps are of weights that no one else has."""
    store, master, process = started()
    process.train_and_send(2)
    alone = NodeProcess(store, process.files, 2)
    alone.train(5)
    again = NodeProcess(store, process.files, 3, alone.checkpoint())
    assert "the 3 steps after that are dropped" in again.logged("WARNING")[0]
    finish(again, master, 7)
    assert again.values == learned(master) == [*each_once(2)[:3], 0.0, 0.0, 0.0, -1.0, -1.0, *each_once(0)[8:]]


def test_progress_of_a_node_behind_its_ledger_is_kept_until_it_has_a_version() -> None:
    store, master, process, checkpoint = _older_checkpoint(uploaded=True)
    master.apply_deltas()
    again = NodeProcess(store, process.files, 2, checkpoint)
    again.train(2)
    finish(again, master, 6)
    assert again.values == learned(master) == each_once(6)


def test_without_a_checkpoint_a_node_adopts_the_version_and_continues_after_what_was_sent() -> None:
    store, master, process = started()
    process.train_and_send(3)
    master.apply_deltas()
    again = NodeProcess(store, process.files, 2)
    again.train(1)
    install = again.receive()
    assert install is not None
    assert install.adopt
    assert install.ahead == Position(3, 6, 30)
    assert again.step == 3
    finish(again, master, 5)
    assert again.values == learned(master) == each_once(5)


def test_a_pending_adoption_also_holds_for_a_newer_version() -> None:
    store, master, process = started()
    process.train_and_send(3)
    master.apply_deltas()
    again = NodeProcess(store, process.files, 2)
    again.train(1)
    again.run(again.node.poll())
    master.publish(master.weights)
    again.run(again.node.poll())
    install = again.install()
    assert install is not None
    assert (install.manifest.version, install.adopt, install.ahead) == (2, True, Position(3, 6, 30))
    assert again.step == 3


# ---------------------------------------------------------------------- a new disk


@pytest.mark.parametrize("taken_in", [True, False])
@pytest.mark.parametrize("with_checkpoint", [True, False])
def test_on_a_new_disk_the_store_says_how_far_the_node_was(taken_in: bool, with_checkpoint: bool) -> None:
    """From the marks, and from deltas that are in no version yet."""
    store, master, _, checkpoint = _older_checkpoint(uploaded=True)
    if taken_in:
        master.apply_deltas()
    again = NodeProcess(store, MemoryFiles(), 2, checkpoint if with_checkpoint else None)
    again.train(1)  # on data that the store has: it must not count
    finish(again, master, 8)
    assert again.step == 8
    assert again.values == learned(master) == each_once(8)


def test_on_a_new_disk_an_earlier_session_is_not_taken_for_another_machine() -> None:
    store, master, _, _ = _older_checkpoint(uploaded=True)
    again = NodeProcess(store, MemoryFiles(), 2)
    again.receive()
    master.apply_deltas()
    again.receive()
    assert master.head.nodes["n"].sessions[session(1)].seq == 2
    assert again.logged("WARNING") == []


def test_on_a_new_disk_steps_beyond_the_store_are_dropped_and_reported() -> None:
    """It cannot be told from what was trained on data that the store has."""
    store, master, _, checkpoint = _older_checkpoint(uploaded=True)
    again = NodeProcess(store, MemoryFiles(), 2, checkpoint)
    again.train(2)  # steps 3 (of the checkpoint) and 4 the store has, step 5 it has not
    again.receive()
    assert again.logged("INFO") == ["version 0 is adopted; 3 local steps made before it are dropped"]
    finish(again, master, 8)
    assert learned(master) == [*each_once(4)[:5], 0.0, -1.0, -1.0, -1.0, *each_once(0)[9:]]


def test_on_a_new_disk_with_a_checkpoint_that_is_not_behind_nothing_is_dropped() -> None:
    store, master, process = started()
    process.train_and_send(2)
    process.train(1)
    checkpoint = process.checkpoint()
    again = NodeProcess(store, MemoryFiles(), 2, checkpoint)
    again.train(1)
    finish(again, master, 6)
    assert again.values == learned(master) == each_once(6)


def test_the_spooled_delta_of_a_lost_disk_goes_into_the_next_delta() -> None:
    store, master, process = started()
    process.train_and_send(2)
    process.train(2)
    process.boundary()
    process.run(process.node.spool())
    checkpoint = process.checkpoint()
    again = NodeProcess(store, MemoryFiles(), 2, checkpoint)
    finish(again, master, 6)
    assert again.values == learned(master) == each_once(6)


def test_an_upload_of_a_lost_disk_that_takes_effect_late_does_not_enter() -> None:
    store, master, process = started()
    process.train_and_send(2)
    process.train(2)
    process.boundary()
    process.run(process.node.spool())
    again = NodeProcess(store, MemoryFiles(), 2, process.checkpoint())
    finish(again, master, 6)
    store.put_if_absent(delta_name(session(1), 2), process.files.contents[SPOOL])
    assert master.apply_deltas() == 0
    assert learned(master) == each_once(6)


def test_the_spooled_delta_of_a_lost_disk_is_sent_at_the_end_of_training_and_not_again() -> None:
    store, master, process = started()
    process.train(2)
    process.boundary()
    process.run(process.node.spool())
    checkpoint = process.checkpoint()
    files = MemoryFiles()
    second = NodeProcess(store, files, 2, checkpoint)
    second.receive()
    assert second.node.unsent_steps == 2
    assert second.train_and_send(0) == "queued"
    third = NodeProcess(store, files, 3, checkpoint)  # again, from before the loss was known
    finish(third, master, 4)
    assert third.values == learned(master) == each_once(4)
    assert third.node.state_dict()["pending"] == []


def test_deltas_processed_while_a_node_looks_back_do_not_count_as_lost() -> None:
    class Hasty(MemoryStore):
        """Its master works whenever a node lists its deltas."""

        master: AddingMaster | None = None

        def list_after(self, prefix: str, marker: str = "", *, timeout: float = 60.0) -> Listing:
            if prefix == "in/n/" and self.master is not None:
                master, self.master = self.master, None
                master.apply_deltas()
            return super().list_after(prefix, marker)

    store = Hasty()
    master = AddingMaster(store)
    process = NodeProcess(store, MemoryFiles(), 1)
    process.receive()
    older = process.checkpoint()
    process.train_and_send(2)
    newer = process.checkpoint()
    for checkpoint in (older, newer, None):
        store.master = master
        again = NodeProcess(store, MemoryFiles(), 2 + (older, newer, None).index(checkpoint), checkpoint)
        finish(again, master, again.step + 2)
        assert again.values == learned(master) == each_once(again.step)
        assert again.node.state_dict()["pending"] == []


def test_a_listing_that_lags_hides_no_session_that_is_known_otherwise() -> None:
    class Lagging(MemoryStore):
        def list_after(self, prefix: str, marker: str = "", *, timeout: float = 60.0) -> Listing:
            return Listing((), False) if prefix == "in/n/" else super().list_after(prefix, marker)

    store = Lagging()
    master = AddingMaster(store)
    process = NodeProcess(store, MemoryFiles(), 1)
    process.receive()
    older = process.checkpoint()
    process.train_and_send(2)
    newer = process.checkpoint()
    assert NodeProcess(store, MemoryFiles(), 2, newer).receive() is None
    again = NodeProcess(store, MemoryFiles(), 3, older)
    finish(again, master, 4)
    assert again.values == learned(master) == each_once(4)


def test_a_torn_upload_of_a_lost_disk_does_not_count() -> None:
    store, master, process, checkpoint = _older_checkpoint(uploaded=False)
    torn = process.files.contents[SPOOL]
    store.put_if_absent(delta_name(session(1), 2), torn[:-5])
    again = NodeProcess(store, MemoryFiles(), 2, checkpoint)
    again.receive()
    assert again.step == 3
    store.delete(delta_name(session(1), 2))  # as a master does that has given up on it
    finish(again, master, 6)
    assert again.values == learned(master) == each_once(6)


def test_a_checkpoint_between_the_decision_and_the_installation_changes_nothing() -> None:
    store, master, _, checkpoint = _older_checkpoint(uploaded=True)
    files = MemoryFiles()
    second = NodeProcess(store, files, 2, checkpoint)
    second.train(1)
    second.run(second.node.poll())
    third = NodeProcess(store, files, 3, second.checkpoint())
    third.train(1)
    finish(third, master, 8)
    assert third.values == learned(master) == each_once(8)


# ---------------------------------------------------------------------- killed at each effect


def _life_of_an_update(process: NodeProcess) -> None:
    process.run(process.node.spool())
    process.run(process.node.upload())
    process.run(process.node.poll())
    process.install()


@pytest.mark.parametrize("disk", [same_disk, new_disk])
@pytest.mark.parametrize("saved_before", ["nothing", "the commit", "the boundary"])
@pytest.mark.parametrize("effects", range(8))
def test_a_kill_at_any_request_loses_and_doubles_nothing(effects: int, saved_before: str, disk: Disk) -> None:
    store, master, process = started()
    process.train_and_send(2)
    master.apply_deltas()
    process.receive()
    checkpoint = process.checkpoint() if saved_before == "the boundary" else None
    process.train(2)
    if saved_before == "the commit":
        checkpoint = process.checkpoint()
    process.boundary()
    process.budget = effects
    try:
        _life_of_an_update(process)
    except KilledError:
        assert process.budget == 0
    else:
        assert effects == 7  # one to spool, five to upload, one to look
    again = NodeProcess(store, disk(process), 2, checkpoint)
    finish(again, master, 8)
    assert again.values == learned(master) == each_once(8)


FINE = 1.0 + 2**-10  # eight bits of bf16 keep 1.0 of it


@pytest.mark.parametrize("saved_before", ["nothing", "the commit", "the boundary"])
@pytest.mark.parametrize("effects", range(10))
def test_with_a_lossy_codec_all_that_was_sent_and_what_is_owed_is_what_was_trained(
    effects: int, saved_before: str
) -> None:
    store, master, process = started(codec="bf16")
    process.learns = FINE
    process.train_and_send(2)
    master.apply_deltas()
    process.receive()
    checkpoint = process.checkpoint() if saved_before == "the boundary" else None
    process.train(2)
    if saved_before == "the commit":
        checkpoint = process.checkpoint()
    process.boundary()
    process.budget = effects
    try:
        _life_of_an_update(process)
    except KilledError:
        assert process.budget == 0
    else:
        assert effects == 9  # two to spool, six to upload, one to look
    again = NodeProcess(store, process.files, 2, checkpoint, codec="bf16", learns=FINE)
    finish(again, master, 8)
    owed = again.node.state_dict()["residual"]["done"].tolist()
    assert [value - owed_ for value, owed_ in zip(learned(master), owed, strict=True)] == [
        FINE * value for value in each_once(8)
    ]
    assert again.values == learned(master)
    assert not again.logged("WARNING")
    assert sum(name in again.files.contents for name in RESIDUALS) == 1


def test_a_residual_that_is_damaged_on_the_disk_is_reported() -> None:
    store, master, process = started(codec="bf16")
    process.learns = FINE
    process.train_and_send(2)
    for name in RESIDUALS:
        process.files.contents.pop(name, None)
    again = NodeProcess(store, process.files, 2, codec="bf16", learns=FINE)
    assert "codec still owed from earlier deltas is damaged" in again.logged("WARNING")[0]
    finish(again, master, 4)
    assert learned(master) == each_once(4)


def test_a_codec_without_loss_sends_what_another_owed() -> None:
    store, master, process = started(codec="bf16")
    process.learns = FINE
    process.train_and_send(2)
    master.apply_deltas()
    again = NodeProcess(store, process.files, 2, codec="fp32", learns=FINE)
    other = AddingMaster(store, codec="fp32")
    finish(again, other, 4)
    assert learned(other) == [FINE * value for value in each_once(4)]
    assert again.node.state_dict()["residual"] is None


@pytest.mark.parametrize("effects", range(10))
def test_a_node_killed_during_its_first_look_repeats_it(effects: int) -> None:
    store, master, _, checkpoint = _older_checkpoint(uploaded=True)
    files = MemoryFiles()
    second = NodeProcess(store, files, 2, checkpoint)
    second.budget = effects
    with suppress(KilledError):
        second.receive()
    third = NodeProcess(store, files, 3, checkpoint)
    finish(third, master, 8)
    assert third.values == learned(master) == each_once(8)


# ---------------------------------------------------------------------- states and disks that do not fit


def test_a_store_that_was_created_again_is_joined_as_a_new_node() -> None:
    _, _, process = started()
    process.train_and_send(2)
    process.train(2)
    process.boundary()
    process.run(process.node.spool())
    fresh = MemoryStore()
    master = AddingMaster(fresh, nonce="another")
    other = master.weights
    other["done"][0] = 5.0
    master.publish(other)
    again = NodeProcess(fresh, process.files, 2, process.checkpoint())
    install = again.receive()
    assert install is not None
    assert install.adopt
    assert "was created again" in again.logged("WARNING")[0]
    at_once = NodeProcess(fresh, MemoryFiles(again.files.contents), 3)  # it is no stranger any more
    at_once.receive()
    assert at_once.logged("WARNING") == []
    assert not again.run(again.node.upload())
    assert master.apply_deltas() == 0
    again.train_and_send(2)
    assert SPOOL not in again.files.contents
    master.apply_deltas()
    assert learned(master) == [5.0, 0, 0, 0, 0, -1, -1, *each_once(0)[7:]]


def test_a_store_that_was_created_again_does_not_move_a_new_run() -> None:
    _, _, process = started()
    process.train_and_send(6)
    fresh = MemoryStore()
    master = AddingMaster(fresh, nonce="another")
    again = NodeProcess(fresh, process.files, 2)
    again.receive()
    assert again.step == 0
    finish(again, master, 2)
    assert learned(master) == each_once(2)


def test_a_checkpoint_of_another_node_gives_only_its_weights() -> None:
    store, master, process = started()
    process.train_and_send(2)
    process.train(1)  # unsent: its own node sends it
    other = NodeProcess(store, MemoryFiles(), 4, process.checkpoint(), node="m")
    assert "is of node 'n'" in other.logged("WARNING")[0]
    process.train_and_send(1)
    master.apply_deltas()
    other.receive()
    other.train(2)  # its steps 4 and 5, of which the first node has learned 4
    other.train_and_send(0)
    master.apply_deltas()
    assert learned(master) == [0.0, -1, -1, -1, -2, -1, *each_once(0)[6:]]


def test_a_state_of_other_parameters_is_refused() -> None:
    store, _, process = started()
    checkpoint = process.checkpoint()
    checkpoint.state["base"]["done"] = torch.zeros(3)
    with pytest.raises(CheckpointError, match="other parameters"):
        NodeProcess(store, process.files, 2, checkpoint)


@pytest.mark.parametrize("damage", [b"", b"{}", b"\x00" * 40, b'{"seq": 1}'])
def test_a_damaged_ledger_is_reported_and_the_store_is_asked(damage: bytes) -> None:
    store, master, process, checkpoint = _older_checkpoint(uploaded=True)
    process.files.contents[LEDGER] = damage
    again = NodeProcess(store, process.files, 2, checkpoint)
    assert "ledger is damaged" in again.logged("WARNING")[0]
    finish(again, master, 8)
    assert again.values == learned(master) == each_once(8)


@pytest.mark.parametrize("damaged", [b"", b"x" * 100, "short", "flipped"])
def test_a_damaged_spool_is_reported_and_its_work_is_trained_again(damaged: bytes | str) -> None:
    store, master, process, checkpoint = _older_checkpoint(uploaded=False)
    spooled = process.files.contents[SPOOL]
    flipped = spooled[:-1] + bytes([spooled[-1] ^ 1])
    contents = {"short": spooled[:-1], "flipped": flipped}.get(str(damaged), damaged)
    assert isinstance(contents, bytes)
    process.files.contents[SPOOL] = contents
    again = NodeProcess(store, process.files, 2, checkpoint)
    assert "spool is damaged" in again.logged("WARNING")[0]
    assert SPOOL not in process.files.contents
    finish(again, master, 8)
    assert again.values == learned(master) == each_once(8)


def test_being_ahead_is_a_matter_of_steps() -> None:
    assert is_ahead(Position(3, 0, 0), Position(2, 9, 9))
    assert not is_ahead(Position(3, 9, 9), Position(3, 0, 0))
    assert not is_ahead(Position(2, 9, 9), Position(3, 0, 0))


def test_a_run_that_joins_later_counts_its_steps_from_there() -> None:
    store = MemoryStore()
    master = AddingMaster(store)
    model = Counter()
    process = NodeProcess(store, MemoryFiles(), 1, model=model)
    process.step = 10  # the trainer went on from a checkpoint without a distributed state
    process.receive()
    process.train(1)
    assert isinstance(process.node, Node)
    assert process.node.unsent_steps == 1
    process.train_and_send(1)
    assert master.apply_deltas() == 1
    assert master.head.nodes["n"].position.step == 12
