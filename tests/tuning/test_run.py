"""Runs with `tune`: the same losses to rounding, the same batches, and resume to the bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from speedtronic.config import SpeedtronicConfig
from speedtronic.errors import ConfigError
from speedtronic.runtime import build_runtime, train_from_config, tune_from_config
from speedtronic.trainer import TrainResult
from speedtronic.tuning import Choices, Plan, search, tune
from speedtronic.tuning.search import Possible
from tests.support.configs import tiny

UPDATE = {"micro_batch_size": 2, "target_batch_size": 8, "shuffle": True}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPEEDTRONIC_CACHE", str(tmp_path / "cache"))


def config(folder: Path, tuning: str = "off", **sections: Any) -> dict[str, Any]:
    sections = {"data": UPDATE, "run": {"max_steps": 6}, "precision": {"mode": "fp32"}} | sections
    return tiny(folder, tune=tuning, checkpoint={"every_steps": 2}, **sections)


def plan_file(folder: Path, **changes: Any) -> str:
    base = Choices.of(SpeedtronicConfig(**config(folder)))
    plan = Plan(choices=base.but(**changes), base=base, target=6, machine={}, key="by hand")
    (folder / "plan.json").write_text(plan.to_json(), encoding="utf-8")
    return str(folder / "plan.json")


def losses(result: TrainResult) -> list[float]:
    return [record["loss"] for record in result.metrics]


def test_a_tuned_run_has_the_losses_of_one_that_is_not(tmp_path: Path) -> None:
    plain = train_from_config(config(tmp_path / "plain"))
    path = plan_file(tmp_path, merged=4, threads=1, num_workers=1, fused=False)
    tuned = train_from_config(config(tmp_path / "tuned", path))
    assert losses(tuned) == pytest.approx(losses(plain), rel=1e-5)
    assert (tuned.samples, tuned.tokens) == (plain.samples, plain.tokens)


def test_a_plan_is_applied_and_the_process_is_left_as_it_was(tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    path = plan_file(tmp_path, merged=2, threads=threads + 1, num_workers=1)
    trainer, _ = build_runtime(config(tmp_path / "run", path))
    assert (torch.get_num_threads(), trainer.config.data.num_workers, trainer._merged) == (threads + 1, 1, 2)
    torch.set_num_threads(threads)
    train_from_config(config(tmp_path / "run", path))
    assert torch.get_num_threads() == threads


def measuring_runs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let runs of a few steps measure merged micro batches and one thread; returns what is measured from now on."""
    monkeypatch.setattr(tune, "SETUP_SECONDS", 0.0)
    monkeypatch.setattr(tune, "BUDGET", 1e6)
    monkeypatch.setattr(search, "BUDGET", 1e6)
    monkeypatch.setattr(
        tune, "possible_choices", lambda *parts: Possible(merges=True, target_batch_size=8, threads=(1,))
    )
    measured: list[str] = []
    bench = tune.Bench.__call__

    def noted(self: Any, choices: Choices, **options: Any) -> Any:
        row = bench(self, choices, **options)
        measured.append(f"{choices.merged} {choices.threads} {row.note}")
        # Whatever the clock says: merged micro batches win, so that the test always sees them chosen.
        return row.model_copy(update={"step_seconds": 1.0 / choices.merged, "start_seconds": 0.0})

    monkeypatch.setattr(tune.Bench, "__call__", noted)
    return measured


@pytest.mark.slow
def test_measuring_moves_neither_batches_nor_random_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = train_from_config(config(tmp_path / "plain"))
    measured = measuring_runs(monkeypatch)
    tuned = train_from_config(config(tmp_path / "tuned", "auto"))
    assert measured == ["1 None ", "2 None ", "4 None ", "4 1 ", "1 None "]
    assert losses(tuned) == pytest.approx(losses(plain), rel=1e-5)
    again = train_from_config(config(tmp_path / "again", plan_file(tmp_path, merged=4)))
    assert losses(again) == losses(tuned)


