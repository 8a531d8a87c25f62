"""Benchmarks run in their shortest form, and measure what they say."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def records(script: str, *options: str) -> list[dict[str, Any]]:
    command = [sys.executable, str(BENCHMARKS / script), *options, "--json"]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture
def ablation(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import diloco_ablation

    module: ModuleType = diloco_ablation
    return module


@pytest.fixture
def text() -> str:
    return "".join(chr(97 + (index * index + index // 7) % 26) for index in range(3000))


def test_a_report_of_a_short_log_is_measured() -> None:
    (record,) = records("report.py", "--steps", "1000")
    assert record["steps"] == 1000
    assert 100_000 < record["page_bytes"] < 3e6
    assert record["cpu_s"] > 0


@pytest.mark.slow
def test_a_short_run_is_as_fast_with_tune_as_without() -> None:
    (record,) = records("tune.py", "--runs", "tiny, short", "--rounds", "1")
    assert record["run"] == "tiny, short"
    assert 0.2 < record["speed_over_off"] < 5  # a busy machine says no more


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_check_of_a_card_reaches_its_end_on_the_cpu(tmp_path: Path) -> None:
    """All tests and measurements for a card, in a tiny form: what it would tell of a card, nobody has seen yet."""
    output = tmp_path / "check.md"
    command = ["bash", str(BENCHMARKS / "gpu_check.sh"), "--dry", str(output)]
    done = subprocess.run(command, env={**os.environ, "PYTHON": sys.executable}, capture_output=True, text=True)
    table = output.read_text(encoding="utf-8")
    assert done.returncode == 0, table + done.stderr
    for name in ("tests", "speed", "attention", "launches", "optimizers", "checkpoints", "ranks"):
        assert f"| {name} | passed |" in table
    assert "| fit, compiled |" in table
    assert "flash_attention_for_cpu" in table


@pytest.mark.slow
def test_the_check_of_a_card_says_which_part_failed_and_ends_with_1(tmp_path: Path) -> None:
    broken = tmp_path / "python"
    broken.write_text('#!/bin/sh\ncase "$*" in *speed*) exit 3;; *attention*) sleep 9;; esac\n', encoding="utf-8")
    broken.chmod(0o755)
    output = tmp_path / "check.md"
    script = (BENCHMARKS / "gpu_check.sh").read_text(encoding="utf-8").replace("part attention 10", "part attention 1")
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks/gpu_check.sh").write_text(script, encoding="utf-8")
    command = ["bash", str(tmp_path / "benchmarks/gpu_check.sh"), str(output)]
    done = subprocess.run(command, env={**os.environ, "PYTHON": str(broken)}, capture_output=True, text=True)
    assert done.returncode == 1
    table = output.read_text(encoding="utf-8")
    assert "| tests | passed |" in table
    assert "| speed | failed (3) |" in table
    assert "| attention | stopped after 1 s |" in table


@pytest.mark.slow
def test_two_ranks_are_compared_with_a_loop_by_hand() -> None:
    (record,) = records("ranks.py", "--rounds", "1", "--steps", "1")
    assert record["ranks"] == 2
    assert 0.1 < record["ratio"] < 10  # a busy machine says no more


@pytest.mark.slow
def test_heads_of_large_vocabularies_agree_and_ours_takes_less_memory_than_torchs() -> None:
    options = ["--positions", "256", "--vocabularies", "20000", "--width", "32", "--chunk", "64", "--rounds", "1"]
    (record,) = records("cross_entropy.py", *options)
    rows = {row["name"]: row for row in record["rows"]}
    assert all(row["difference"] < 1e-4 for row in rows.values())
    assert rows["ours"]["bytes"] < 1.0


@pytest.mark.slow
def test_idle_looks_do_not_grow_with_history() -> None:
    looks = records("diloco.py", "--only", "idle", "--quick")
    for who, most in (("node", 1), ("master", 2)):
        costs = {(look["requests"], look["bytes"]) for look in looks if look["who"] == who}
        assert len(costs) == 1
        assert costs.pop()[0] <= most


@pytest.mark.slow
def test_rounds_of_many_nodes_are_measured() -> None:
    (record,) = records("diloco.py", "--only", "nodes", "--quick")
    assert len(record["seconds"]) == record["nodes"] - 1 == 1
    assert record["copies"] > 2.0  # weights and momentum at least


@pytest.mark.slow
def test_the_memory_of_a_node_without_its_master_is_measured() -> None:
    found = records("diloco.py", "--only", "memory", "--quick")
    assert [record["codec"] for record in found] == ["fp32", "bf16"]
    for record in found:
        assert 4.0 < record["boundary"] < record["last"], "the last boundary is not skipped"


@pytest.mark.slow
def test_stalls_are_measured() -> None:
    (record,) = records("diloco.py", "--only", "stall", "--quick")
    assert len(record["boundary"]) == len(record["copy"]) == len(record["install"]) == 3


@pytest.mark.slow
def test_diloco_ablation_runs_every_arm(ablation: ModuleType, text: str, tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text(text, encoding="utf-8")
    outcomes = records("diloco_ablation.py", "--text", str(file), "--seeds", "1", "--rounds", "1", "--processes", "1")
    assert [outcome["arm"] for outcome in outcomes] == [arm.name for arm in ablation.ARMS]
    assert all(outcome["versions"] >= 1 for outcome in outcomes)


def test_every_statement_of_the_ablation_is_of_arms_that_it_has(ablation: ModuleType) -> None:
    arms = {arm.name for arm in ablation.ARMS}
    assert {statement.arm for statement in ablation.STATEMENTS} <= arms
    assert {statement.to for statement in ablation.STATEMENTS} <= arms


def test_the_synchronous_arm_is_diloco(ablation: ModuleType, text: str) -> None:
    outcome = ablation.run(ablation.BASELINE, 1, 2, text)
    assert outcome.loss == pytest.approx(plain_diloco(ablation, 1, 2, text), rel=1e-6)
    assert (outcome.versions, outcome.rounds, outcome.lost) == (2, 2.0, 0.0)


def test_an_arm_takes_back_what_it_replaced(ablation: ModuleType) -> None:
    kept = (ablation.Node._without, ablation.averaging.Round.fraction)
    for arm in ablation.ARMS:
        with ablation.changed(arm):
            pass
    assert kept == (ablation.Node._without, ablation.averaging.Round.fraction)


def test_an_arm_without_fractions_makes_whole_rounds(ablation: ModuleType, text: str) -> None:
    arm = next(arm for arm in ablation.ARMS if not arm.fractions)
    outcome = ablation.run(arm, 1, 1, text)
    assert outcome.rounds == outcome.versions > 1


def test_an_arm_that_overwrites_drops_steps(ablation: ModuleType, text: str) -> None:
    arm = next(arm for arm in ablation.ARMS if arm.install == "overwrite" and arm.link == ablation.NEAR)
    assert ablation.run(arm, 1, 2, text).lost > 0.0


def test_an_arm_without_what_is_pending_ends_elsewhere(ablation: ModuleType, text: str) -> None:
    forgets = next(arm for arm in ablation.ARMS if arm.install == "nothing pending")
    forgets = dataclasses.replace(forgets, link=ablation.Link(transfer=20.0))  # slow enough for three rounds
    without = ablation.run(forgets, 1, 4, text)
    with_it = ablation.run(dataclasses.replace(forgets, install="rebase"), 1, 4, text)
    assert without.versions == with_it.versions
    assert without.loss != with_it.loss


def plain_diloco(ablation: ModuleType, seed: int, rounds: int, characters: str) -> float:
    """DiLoCo (Douillard et al., arXiv 2311.08105, algorithm 1) in a loop, its outer step by torch."""
    text = ablation.Text(characters)
    torch.manual_seed(seed)
    shared = ablation.NextCharacter()
    outer = torch.optim.SGD(shared.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    nodes = [
        ablation.Training(ablation.NextCharacter(), text.part(place, 4), 100 * seed + place, reset=False)
        for place in range(4)
    ]
    for _ in range(rounds):
        for node in nodes:
            node.model.load_state_dict(shared.state_dict())
            for _ in range(ablation.INNER_STEPS):
                node.step()
        for name, parameter in shared.named_parameters():
            deltas = [parameter.detach() - dict(node.model.named_parameters())[name].detach() for node in nodes]
            parameter.grad = torch.stack(deltas).mean(0)
        outer.step()
    with torch.no_grad():
        return float(ablation.loss_of(shared, text.held_out))


@pytest.mark.slow
def test_each_cell_of_out_of_order_backprop_that_a_cpu_has_is_measured() -> None:
    sizes = ("--widths", "16", "--rows", "4", "--layers", "3", "--rounds", "1", "--steps", "2")
    (record,) = records("out_of_order.py", "--device", "cpu", *sizes)
    assert record["cells"].keys() == {"eager, off", "eager, same stream", "compile, off"}
    assert all(cell["ms"] > 0 and cell["speed"] > 0 for cell in record["cells"].values())
