"""DumbDiLoCo through the front door: what a configuration builds, and what becomes of a run that ends too early."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from speedtronic.config import SpeedtronicConfig
from speedtronic.distributed import DumbDiLoCoCoordinator, node
from speedtronic.distributed.delta import DeltaHeader, read_header
from speedtronic.distributed.master import per_step
from speedtronic.distributed.outer import MasterOuterLoop
from speedtronic.distributed.schema import Schema, snapshot
from speedtronic.errors import RunLockedError, StoreUnavailableError
from speedtronic.metrics import MetricLogger
from speedtronic.metrics.events import EVENTS
from speedtronic.registry import registry
from speedtronic.runtime import build_initial_model, build_runtime, train_from_config
from tests.support.configs import tiny
from tests.support.models import Events, Silence
from tests.support.thread_group import train_on_ranks

SAMPLES = 64


class Numbered(Dataset[tuple[Tensor, Tensor]]):
    """Writes down which samples are read, and may be told to end the process at one."""

    def __init__(self) -> None:
        self.read: list[int] = []
        self.deadly: int | None = None

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index == self.deadly:
            raise Killed
        self.read.append(index)
        return torch.tensor([float(index)]), torch.tensor([1.0])


class Killed(BaseException):
    """The process is no more."""


class Line(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 1)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"loss": (self.linear(x / SAMPLES) - y).square().mean()}


@pytest.fixture
def data(monkeypatch: pytest.MonkeyPatch) -> Numbered:
    """What `numbered:make` gives; each build reads the same object."""
    made = Numbered()
    module = ModuleType("numbered")
    module.make = lambda config: made  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "numbered", module)
    return made


@pytest.fixture(autouse=True)
def line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_factories", {**registry._factories, "line": Line})


@pytest.fixture
def many_pending(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node whose master never works sends a delta at each boundary all the same."""
    monkeypatch.setattr(node, "MAX_PENDING", 8)


def config_of(folder: Path, **distributed: Any) -> dict[str, Any]:
    """A node that makes each exchange at its boundary, so that a test knows which came to pass."""
    given = {
        "enabled": True,
        "role": "worker",
        "repo_id": f"dir://{folder}/store",
        "state_dir": str(folder / "state"),
        "node_id": "ann",
        "inner_steps": 2,
        "poll_interval": 3600.0,
        "retry_attempts": 1,
        "async_delta_upload": False,
        "async_global_poll": False,
    }
    return tiny(
        folder / "run",
        run={"max_steps": 12, "seed": 3},
        model={"name": "line"},
        data={"dataset": "numbered:make", "micro_batch_size": 2, "target_batch_size": 4},
        optimizer={"lr": 1e-2},
        checkpoint={"every_steps": 3},
        distributed={**given, **distributed},
    )


def master_of(config: dict[str, Any]) -> MasterOuterLoop:
    from speedtronic.distributed.stores.open import connect

    settings = SpeedtronicConfig.from_dict(config)
    model = build_initial_model(settings, MetricLogger(stream=Silence()))
    master = MasterOuterLoop(
        connect(settings.distributed), snapshot(model), schema=Schema.of(model), quorum=1, expected_nodes=1
    )
    master.sync_once()
    return master


def deltas_of(folder: Path) -> list[DeltaHeader]:
    """The headers of all deltas that are in the store, in the order of the steps that they hold."""
    headers = [read_header(path.read_bytes()) for path in (folder / "store/in").rglob("*.safetensors")]
    return sorted(headers, key=lambda header: header.position.step)


def samples_of(*steps: int) -> list[int]:
    """Those that these steps read, of a node that reads all in order: four each."""
    return [4 * (step - 1) + number for step in steps for number in range(4)]


