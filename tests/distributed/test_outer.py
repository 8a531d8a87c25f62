import copy
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from speedtronic.distributed.outer import MasterOuterLoop
from speedtronic.distributed.protocol import DeltaId, head_name
from speedtronic.distributed.stores.base import Store
from speedtronic.distributed.stores.memory import MemoryStore
from speedtronic.errors import StoreContentError, StoreUnavailableError
from tests.support.large import LARGE, TEMPLATE_NODE
from tests.support.masters import (
    INITIAL,
    SCHEMA,
    Heard,
    Watched,
    head_of,
    packed_delta,
    send,
    weights_of,
)
from tests.support.together import INNER, Data, adamw, assert_same, network, sgd, together, train

# --- What training together computes


def test_four_synchronous_nodes_are_plain_diloco_bit_for_bit() -> None:
    together_model, workers, _ = together(4, 6)

    model = network()
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    locals_ = [copy.deepcopy(model) for _ in range(4)]
    inner = [adamw(local) for local in locals_]
    data = [Data(number) for number in range(4)]
    for _ in range(6):
        for number, local in enumerate(locals_):
            train(local, inner[number], data[number], INNER)
        for parameter, *replicas in zip(model.parameters(), *(m.parameters() for m in locals_), strict=True):
            deltas = [parameter.detach() - replica.detach() for replica in replicas]
            parameter.grad = (deltas[0] + deltas[1] + deltas[2] + deltas[3]) / 4
        outer.step()
        for local in locals_:
            local.load_state_dict(model.state_dict())

    assert_same(together_model, model)
    for worker in workers:
        assert_same(worker.model, model)


def test_rounds_of_one_step_with_plain_outer_sgd_are_averaging() -> None:
    together_model, _, _ = together(3, 8, make_optimizer=sgd, inner=1, outer="sgd", outer_lr=1.0)
    model, data = network(), [Data(number) for number in range(3)]
    optimizer = sgd(model)
    for _ in range(8):
        batches = [one.batch() for one in data]
        optimizer.zero_grad()
        for inputs, targets in batches:
            (nn.functional.mse_loss(model(inputs), targets) / 3).backward()
        optimizer.step()
    assert_same(together_model, model, tolerance=1e-6)


def test_one_node_without_outer_momentum_is_plain_training() -> None:
    together_model, workers, _ = together(1, 8, outer_lr=1.0, outer_momentum=0.0)
    model = network()
    train(model, adamw(model), Data(0), 8 * INNER)
    assert_same(together_model, model, tolerance=1e-6)
    assert_same(workers[0].model, model, tolerance=1e-6)


# --- The object and its thread


def loop_over(store: Store, **options: Any) -> MasterOuterLoop:
    return MasterOuterLoop(store, INITIAL, schema=SCHEMA, **{"say": Heard(), "expected_nodes": 1} | options)


def test_a_state_without_schema_is_trained_where_it_has_fractions() -> None:
    store = MemoryStore()
    state = {"half": torch.ones(2, dtype=torch.float16), "count": torch.tensor(3)}
    loop = MasterOuterLoop(store, state)
    loop.sync_once()
    weights = weights_of(store, head_of(store))
    assert (weights["half"].dtype, weights["count"].dtype) == (torch.float32, torch.int64)
    assert weights["half"].tolist() == [1.0, 1.0]


def test_the_given_state_is_not_changed() -> None:
    store, state = MemoryStore(), {name: value.clone() for name, value in INITIAL.items()}
    loop = MasterOuterLoop(store, state, schema=SCHEMA, expected_nodes=1)
    loop.sync_once()
    send(store, "a", 1, [1.0] * 3)
    assert loop.sync_once() == 1
    for name, value in state.items():
        assert torch.equal(value, INITIAL[name])


def test_a_snapshot_is_a_copy_of_the_last_version() -> None:
    store = MemoryStore()
    loop = loop_over(store)
    assert torch.equal(loop.snapshot()["weight"], INITIAL["weight"])
    assert loop.outer_step == 0
    loop.sync_once()
    send(store, "a", 1, [1.0] * 3)
    loop.sync_once()
    taken = loop.snapshot()
    assert torch.equal(taken["weight"], weights_of(store, head_of(store))["weight"])
    assert loop.outer_step == 1
    taken["weight"].zero_()
    assert loop.snapshot()["weight"].any()


def test_a_snapshot_after_a_failed_publication_is_of_the_published_version() -> None:
    store = Watched()
    loop = loop_over(store)
    loop.sync_once()
    send(store.inner, "a", 1, [1.0] * 3)
    store.refused = {"put"}
    with pytest.raises(StoreUnavailableError):
        loop.sync_once()
    assert torch.equal(loop.snapshot()["weight"], INITIAL["weight"])
    assert loop.outer_step == 0


def test_defaults_are_those_of_uneven_nodes() -> None:
    store = MemoryStore()
    loop = MasterOuterLoop(store, INITIAL, schema=SCHEMA, expected_nodes=1)
    loop.sync_once()
    send(store, "a", 1, [1.0] * 3)
    loop.sync_once()
    assert torch.equal(loop.snapshot()["weight"], INITIAL["weight"] - 1.5), "η = 1, μ = 0.5"