@pytest.mark.slow
def test_a_tuned_run_that_was_stopped_and_resumed_is_the_one_that_was_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = measuring_runs(monkeypatch)
    whole = train_from_config(config(tmp_path / "whole", "auto"))
    first = train_from_config(config(tmp_path / "parts", "auto"), max_steps=2)
    # Another plan in the cache, and one from measuring anew, would both be another one than that of the checkpoint.
    monkeypatch.setenv("SPEEDTRONIC_CACHE", str(tmp_path / "empty"))
    monkeypatch.setattr(tune, "possible_choices", lambda *parts: Possible())
    measured.clear()
    trainer, manager = build_runtime(config(tmp_path / "parts", "auto"), resume=True)
    second = trainer.fit()
    assert measured == []
    assert losses(first) + losses(second) == losses(whole)
    for mine, theirs in zip(trainer.model.parameters(), _weights(tmp_path / "whole"), strict=True):
        assert torch.equal(mine, theirs)
    state = manager.load_latest()
    assert state is not None
    assert Plan.model_validate(state["tuning"]).choices.merged == 4


def _weights(folder: Path) -> list[torch.nn.Parameter]:
    trainer, _ = build_runtime(config(folder, "auto"), resume=True)
    return list(trainer.model.parameters())


@pytest.mark.slow
def test_a_short_run_neither_measures_nor_compiles(tmp_path: Path) -> None:
    with mock.patch("torch.compile") as compiled, mock.patch.object(tune.Bench, "__call__") as measured:
        train_from_config(
            config(tmp_path, "auto", run={"max_steps": 100, "log_every": 100}, logging={"json_file": "log"})
        )
    assert not compiled.called
    assert not measured.called
    events = [json.loads(line) for line in (tmp_path / "log").read_text(encoding="utf-8").splitlines()]
    assert [event["source"] for event in events if event["event"] == "tune"] == ["too short"]


def test_a_plan_that_the_model_cannot_run_by_is_refused(tmp_path: Path) -> None:
    path = plan_file(tmp_path, merged=2)
    with pytest.raises(ConfigError, match="merged_micro_batches: 2 is not possible"):
        build_runtime(config(tmp_path / "run", path, model={"dropout": 0.1}))


@pytest.mark.slow
def test_tune_from_config_measures_without_a_trace_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = measuring_runs(monkeypatch)
    plan = tune_from_config(config(tmp_path / "run"))
    assert (plan.choices.merged, plan.complete, len(measured)) == (4, True, 5)
    assert not (tmp_path / "run").exists()


def test_a_size_of_auto_is_found_and_stays_auto_for_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "SETUP_SECONDS", 1e9)
    auto = config(tmp_path / "run", "auto", data={**UPDATE, "micro_batch_size": "auto"})
    result = train_from_config(auto)
    assert [record["micro_batches"] for record in result.metrics] == [1] * 6
    assert "micro_batch_size: auto" in (tmp_path / "run" / "config.yaml").read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # what torch's compiler imports warns, and as an error that would end it
def test_a_compiled_and_merged_run_resumes_to_the_bit(tmp_path: Path) -> None:
    path = plan_file(tmp_path, merged=2, compile=True, threads=1)
    log = {"json_file": "log"}
    whole, first, second = (config(tmp_path / part, path, logging=log) for part in ("whole", "parts", "parts"))
    straight = train_from_config(whole)
    before = train_from_config(first, max_steps=2)
    after = train_from_config(second, resume=True)
    assert losses(before) + losses(after) == losses(straight)
    assert losses(straight) == pytest.approx(losses(train_from_config(config(tmp_path / "plain"))), rel=1e-4)
    for part in ("whole", "parts"):
        events = [json.loads(line) for line in (tmp_path / part / "log").read_text(encoding="utf-8").splitlines()]
        assert {event["status"] for event in events if event["event"] == "compile"} == {"enabled"}