def a_kill_instead_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Let the end of a run send nothing, as where the process is killed; the returned function undoes it."""
    stop = DumbDiLoCoCoordinator.stop

    def vanish(coordinator: DumbDiLoCoCoordinator) -> None:
        session, coordinator._session = coordinator._session, None
        if session is not None:
            session.end(0.0)

    monkeypatch.setattr(DumbDiLoCoCoordinator, "stop", vanish)
    return lambda: monkeypatch.setattr(DumbDiLoCoCoordinator, "stop", stop)


# ---------------------------------------------------------------- what is built


def test_a_configured_node_trains_with_the_store_and_sends_all_its_steps(tmp_path: Path, data: Numbered) -> None:
    config = config_of(tmp_path, inner_steps=5)
    master_of(config)
    assert train_from_config(config).steps == 12
    assert [(header.steps, header.position) for header in deltas_of(tmp_path)] == [
        (5, (5, 20, 0)),
        (5, (10, 40, 0)),
        (2, (12, 48, 0)),
    ]


@pytest.mark.parametrize("size", [64, 4])
def test_a_delta_of_batches_without_tokens_weighs_by_their_samples(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    features = [{"x": torch.tensor([number / 64]), "y": torch.tensor([1.0])} for number in range(64)]
    module = ModuleType("numbered")
    module.make = lambda config: features  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "numbered", module)
    config = config_of(tmp_path)
    config["data"] |= {"micro_batch_size": size, "target_batch_size": size}
    config["run"]["max_steps"] = 2
    master_of(config)
    train_from_config(config)
    assert [per_step(header) for header in deltas_of(tmp_path)] == [size]


def test_the_events_of_a_master_and_its_node_have_the_documented_keys(tmp_path: Path, data: Numbered) -> None:
    trainer, _ = build_runtime(config_of(tmp_path, role="master", quorum=1, expected_nodes=1, async_global_poll=True))
    events = Events()
    trainer.logger.add_hook(events)
    trainer.fit()
    trainer.logger.close()
    assert {"delta_upload_queued", "delta_uploaded", "global_installed", "outer_step"} <= set(events.names())
    for name, payload in events.seen:
        assert payload.keys() - set(EVENTS[name].sometimes) == set(EVENTS[name].keys), name


def test_version_0_holds_the_initial_weights_of_a_run(tmp_path: Path, data: Numbered) -> None:
    config = config_of(tmp_path)
    trainer, _ = build_runtime(config)
    alone = build_initial_model(SpeedtronicConfig.from_dict(config), trainer.logger)
    torch.testing.assert_close(trainer.model.state_dict(), alone.state_dict(), rtol=0, atol=0)


def test_a_second_run_of_the_same_node_is_refused_at_its_start(tmp_path: Path, data: Numbered) -> None:
    config = config_of(tmp_path)
    master_of(config)
    first, _ = build_runtime(config)
    assert first.coordinator is not None
    first.coordinator.start()
    second, _ = build_runtime({**config, "run": {**config["run"], "output_dir": str(tmp_path / "other")}})
    with pytest.raises(RunLockedError, match=r"distributed\.node_id"):
        second.fit()
    first.coordinator.stop()


# ---------------------------------------------------------------- who reads what


def read_by(folder: Path, data: Numbered, node: str, **distributed: Any) -> tuple[list[int], str]:
    """The samples of a node's first epoch, and its console."""
    config = config_of(folder, node_id=node, **distributed)
    text = folder / node
    config["logging"] = {"file": str(text)}
    trainer, _ = build_runtime(config)
    data.read.clear()
    for _ in trainer.dataloader:
        pass
    trainer.logger.close()
    return list(data.read), text.read_text(encoding="utf-8") if text.exists() else ""


def test_expected_nodes_read_their_own_parts_and_find_them_again(tmp_path: Path, data: Numbered) -> None:
    ann, words = read_by(tmp_path, data, "ann", expected_nodes=2)
    bob, _ = read_by(tmp_path, data, "bob", expected_nodes=2)
    assert sorted(ann + bob) == list(range(SAMPLES))
    assert "node ann reads part 1 of 2 of the data" in words
    (tmp_path / "store").rename(tmp_path / "away")
    assert read_by(tmp_path, data, "bob", expected_nodes=2)[0] == bob, "without asking the store again"
    (tmp_path / "away").rename(tmp_path / "store")
    assert read_by(tmp_path, data, "ann", expected_nodes=2, state_dir=str(tmp_path / "new"))[0] == ann