def test_a_restarted_master_continues_with_the_same_momentum() -> None:
    stores = [MemoryStore(), MemoryStore()]
    for restarts, store in enumerate(stores):
        loop = loop_over(store)
        loop.sync_once()
        for seq in range(1, 6):
            send(store, "a", seq, [0.1 * seq, -1.0, 1 / 3], base_version=seq - 1)
            loop = loop_over(store) if restarts else loop
            assert loop.sync_once() == 1
    one, other = map(head_of, stores)
    assert one.momentum is not None
    assert other.momentum is not None
    assert (one.weights.sha256, one.momentum.sha256) == (other.weights.sha256, other.momentum.sha256)


class Announcing(Watched):
    """Tells when a manifest was put."""

    def __init__(self) -> None:
        super().__init__()
        self.versions: dict[str, threading.Event] = {head_name(version): threading.Event() for version in range(4)}

    def put_if_absent(self, name: str, data: Any, **options: Any) -> bool:
        created = super().put_if_absent(name, data, **options)
        if name in self.versions:
            self.versions[name].set()
        return created


def test_the_thread_makes_versions_until_it_is_stopped_and_can_start_again() -> None:
    store = Announcing()
    loop = loop_over(store, poll_interval=1000.0)
    for version in range(3):
        if version:
            send(store.inner, "a", version, [1.0] * 3, base_version=version - 1)
        loop.start()
        loop.start()
        assert store.versions[head_name(version)].wait(20)
        assert loop.stop(20)
        assert loop.stop(20)
    assert head_of(store).version == 2
    assert not [thread for thread in threading.enumerate() if thread.name == "speedtronic-master"]


def test_the_thread_looks_at_once_when_it_is_woken() -> None:
    store = Announcing()
    loop = loop_over(store, poll_interval=1000.0)
    loop.wake()
    loop.start()
    assert store.versions[head_name(0)].wait(20)
    send(store.inner, "a", 1, [1.0] * 3)
    loop.wake()
    assert store.versions[head_name(1)].wait(20)
    assert loop.stop(20)


class Failing(Watched):
    """Refuses, until it is told not to."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error: Exception | None = error

    def get(self, name: str, **options: Any) -> bytes | None:
        if self.error is not None:
            raise self.error
        return super().get(name, **options)


@pytest.mark.parametrize(
    ("error", "level"),
    [(StoreUnavailableError("the store is down"), "WARNING"), (StoreContentError("of another model"), "ERROR")],
)
def test_the_thread_survives_a_failure_and_reports_it(error: Exception, level: str) -> None:
    store, heard = Failing(error), Heard()
    said = threading.Event()

    def say(event: str, payload: Any) -> None:
        heard(event, payload)
        said.set()

    loop = loop_over(store, poll_interval=1000.0, say=say)
    loop.start()
    assert said.wait(20)
    assert [(word["level"], str(error) in word["message"]) for word in heard.of("log")] == [(level, True)]
    store.error = None
    said.clear()
    loop.wake()
    assert said.wait(20)
    assert loop.stop(20)
    assert head_of(store).version == 0


def test_messages_go_to_the_terminal_by_default(capsys: pytest.CaptureFixture[str]) -> None:
    MasterOuterLoop(MemoryStore(), INITIAL, schema=SCHEMA).sync_once()
    assert "published the initial weights as version 0\n" in capsys.readouterr().out


def test_what_is_published_is_a_version_with_a_copy_of_its_weights() -> None:
    store = MemoryStore()
    loop = loop_over(store)
    assert (loop.newest, loop.published()) == (None, None)
    loop.sync_once()
    first = loop.published()
    send(store, "a", 1, [1.0, 1.0, 1.0])

    assert loop.sync_once() == 1

    second = loop.published()
    assert first is not None
    assert second is not None
    assert [head.version for head, _ in (first, second)] == [0, 1]
    assert second[0] == loop.newest == head_of(store)
    assert torch.equal(first[1]["weight"], INITIAL["weight"])
    assert torch.equal(second[1]["weight"], weights_of(store, head_of(store))["weight"])


def test_what_is_published_is_not_given_during_a_look() -> None:
    given = []

    class Asking(MemoryStore):
        def list_after(self, *asked: Any, **options: Any) -> Any:
            given.append(loop.published())
            return super().list_after(*asked, **options)

    loop = loop_over(Asking())
    loop.sync_once()
    loop.sync_once()
    assert given
    assert set(given) == {None}


# --- Memory


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc to see what a process holds")
@pytest.mark.parametrize("nodes", [2, 16])
def test_a_master_holds_four_copies_of_the_model_whatever_the_number_of_nodes(nodes: int, tmp_path: Path) -> None:
    template = tmp_path / "delta"
    trained = {name: torch.ones(spec.shape) for name, spec in LARGE.entries.items()}
    template.write_bytes(packed_delta(DeltaId(TEMPLATE_NODE, "s", 1), trained, schema=LARGE))
    command = [sys.executable, "-m", "tests.support.large", str(template), str(tmp_path / "store"), str(nodes)]
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}  # what is freed is given back, not kept for later
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert result.returncode == 0, result.stderr
    assert 3.9 < float(result.stdout) < 4.1, "in copies of the model, and one of its 32 tensors while it is added"
