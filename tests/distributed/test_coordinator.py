"""The coordinator: its sessions, what the training thread waits for, and what becomes of each kind of trouble."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from speedtronic.config import DistributedConfig
from speedtronic.distributed import node_files
from speedtronic.distributed.codec import make_codec
from speedtronic.distributed.coordinator import DumbDiLoCoCoordinator
from speedtronic.distributed.delta import open_delta
from speedtronic.distributed.node import MAX_PENDING
from speedtronic.distributed.outer import MasterOuterLoop
from speedtronic.distributed.protocol import DELTAS
from speedtronic.distributed.schema import Schema, snapshot
from speedtronic.distributed.stores.base import REQUEST_TIMEOUT, Store
from speedtronic.distributed.stores.folder import FolderStore
from speedtronic.distributed.stores.memory import MemoryStore
from speedtronic.errors import CheckpointError, RunLockedError, StoreRefusedError, StoreUnavailableError
from speedtronic.trainer import Trainer
from speedtronic.trainer.sync import FullCoordinator
from tests.support.counting_store import CountingStore
from tests.support.failing import Failing
from tests.support.listening import SOON, Listening

NEVER = 3600.0


class Odometer(nn.Module):
    """A weight that each step of a test moves by one, so that it tells which steps are in it."""

    def __init__(self, size: int = 2) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))
        self.frozen = nn.Parameter(torch.full((2,), 7.0), requires_grad=False)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))


class Recording(MemoryStore):
    """Keeps every delta that was ever put into it, also when it was put twice."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.seen: dict[str, bytes] = {}

    def put_if_absent(self, name: str, data: Any, *, timeout: float = REQUEST_TIMEOUT) -> bool:
        if name.startswith(DELTAS):
            assert self.seen.setdefault(name, bytes(data)) == bytes(data), f"{name} was made again"
        return super().put_if_absent(name, data, timeout=timeout)


class Closed:
    """A store whose every call waits until it is opened, whatever the timeout."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.opened = threading.Event()
        self.asked = threading.Event()

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)
        if not callable(method):
            return method

        def call(*arguments: Any, **options: Any) -> Any:
            self.asked.set()
            assert self.opened.wait(SOON), "a thread of this test is left waiting"
            return method(*arguments, **options)

        return call


def settings(**keys: Any) -> DistributedConfig:
    given = {
        "enabled": True,
        "role": "worker",
        "repo_id": "memory://test",
        "node_id": "ann",
        "inner_steps": 2,
        "poll_interval": NEVER,
        "retry_initial": 1e-3,
        "retry_max": 1e-3,
        "retry_attempts": 2,
        "delta_upload_shutdown_timeout": SOON,
    }
    return DistributedConfig(**{**given, **keys})


def master_of(store: Store, **options: Any) -> MasterOuterLoop:
    """A master that lets every delta enter at once and whole, from an `Odometer`'s start."""
    model = Odometer()
    given: dict[str, Any] = {"outer_lr": 1.0, "outer_momentum": 0.0, "quorum": 1, "expected_nodes": 1}
    return MasterOuterLoop(store, snapshot(model), schema=Schema.of(model), say=lambda *_: None, **{**given, **options})