def test_an_unexpected_node_shares_a_part_and_is_warned(tmp_path: Path, data: Numbered) -> None:
    first, _ = read_by(tmp_path, data, "ann", expected_nodes=1)
    second, words = read_by(tmp_path, data, "bob", expected_nodes=1)
    assert first == second
    assert "number 2 of distributed.expected_nodes: 1" in words


def test_a_node_that_cannot_ask_for_its_part_does_not_start(
    tmp_path: Path, data: Numbered, monkeypatch: pytest.MonkeyPatch
) -> None:
    from speedtronic.distributed.stores import FolderStore

    def down(*_: object, **__: object) -> None:
        raise StoreUnavailableError("no answer")

    monkeypatch.setattr(FolderStore, "put_if_absent", down)
    with pytest.raises(StoreUnavailableError, match="no answer"):
        build_runtime(config_of(tmp_path, expected_nodes=2))


def test_without_expected_nodes_each_node_shuffles_in_its_own_order(tmp_path: Path, data: Numbered) -> None:
    def order(node: str) -> list[int]:
        config = config_of(tmp_path, node_id=node)
        config["data"]["shuffle"] = True
        trainer, _ = build_runtime(config)
        data.read.clear()
        for _ in trainer.dataloader:
            pass
        return list(data.read)

    ann, bob = order("ann"), order("bob")
    assert ann != bob
    assert sorted(ann) == sorted(bob) == list(range(SAMPLES))
    assert order("ann") == ann


def test_nodes_that_read_the_same_data_are_warned(tmp_path: Path, data: Numbered) -> None:
    _, words = read_by(tmp_path, data, "ann")
    assert "every node reads the same data in the same order" in words


# ---------------------------------------------------------------- runs that end too early


