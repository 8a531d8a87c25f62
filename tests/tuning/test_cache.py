"""Plans are found again where all that matters is equal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from speedtronic.config import SpeedtronicConfig
from speedtronic.registry import build_model
from speedtronic.tuning import cache
from speedtronic.tuning.plan import Choices, Measured, Plan
from tests.support.configs import tiny

MACHINE = {"cores": "2"}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPEEDTRONIC_CACHE", str(tmp_path / "cache"))


def key(machine: dict[str, str] = MACHINE, **sections: Any) -> str:
    config = SpeedtronicConfig(**tiny("out", **sections))
    return cache.key_of(config, build_model(config.model), machine)


@pytest.mark.parametrize(
    "sections",
    [
        {"optimizer": {"lr": 1e-2, "weight_decay": 0.0}},
        {"run": {"seed": 7, "max_steps": 9, "name": "another"}},
        {"checkpoint": {"every_steps": 3}},
        {"tune": "auto"},
    ],
)
def test_what_does_not_change_the_work_finds_the_same_plan(sections: dict[str, Any]) -> None:
    assert key(**sections) == key()


@pytest.mark.parametrize(
    "sections",
    [
        {"model": {"n_layer": 2}},
        {"data": {"micro_batch_size": 1}},
        {"data": {"target_batch_size": 4}},
        {"data": {"block_size": 8}},
        {"optimizer": {"name": "muon"}},
        {"optimizer": {"ema": 0.9}},
        {"optimizer": {"grad_clip": 1.0}},
        {"precision": {"mode": "bf16"}},
        {"gradient_checkpointing": True},
        {"machine": {"cores": "4"}},
    ],
)
def test_what_changes_the_work_or_the_machine_has_a_plan_of_its_own(sections: dict[str, Any]) -> None:
    assert key(**sections) != key()


def test_the_machine_is_told_by_processor_and_cores_whatever_threads_run_now() -> None:
    before, threads = cache.machine_of(torch.device("cpu")), torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    assert cache.machine_of(torch.device("cpu")) == before
    torch.set_num_threads(threads)
    assert {"device", "processor", "cores", "threads"} == before.keys()
    assert all(before.values())


def plan(**changes: Any) -> Plan:
    base = Choices(micro_batch_size=1)
    row = Measured(choices=base, step_seconds=0.1)
    return Plan(choices=base, base=base, target=9, machine=MACHINE, key="k", measured=(row,)).model_copy(update=changes)


def test_a_plan_is_found_under_its_key_until_it_is_damaged(tmp_path: Path) -> None:
    assert cache.load("k") is None
    cache.keep(plan())
    assert cache.load("k") == plan()
    (file,) = (tmp_path / "cache" / "plans").iterdir()
    file.write_text(file.read_text(encoding="utf-8")[:-20], encoding="utf-8")
    assert cache.load("k") is None


def test_a_plan_of_another_key_or_without_measurements_is_not_used() -> None:
    cache.keep(plan(measured=()))
    assert cache.load("k") is None
    (mine,) = (cache.cache_folder() / "plans").iterdir()
    mine.write_text(plan(key="k2").to_json(), encoding="utf-8")
    assert cache.load("k") is None


def test_another_version_of_torch_finds_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    cache.keep(plan())
    monkeypatch.setattr(torch, "__version__", "99.0")
    assert cache.load("k") is None