class World:
    """A store, and nodes that a test starts and steps."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.memory = Recording("test")
        self.running: list[DumbDiLoCoCoordinator] = []

    def node(
        self,
        model: nn.Module | None = None,
        *,
        store: Any = None,
        log: Listening | None = None,
        state_dir: str = "state",
        start_wait: float = SOON,
        **keys: Any,
    ) -> Run:
        model = Odometer() if model is None else model
        log = log or Listening()
        coordinator = DumbDiLoCoCoordinator(
            settings(**keys),
            model,
            store=self.memory if store is None else store,
            state_dir=self.folder / state_dir,
            logger=log,
            start_wait=start_wait,
        )
        self.running.append(coordinator)
        return Run(coordinator, model, log)

    def steps_in_deltas(self) -> float:
        """How many steps all deltas together hold that were ever sent."""
        schema = Schema.of(Odometer())
        deltas = [open_delta(data, schema, make_codec("fp32")) for data in self.memory.seen.values()]
        return -sum(delta.tensors["weight"][0].item() for delta in deltas)


class Run:
    """A training loop of which a test makes each step."""

    def __init__(self, coordinator: DumbDiLoCoCoordinator, model: nn.Module, log: Listening) -> None:
        self.coordinator = coordinator
        self.model = model
        self.log = log
        self.step = 0

    def start(self) -> Run:
        self.coordinator.start()
        return self

    def train(self, steps: int) -> list[bool]:
        answers = []
        for _ in range(steps):
            self.step += 1
            with torch.no_grad():
                self.model.get_parameter("weight").add_(1.0)
            self.coordinator.count(4, 40)
            answers.append(self.coordinator.after_optimizer_step(self.model, self.step))
        return answers

    def train_until(self, condition: Callable[[], object]) -> None:
        """Train on while other threads work."""
        for _ in range(int(SOON / 0.001)):
            self.train(1)
            if condition():
                return
            time.sleep(0.001)
        pytest.fail("it did not come to that")

    @property
    def weight(self) -> list[float]:
        return self.model.get_parameter("weight").tolist()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    for coordinator in made.running:
        coordinator.stop()


# ---------------------------------------------------------------- what the trainer needs


def test_the_coordinator_has_every_method_that_the_trainer_uses(world: World) -> None:
    assert isinstance(world.node().coordinator, FullCoordinator)


def test_another_model_is_refused_and_a_compiled_one_is_the_same(world: World) -> None:
    master_of(world.memory).sync_once()
    run = world.node().start()
    with pytest.raises(ValueError, match="another model"):
        run.coordinator.after_optimizer_step(Odometer(), 1)
    compiled = nn.Module()
    compiled._orig_mod = run.model  # as `torch.compile` wraps a module
    assert run.coordinator.after_optimizer_step(compiled, 1) is False


@pytest.mark.parametrize("reset", [False, True])
def test_in_a_hand_made_trainer_the_optimizer_keeps_its_state_unless_configured(world: World, reset: bool) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    options: dict[str, Any] = {"async_delta_upload": False, "async_global_poll": False}
    master = MasterOuterLoop(
        world.memory, snapshot(model), schema=Schema.of(model), quorum=1, expected_nodes=1, say=lambda *_: None
    )
    master.sync_once()
    run = world.node(model, reset_inner_optimizer=reset, **options)
    optimizer = torch.optim.AdamW(model.parameters())
    inputs = torch.randn(4, 3)
    trainer = Trainer(
        model,
        optimizer,
        [(inputs, inputs.sum(dim=1, keepdim=True))],
        device="cpu",
        loss_fn=lambda output, batch: nn.functional.mse_loss(output, batch[1]),
        logger=run.log,
        coordinator=run.coordinator,
    )
    trainer.fit(5)  # with inner_steps of 2, an exchange after the second and the fourth
    assert [int(state["step"]) for state in optimizer.state.values()] == ([1, 1] if reset else [5, 5])


def test_a_step_before_the_start_is_an_error(world: World) -> None:
    run = world.node()
    with pytest.raises(RuntimeError, match="must be started"):
        run.train(1)
    with pytest.raises(RuntimeError, match="must be started"):
        run.coordinator.refresh()


def test_only_a_step_with_an_exchange_answers_true(world: World) -> None:
    master = master_of(world.memory)
    master.sync_once()
    run = world.node().start()
    assert run.train(2) == [False, True]
    run.log.wait_for_event("delta_uploaded")
    master.sync_once()
    assert run.coordinator.refresh()
    assert not run.coordinator.refresh()
    assert run.train(1) == [False]


# ---------------------------------------------------------------- the way of a delta and of a version


def test_a_nodes_steps_reach_the_version_and_come_back_as_they_are(world: World) -> None:
    master = master_of(world.memory)
    master.sync_once()
    run = world.node().start()
    run.train(2)
    run.log.wait_for_event("delta_uploaded")
    assert master.sync_once() == 1
    assert master.snapshot()["weight"].tolist() == [2.0, 2.0]
    run.train(1)
    assert run.coordinator.refresh()
    assert run.weight == [3.0, 3.0]
    coordinator = run.coordinator
    assert (coordinator.local_step, coordinator.last_global_step, coordinator.outer_step) == (3, 3, 1)


def test_a_late_node_starts_with_the_newest_weights(world: World) -> None:
    master = master_of(world.memory)
    master.sync_once()
    first = world.node().start()
    first.train(2)
    first.log.wait_for_event("delta_uploaded")
    master.sync_once()
    late = world.node(node_id="bob", state_dir="bob").start()
    assert late.weight == [2.0, 2.0]
    assert late.coordinator.outer_step == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_half_precision_model_sends_and_receives_float32(world: World, dtype: torch.dtype) -> None:
    master = master_of(world.memory)
    master.sync_once()
    run = world.node(Odometer().to(dtype)).start()
    run.train(2)
    run.log.wait_for_event("delta_uploaded")
    master.sync_once()
    assert master.snapshot()["weight"].dtype == torch.float32
    run.train(1)
    run.coordinator.refresh()
    assert run.model.get_parameter("weight").dtype == dtype
    assert run.weight == [3.0, 3.0]


def test_what_is_not_trained_comes_from_the_version(world: World) -> None:
    master_of(world.memory).sync_once()
    model = Odometer()
    with torch.no_grad():
        model.frozen.zero_()
    world.node(model).start()
    assert model.frozen.tolist() == [7.0, 7.0]


def test_without_threads_everything_is_done_at_the_boundary(world: World) -> None:
    master = master_of(world.memory)
    master.sync_once()
    run = world.node(async_delta_upload=False, async_global_poll=False).start()
    assert run.train(2) == [False, True]
    assert world.steps_in_deltas() == 2
    master.sync_once()
    assert run.train(2) == [False, True]
    assert run.coordinator.outer_step == 1
    assert run.weight == [4.0, 4.0]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("diloco")]


def test_one_node_alone_with_plain_outer_steps_trains_as_without_a_store(world: World) -> None:
    """Proof 1: with lr 1 and no momentum, what comes back is what was sent, so training is not changed by it."""
    generator = torch.Generator().manual_seed(5)
    inputs, targets = torch.randn(40, 3, generator=generator), torch.randn(40, 1, generator=generator)

    def begin() -> nn.Module:
        torch.manual_seed(1)
        return nn.Linear(3, 1)

    def train(model: nn.Module, coordinate: Callable[[int], object]) -> None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        for step in range(1, 41):
            loss = (model(inputs[step - 1]) - targets[step - 1]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            coordinate(step)

    alone, together = begin(), begin()
    train(alone, lambda step: None)
    master = MasterOuterLoop(
        world.memory, snapshot(together), schema=Schema.of(together), outer_momentum=0.0, quorum=1, expected_nodes=1
    )
    master.sync_once()
    node = world.node(together, inner_steps=3, async_delta_upload=False).start().coordinator

    def exchange(step: int) -> None:
        node.after_optimizer_step(together, step)
        master.sync_once()
        node.refresh()

    train(together, exchange)
    assert node.outer_step == 13
    torch.testing.assert_close(together.state_dict(), alone.state_dict(), rtol=1e-6, atol=1e-6)


# ---------------------------------------------------------------- the master beside training


def test_a_master_trains_and_aggregates(world: World) -> None:
    run = world.node(role="master", quorum=1, expected_nodes=1, outer_lr=1.0, outer_momentum=0.0).start()
    assert run.log.of("global_installed") == [{"step": 0, "version": 0, "staleness": 0.0, "pending": 0}]
    run.train(2)
    run.log.wait_for_event("outer_step")
    run.train(1)
    run.coordinator.stop()
    assert run.log.of("outer_step")[-1]["version"] == 2, "the rest that was sent at the end is in, too"
    assert master_of(world.memory).sync_once() == 0
    assert world.memory.list_after(DELTAS).entries == ()


def test_the_masters_node_installs_a_version_as_soon_as_it_is_made(world: World) -> None:
    run = world.node(role="master", quorum=1, expected_nodes=1).start()
    run.train(2)
    run.log.wait_for_event("outer_step")
    run.train_until(lambda: run.coordinator.outer_step > 0)


# ---------------------------------------------------------------- nothing waits


def test_no_step_waits_for_a_store_whose_calls_hang(world: World) -> None:
    master_of(world.memory).sync_once()
    closed = Closed(world.memory)
    run = world.node(store=closed, start_wait=0.0, delta_upload_shutdown_timeout=0.0).start()
    assert closed.asked.wait(SOON)
    assert run.train(20) == [False] * 20
    assert run.log.said("no answer", "WARNING")
    closed.opened.set()
    run.train_until(lambda: run.log.of("global_installed"))
    assert run.weight == [float(run.step)] * 2


def test_no_boundary_waits_for_an_upload_that_hangs(world: World) -> None:
    master_of(world.memory).sync_once()
    closed = Closed(world.memory)
    closed.opened.set()
    run = world.node(store=closed).start()
    closed.opened.clear()
    closed.asked.clear()
    assert run.train(2) == [False, True]
    assert closed.asked.wait(SOON)
    assert run.train(4) == [False] * 4
    assert [skip["step"] for skip in run.log.of("delta_upload_skipped")] == [4, 6]
    closed.opened.set()
    run.log.wait_for_event("delta_uploaded")
    assert run.train(2) == [False, True]
    run.log.wait_for_event("delta_uploaded", 2)
    assert len(world.memory.seen) == 2
    assert world.steps_in_deltas() == 8, "the second delta holds what the skipped ones would have"


def test_an_upload_that_hangs_keeps_no_version_away(world: World) -> None:
    master = master_of(world.memory)
    master.sync_once()
    closed = Closed(world.memory)
    closed.opened.set()

    class Half:
        """Only what is created can be made to wait."""

        def __getattr__(self, name: str) -> Any:
            return getattr(closed if name == "put_if_absent" else world.memory, name)

    run = world.node(store=Half(), poll_interval=1e-3).start()
    closed.opened.clear()
    closed.asked.clear()
    other = world.node(node_id="bob", state_dir="bob").start()
    run.train(2)
    assert closed.asked.wait(SOON)
    other.train(2)
    other.log.wait_for_event("delta_uploaded")
    assert master.sync_once() == 1
    run.train_until(lambda: run.coordinator.outer_step == 1)
    assert run.coordinator.state_dict() is not None
    assert world.memory.seen.keys() == {name for name in world.memory.seen if name.startswith("in/bob/")}
    closed.opened.set()
    run.log.wait_for_event("delta_uploaded")


def test_weights_that_are_not_finite_are_replaced_and_the_next_delta_is_admitted(world: World) -> None:
    master = master_of(world.memory)
    master.sync_once()
    run = world.node().start()  # which looks at the store when it is woken
    with torch.no_grad():
        run.model.get_parameter("weight").fill_(torch.nan)
    run.train(2)
    run.log.wait_for_word("not finite", "WARNING")
    assert not run.coordinator.reset_inner_optimizer
    run.train_until(lambda: run.coordinator.last_global_step > 0)
    assert run.coordinator.reset_inner_optimizer, "its moments are not finite either"
    adopted_at = run.step
    run.train(2)
    run.log.wait_for_event("delta_uploaded")
    assert master.sync_once() == 1
    assert run.coordinator.refresh()
    assert not run.coordinator.reset_inner_optimizer
    assert run.weight == [run.step - adopted_at] * 2
    assert master.snapshot()["weight"][0].item() in {1.0, 2.0}


def test_a_master_beside_a_node_makes_no_version_in_the_empty_folder_of_a_mount(world: World) -> None:
    run = world.node(role="master").start()
    run.train(2)
    run.coordinator.stop()
    bare = MemoryStore("test")  # under the same address
    again = world.node(role="master", store=bare, log=Listening(), start_wait=0.1)
    again.coordinator.start()
    again.log.wait_for_word("is the folder mounted", "WARNING")
    again.coordinator.stop()
    assert bare.list_after("").entries == ()


@pytest.mark.parametrize("role", ["worker", "master"])
def test_a_node_that_knows_its_store_makes_nothing_where_the_store_is_away(
    world: World, tmp_path: Path, role: str
) -> None:
    folder, mounted = tmp_path / "store", tmp_path / "mounted"
    master_of(FolderStore(folder)).sync_once()
    run = world.node(store=FolderStore(folder)).start()
    run.train(2)
    run.coordinator.stop()
    folder.rename(mounted)
    again = world.node(role=role, store=FolderStore(folder), log=Listening(), start_wait=0.1, poll_interval=0.05)
    again.coordinator.start()
    again.log.wait_for_word("is the folder mounted", "WARNING")
    assert not folder.exists()
    mounted.rename(folder)
    again.train_until(lambda: again.coordinator.last_global_step > 0)
    again.coordinator.stop()


def test_a_stop_keeps_its_timeout_and_the_rest_is_sent_at_the_next_start(world: World) -> None:
    master = master_of(world.memory)
    master.sync_once()
    closed = Closed(world.memory)
    closed.opened.set()
    run = world.node(store=closed, delta_upload_shutdown_timeout=0.0).start()
    closed.opened.clear()
    run.train(3)
    run.coordinator.stop()  # returns, or the test hangs
    assert world.memory.seen == {}
    closed.opened.set()
    run.coordinator.start()
    run.log.wait_for_event("delta_uploaded")
    master.sync_once()
    assert master.snapshot()["weight"].tolist() == [2.0, 2.0]
    run.coordinator.refresh()
    assert run.weight == [3.0, 3.0], "what the spool had no room for is still in the model"
    run.train(2)
    run.log.wait_for_event("delta_uploaded", 2)
    assert world.steps_in_deltas() == 5


def test_the_last_part_of_a_round_is_sent_at_the_end(world: World) -> None:
    master = master_of(world.memory)
    master.sync_once()
    run = world.node(inner_steps=100).start()
    run.train(3)
    run.coordinator.stop()
    assert [event["step"] for event in run.log.of("delta_upload_queued")] == [3]
    master.sync_once()
    assert master.snapshot()["weight"].tolist() == [3.0, 3.0]


def test_the_last_part_is_sent_however_many_deltas_wait_for_a_master(world: World) -> None:
    master = master_of(world.memory)
    master.sync_once()
    run = world.node(inner_steps=1, async_delta_upload=False).start()
    run.train(MAX_PENDING + 3)
    assert len(run.log.of("delta_upload_skipped")) == 3
    run.coordinator.stop()
    assert len(run.log.of("delta_upload_skipped")) == 3
    assert run.log.of("delta_upload_queued")[-1]["step"] == MAX_PENDING + 3
    master.sync_once()
    assert master.snapshot()["weight"].tolist() == [MAX_PENDING + 3.0] * 2


def test_a_hanging_session_logs_and_writes_nothing_after_its_end(world: World) -> None:
    master_of(world.memory).sync_once()
    closed = Closed(world.memory)
    closed.opened.set()
    run = world.node(store=closed, delta_upload_shutdown_timeout=0.0).start()
    closed.opened.clear()
    closed.asked.clear()
    run.train(2)
    assert closed.asked.wait(SOON)
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("diloco")]
    run.coordinator.stop()
    told = len(run.log.events), len(run.log.words)
    kept = {path: path.read_bytes() for path in world.folder.rglob("spool*")}
    closed.opened.set()
    for thread in threads:
        thread.join(SOON)
    assert (len(run.log.events), len(run.log.words)) == told
    assert kept == {path: path.read_bytes() for path in world.folder.rglob("spool*")} != {}


# ---------------------------------------------------------------- state


def test_a_prepared_state_is_restored_before_anything_remote_is_read(world: World) -> None:
    master_of(world.memory).sync_once()
    first = world.node(Odometer(3), inner_steps=9, store=MemoryStore("other"), state_dir="other").start()
    first.train(1)
    state = first.coordinator.state_dict()
    counting = CountingStore(world.memory)
    run = world.node(store=counting)
    assert state is not None
    run.coordinator.prepare_state(state)
    with pytest.raises(CheckpointError, match="other parameters"):
        run.coordinator.start()
    assert not counting.requests


def test_a_restored_state_continues_with_its_pending_deltas(world: World) -> None:
    master = master_of(world.memory)
    master.sync_once()
    run = world.node().start()
    run.train(3)
    run.log.wait_for_event("delta_uploaded")
    state, weights = run.coordinator.state_dict(), snapshot(run.model)
    assert state is not None
    run.coordinator.stop()

    model = Odometer()
    with torch.no_grad():
        model.weight.copy_(weights["weight"])
    world.folder = world.folder / "copy"  # of another disk: it knows what the checkpoint knows, and the store
    resumed = world.node(model)
    resumed.step = 3
    resumed.coordinator.prepare_state(state)
    resumed.start()
    assert resumed.coordinator.local_step == 3
    resumed.coordinator.load_state_dict(state)
    master.sync_once()
    resumed.coordinator.refresh()
    assert resumed.coordinator.continue_at() is None
    resumed.train(1)
    resumed.coordinator.stop()
    assert world.steps_in_deltas() == 4


def test_the_state_is_not_copied(world: World) -> None:
    master_of(world.memory).sync_once()
    run = world.node().start()
    run.train(2)
    run.log.wait_for_event("delta_uploaded")
    one, other = run.coordinator.state_dict(), run.coordinator.state_dict()
    assert one is not None
    assert other is not None
    assert one["base"]["weight"].data_ptr() == other["base"]["weight"].data_ptr()
    kept = one["base"]["weight"].clone()
    run.train(4)
    run.coordinator.refresh()
    assert torch.equal(one["base"]["weight"], kept)


def test_the_state_says_up_to_which_step_an_upload_is_pending(world: World) -> None:
    assert world.node().coordinator.state_dict() is None
    master_of(world.memory).sync_once()
    closed = Closed(world.memory)
    closed.opened.set()
    run = world.node(store=closed).start()
    state = run.coordinator.state_dict()
    assert state is not None
    assert state["pending_upload"] is None
    closed.opened.clear()
    run.train(2)
    state = run.coordinator.state_dict()
    assert state is not None
    assert state["pending_upload"] == {"step": 2}
    closed.opened.set()


def test_a_node_can_be_started_and_stopped_again_and_again(world: World) -> None:
    master = master_of(world.memory)
    master.sync_once()
    run = world.node(inner_steps=100)
    for number in range(1, 4):
        run.start()
        run.coordinator.start()
        run.train(3)
        run.coordinator.stop()
        run.coordinator.stop()
        master.sync_once()
        assert master.snapshot()["weight"].tolist() == [3.0 * number] * 2
    assert len({event["session"] for event in run.log.of("delta_uploaded")}) == 3


# ---------------------------------------------------------------- trouble


def test_a_worker_long_before_its_master_trains_on_and_joins_when_it_comes(world: World) -> None:
    run = world.node().start()
    assert run.train(9) == [False] * 9
    assert len(run.log.said("until a version of the master", "INFO")) == 3, "at the first boundary, the second, the 4th"
    master = master_of(world.memory)
    master.sync_once()
    assert run.coordinator.refresh()
    assert run.weight == [9.0, 9.0], "it started as version 0, so nothing is dropped"
    run.train(1)
    run.log.wait_for_event("delta_uploaded")
    master.sync_once()
    assert master.snapshot()["weight"].tolist() == [10.0, 10.0]


def test_nodes_wait_for_a_lost_master_without_end(world: World) -> None:
    master_of(world.memory).sync_once()
    run = world.node().start()
    for number in range(1, MAX_PENDING + 1):
        run.train(2)
        run.log.wait_for_event("delta_uploaded", number)
    assert run.train(6) == [False] * 6
    assert len(world.memory.seen) == MAX_PENDING
    assert "wait for the master" in run.log.of("delta_upload_skipped")[-1]["reason"]
    run.coordinator.stop()


def test_a_store_that_is_down_for_ten_minutes_costs_nothing(world: World) -> None:
    """Each request of these ten minutes takes twenty seconds to fail."""
    master = master_of(world.memory)
    master.sync_once()
    now, down_until = 0.0, 600.0

    def trouble(kind: str, name: str) -> Exception | None:
        nonlocal now
        if kind == "put_if_absent" and name.startswith("in/") and now < down_until:
            now += 20.0
            return StoreUnavailableError("no answer in 20 s")
        return None

    run = world.node(store=Failing(world.memory, trouble), poll_interval=1e-3).start()
    run.train(2)
    run.log.wait_for_event("delta_upload_failed")
    run.train(4)
    run.log.wait_for_event("delta_uploaded")
    assert now == down_until
    run.coordinator.stop()
    assert world.steps_in_deltas() == 6


def test_trouble_with_the_store_is_logged_when_it_starts_and_when_it_ends(world: World) -> None:
    master_of(world.memory).sync_once()
    failures = 0

    def trouble(kind: str, name: str) -> Exception | None:
        nonlocal failures
        if name.startswith("head/") and failures < 20:
            failures += 1
            return StoreUnavailableError("503 slow down")
        return None

    run = world.node(store=Failing(world.memory, trouble), poll_interval=1e-3).start()
    run.log.wait_for_word("works again", "INFO")
    assert len(run.log.said("is tried again: 503 slow down", "WARNING")) == 1


def test_a_store_that_refuses_at_the_start_ends_the_run_and_leaves_the_node_free(world: World) -> None:
    def refuse(kind: str, name: str) -> Exception | None:
        return StoreRefusedError("403: the key may not read this bucket")

    run = world.node(store=Failing(world.memory, refuse))
    with pytest.raises(StoreRefusedError, match="may not read"):
        run.start()
    master_of(world.memory).sync_once()
    world.node().start()


def test_a_store_that_refuses_later_is_an_error_in_the_log_and_training_goes_on(world: World) -> None:
    master = master_of(world.memory)
    master.sync_once()
    refuses = False

    def refuse(kind: str, name: str) -> Exception | None:
        return StoreRefusedError("403: the key has expired") if refuses else None

    run = world.node(store=Failing(world.memory, refuse), poll_interval=1e-3).start()
    refuses = True
    run.log.wait_for_word("403: the key has expired", "ERROR")
    run.train(4)
    refuses = False
    run.log.wait_for_word("works again", "INFO")
    run.coordinator.stop()
    assert world.steps_in_deltas() == 4


def test_a_full_disk_is_reported_and_the_next_delta_is_cumulative(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    master = master_of(world.memory)
    master.sync_once()
    run = world.node().start()
    with monkeypatch.context() as full:

        def refuse(*_: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        full.setattr(node_files, "replace_file", refuse)
        run.train(2)
        run.log.wait_for_event("delta_upload_failed")
    assert "No space left" in run.log.of("delta_upload_failed")[0]["error"]
    run.train(2)
    run.log.wait_for_event("delta_uploaded")
    assert master.sync_once() == 1
    assert master.snapshot()["weight"].tolist() == [4.0, 4.0]


def test_two_nodes_of_one_name_on_one_machine_are_told_apart_at_the_start(world: World) -> None:
    master_of(world.memory).sync_once()
    first = world.node().start()
    with pytest.raises(RunLockedError, match=r"distributed\.node_id"):
        world.node().start()
    first.train(2)
    first.log.wait_for_event("delta_uploaded")


def test_two_nodes_of_one_name_on_two_machines_are_warned(world: World) -> None:
    master = master_of(world.memory)
    master.sync_once()
    first, second = world.node(state_dir="here").start(), world.node(state_dir="there").start()
    second.train(2)
    second.log.wait_for_event("delta_uploaded")
    master.sync_once()
    first.coordinator.refresh()
    assert len(first.log.said("another machine", "WARNING")) == 1
    first.train(2)
    first.log.wait_for_event("delta_uploaded")


def test_a_node_with_another_model_trains_alone_and_logs_it(world: World) -> None:
    master_of(world.memory).sync_once()
    run = world.node(Odometer(size=5)).start()
    assert run.train(6) == [False] * 6
    assert len(run.log.said("of another model", "ERROR")) == 1
    assert run.weight == [6.0] * 5


def test_a_master_with_another_model_trains_alone_and_logs_it(world: World) -> None:
    master_of(world.memory).sync_once()
    run = world.node(Odometer(size=5), role="master").start()
    assert run.train(6) == [False] * 6
    assert run.log.said("another model", "ERROR")
    assert run.weight == [6.0] * 5


def test_an_unexpected_error_is_logged_with_its_traceback(world: World) -> None:
    master_of(world.memory).sync_once()
    broken = False

    def break_(kind: str, name: str) -> Exception | None:
        return KeyError("what") if broken and name.startswith("head/") else None

    run = world.node(store=Failing(world.memory, break_), poll_interval=1e-3).start()
    broken = True
    run.log.wait_for_word("KeyError: 'what'", "WARNING")
    broken = False
    run.log.wait_for_word("works again", "INFO")


def test_the_end_of_a_run_without_threads_keeps_its_timeout(world: World) -> None:
    master_of(world.memory).sync_once()
    closed = Closed(world.memory)
    closed.opened.set()
    threads = {"async_delta_upload": False, "async_global_poll": False, "delta_upload_shutdown_timeout": 0.0}
    run = world.node(store=closed, inner_steps=100, **threads).start()
    run.train(3)
    closed.opened.clear()
    run.coordinator.stop()  # returns, or the test hangs
    assert world.memory.seen == {}
    closed.opened.set()
    run.coordinator.start()
    run.train(100)
    assert world.steps_in_deltas() == 103


def test_a_state_loaded_after_the_start_restarts_the_coordinator(world: World) -> None:
    master_of(world.memory).sync_once()
    first = world.node(inner_steps=100).start()
    first.train(3)
    state = first.coordinator.state_dict()
    assert state is not None
    late = world.node(first.model, node_id="bob", state_dir="bob").start()
    late.coordinator.load_state_dict({**state, "node": "bob"})
    assert late.coordinator.local_step == 3