@pytest.mark.usefixtures("many_pending")
def test_a_killed_node_trains_and_sends_no_step_twice(
    tmp_path: Path, data: Numbered, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint is of step 6, the store has the steps up to 8: it goes on with step 9."""
    config = config_of(tmp_path)
    master = master_of(config)
    data.deadly = samples_of(9)[0]
    survive = a_kill_instead_of(monkeypatch)
    with pytest.raises(Killed):
        train_from_config(config)
    survive()
    assert [header.position.step for header in deltas_of(tmp_path)] == [2, 4, 6, 8]
    before, data.deadly = list(data.read), None
    data.read.clear()
    result = train_from_config(config, resume=True)
    assert before + data.read == samples_of(*range(1, 13))
    assert [record["step"] for record in result.metrics] == [9, 10, 11, 12]
    assert (result.steps, result.samples) == (12, 48)
    assert sum(header.steps for header in deltas_of(tmp_path)) == 12
    assert master.sync_once() == 6


def test_a_killed_node_without_a_checkpoint_continues_after_what_it_sent(
    tmp_path: Path, data: Numbered, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(tmp_path)
    config["checkpoint"] = {"enabled": False}
    master_of(config)
    data.deadly = samples_of(6)[0]
    survive = a_kill_instead_of(monkeypatch)
    with pytest.raises(Killed):
        train_from_config(config)
    survive()
    data.deadly = None
    data.read.clear()
    result = train_from_config(config)
    assert data.read == samples_of(*range(5, 13)), "step 5 was never sent, so it is trained again"
    assert result.steps == 12
    assert sum(header.steps for header in deltas_of(tmp_path)) == 12


@pytest.mark.usefixtures("many_pending")
def test_a_node_that_lost_its_disk_learns_from_the_store_how_far_it_was(
    tmp_path: Path, data: Numbered, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(tmp_path)
    master = master_of(config)
    data.deadly = samples_of(8)[0]
    survive = a_kill_instead_of(monkeypatch)
    with pytest.raises(Killed):
        train_from_config(config)
    survive()
    master.sync_once()
    data.deadly = None
    data.read.clear()
    elsewhere = config_of(tmp_path, state_dir=str(tmp_path / "new"))
    elsewhere["run"]["output_dir"] = str(tmp_path / "new run")
    result = train_from_config(elsewhere)
    assert data.read == samples_of(*range(7, 13))
    assert result.steps == 12
    assert [header.position.step for header in deltas_of(tmp_path)] == [8, 10, 12]


@pytest.mark.usefixtures("many_pending")
def test_a_signal_ends_a_node_with_nothing_unsent_and_it_resumes(
    tmp_path: Path, data: Numbered, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(tmp_path)
    master_of(config)
    step = DumbDiLoCoCoordinator.after_optimizer_step

    def interrupted(coordinator: DumbDiLoCoCoordinator, model: nn.Module, number: int) -> bool:
        if number == 5:
            signal.raise_signal(signal.SIGTERM)
        return step(coordinator, model, number)

    with monkeypatch.context() as context:
        context.setattr(DumbDiLoCoCoordinator, "after_optimizer_step", interrupted)
        assert train_from_config(config).interrupted_by == signal.SIGTERM
    assert [header.position.step for header in deltas_of(tmp_path)] == [2, 4, 5]
    assert train_from_config(config, resume=True).metrics[0]["loss"] < 4.5, "nothing of it was taken back"
    assert data.read == samples_of(*range(1, 13))
    assert [header.position.step for header in deltas_of(tmp_path)] == [2, 4, 5, 7, 9, 11, 12]


def test_a_resumed_node_trains_as_if_it_had_never_stopped(tmp_path: Path, data: Numbered) -> None:
    """Without anything new in the store, and where its checkpoint is of a boundary."""

    def trained(name: str, *stops: int) -> list[float]:
        config = config_of(tmp_path / name, inner_steps=3)
        master_of(config)
        losses: list[float] = []
        for number, stop in enumerate((*stops, 12)):
            result = train_from_config(config, resume=number > 0, max_steps=stop)
            losses += [record["loss"] for record in result.metrics]
        return losses

    assert trained("stopped", 3, 9) == trained("whole")


# ---------------------------------------------------------------- nodes of several ranks


class Fixed(Line):
    """Begins with the same weights, whoever else draws random numbers at the time."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        nn.init.constant_(self.linear.weight, 0.5)
        nn.init.constant_(self.linear.bias, -0.25)


@pytest.mark.slow
def test_two_nodes_of_two_ranks_equal_two_nodes_of_one(
    tmp_path: Path, data: Numbered, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three rounds, in which each node trains an inner phase and the master makes a version of both deltas."""
    monkeypatch.setattr(registry, "_factories", {**registry._factories, "fixed": Fixed})

    def trained(ranks: int) -> tuple[list[list[float]], list[Any]]:
        folder = tmp_path / str(ranks)
        configs = []
        for name in ("ann", "bob"):
            config = config_of(folder, node_id=name, expected_nodes=2, inner_steps=4, state_dir=str(folder / name))
            config["run"]["output_dir"] = str(folder / f"run-{name}")
            config["model"]["name"] = "fixed"
            config["data"]["micro_batch_size"] = 4 // ranks
            config["logging"] = {"level": "ERROR"}
            configs.append(config)
        master = master_of(configs[0])
        weights, sent = [], []
        for number in range(3):
            for config in configs:
                with monkeypatch.context() as patch:
                    steps = 4 * (number + 1)
                    trainers = train_on_ranks(patch, ranks, config, resume=number > 0, max_steps=steps)
                found = [[p.item() for p in trainer.model.parameters()] for trainer in trainers]
                assert all(other == found[0] for other in found)
                weights.append(found[0])
            sent += [(h.node, h.base_version, h.steps, h.position, h.samples, h.tokens) for h in deltas_of(folder)]
            master.sync_once()
        return weights, sent

    (one, deltas_of_one), (two, deltas_of_two) = trained(1), trained(2)
    assert [base for _, base, *_ in deltas_of_one] == [0, 0, 1, 1, 2, 2]
    assert sorted(deltas_of_one) == sorted(deltas_of_two)
    torch.testing.assert_close(torch.tensor(two), torch.tensor(one), rtol=1e-5, atol=1e-5)
