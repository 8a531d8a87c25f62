"""Processes train one model with `speedtronic train`, and survive the loss of any of them."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from speedtronic.checkpoint import CheckpointManager
from speedtronic.config import SpeedtronicConfig
from tests.support.configs import tiny
from tests.support.launching import ROOT, environment, free_port, run_ranks, start_ranks
from tests.support.states import difference

pytestmark = pytest.mark.slow

COMMANDS = re.findall(r"^\$ (torchrun .*)$", (ROOT / "docs/devices.md").read_text(encoding="utf-8"), re.MULTILINE)
assert len(COMMANDS) == 2, "each is run by a test below"


def write_config(folder: Path, name: str, **sections: Any) -> Path:
    """A run of 8 updates with dropout, whose epochs end within updates."""
    plain: dict[str, Any] = {
        "run": {"max_steps": 8, "seed": 5},
        "model": {"dropout": 0.2, "vocab_size": 64},
        "data": {
            "dataset": "tests.parallel.acting:noisy",
            "micro_batch_size": 1,
            "target_batch_size": 6,
            "shuffle": True,
            "drop_last": False,
        },
        "optimizer": {"name": "muon", "ema": 0.9},
        "callbacks": ["tests.parallel.acting:acting"],
        "checkpoint": {"every_steps": 2, "keep_last": None, "resume": "auto"},
        "parallel": {"timeout": 20.0},
    }
    merged = {
        key: {**keys, **sections.pop(key, {})} if isinstance(keys, dict) else sections.pop(key, keys)
        for key, keys in plain.items()
    }
    file = folder / f"{name}.yaml"
    SpeedtronicConfig.from_dict(tiny(folder / name, **merged, **sections)).save(file)
    return file


def train(file: Path) -> list[str]:
    return ["-W", "error", "-m", "speedtronic", "train", str(file)]


def state_of(folder: Path) -> dict[str, Any]:
    state = CheckpointManager(folder / "checkpoints").load_latest()
    assert state is not None
    return state


def compared(folder: Path) -> dict[str, Any]:
    """The last state of a run, without its folder, and without how many passes this process has begun."""
    state = {key: value for key, value in state_of(folder).items() if key != "config"}
    for rank in (state, *state["ranks"]):
        del rank["data"]["epoch"]
    return state


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_run_that_goes_on_ends_like_one_that_was_never_interrupted(ranks: int, tmp_path: Path) -> None:
    """To the bit, with dropout, random samples, Muon and an average: each rank has random numbers of its own."""
    whole, halves = write_config(tmp_path, "whole"), write_config(tmp_path, "halves")
    assert [code for code, _, _ in run_ranks(ranks, train(whole), cwd=tmp_path)] == [0] * ranks
    results = run_ranks(ranks, train(halves), cwd=tmp_path, more={"ACT": f"SIGTERM:{ranks - 1}:3"})
    assert [code for code, _, _ in results] == [143] * ranks, results
    step = state_of(tmp_path / "halves")["step"]
    assert step in (3, 4)
    assert f"to continue: torchrun --nproc-per-node {ranks} -m speedtronic train {halves} --resume" in results[0][1]
    assert all("to continue:" not in output for _, output, _ in results[1:])
    assert [code for code, _, _ in run_ranks(ranks, train(halves), cwd=tmp_path)] == [0] * ranks
    assert difference(compared(tmp_path / "halves"), compared(tmp_path / "whole")) is None


def test_a_rank_that_is_killed_costs_the_steps_since_the_last_checkpoint_and_nothing_else(tmp_path: Path) -> None:
    whole, killed = write_config(tmp_path, "whole"), write_config(tmp_path, "killed")
    assert [code for code, _, _ in run_ranks(2, train(whole), cwd=tmp_path)] == [0, 0]
    (first, _, errors), (second, _, _) = run_ranks(2, train(killed), cwd=tmp_path, more={"ACT": "SIGKILL:1:5"})
    assert (first, second) == (1, -9)
    assert "one of them has gone" in errors
    assert state_of(tmp_path / "killed")["step"] == 4
    assert [code for code, _, _ in run_ranks(2, train(killed), cwd=tmp_path)] == [0, 0]
    assert difference(compared(tmp_path / "killed"), compared(tmp_path / "whole")) is None


def test_a_checkpoint_of_ranks_goes_on_in_one_process(tmp_path: Path) -> None:
    file = write_config(tmp_path, "run", model={"vocab_size": 64})
    results = run_ranks(2, train(file), cwd=tmp_path, more={"ACT": "SIGINT:0:3"})
    assert [code for code, _, _ in results] == [130, 130]
    done = subprocess.run(
        [sys.executable, *train(file)], cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert state_of(tmp_path / "run")["step"] == 8


def test_a_rank_that_is_stopped_is_named_within_the_timeout(tmp_path: Path) -> None:
    file = write_config(tmp_path, "run", parallel={"timeout": 8.0})
    ranks = start_ranks(2, train(file), cwd=tmp_path, more={"ACT": "SIGSTOP:1:3"})
    began = time.monotonic()
    try:
        _, errors = ranks.processes[0].communicate(timeout=60)
    finally:
        ranks.end()
    assert ranks.processes[0].returncode == 1
    assert re.search(
        r"error: rank 0 has waited for \d s at step 3, waiting for a \w+: rank 1 does not answer any more, "
        r"and was last at (the start|step [123])",
        errors,
    ), errors
    assert time.monotonic() - began < 60


def test_two_plain_processes_refuse_each_other_and_one_group_does_not(tmp_path: Path) -> None:
    file = write_config(tmp_path, "run")
    ranks = start_ranks(2, train(file), cwd=tmp_path, more={"ACT": "SIGSTOP:0:3"})
    try:
        lock = tmp_path / "run/.lock"
        while not lock.is_file() or lock.stat().st_size == 0:
            assert all(process.poll() is None for process in ranks.processes)
            time.sleep(0.05)
        other = subprocess.run(
            [sys.executable, *train(file)], cwd=tmp_path, capture_output=True, text=True, check=False
        )
    finally:
        ranks.end()
    assert other.returncode == 2
    assert "is in use by process" in other.stderr


def test_one_rank_says_what_is_wrong_with_the_configuration(tmp_path: Path) -> None:
    file = write_config(tmp_path, "run", data={"target_batch_size": 3})
    results = run_ranks(2, train(file), cwd=tmp_path)
    assert [code for code, _, _ in results] == [2, 2]
    assert "data.target_batch_size 3 is the update of all ranks together" in results[0][2]
    assert results[1][1:] == ("", "")


def test_only_rank_0_writes_files_and_lines(tmp_path: Path) -> None:
    file = write_config(
        tmp_path, "run", logging={"json_file": "metrics.jsonl", "level": "INFO"}, run={"max_steps": 2, "seed": 5}
    )
    results = run_ranks(2, train(file), cwd=tmp_path)
    assert [code for code, _, _ in results] == [0, 0]
    assert results[1][1:] == ("", "")
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["event"] == "train_step"] == [1, 2]
    assert len({line["run_id"] for line in lines}) == 1


@pytest.mark.parametrize("command", [["doctor"], ["train", "CONFIG", "--dry-run"]])
def test_other_commands_run_in_one_process_or_say_why_not(command: list[str], tmp_path: Path) -> None:
    file = str(write_config(tmp_path, "run"))
    words = [file if word == "CONFIG" else word for word in command]
    results = run_ranks(2, ["-m", "speedtronic", *words], cwd=tmp_path)
    assert results[1][1:] == ("", "")
    if "--dry-run" in command:
        assert results[0][0] == 2
        assert "start it without torchrun" in results[0][2]
    else:
        assert results[0][0] == 0, results[0][2]


def by_torchrun(command: str, folder: Path, act: str) -> subprocess.CompletedProcess[str]:
    """A command line of `docs/devices.md`, on a port of its own."""
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", *shlex.split(command)[1:]]
    names = {**environment(), "ACT": act}
    return subprocess.run(words, cwd=folder, env=names, capture_output=True, text=True, check=False, timeout=180)


def test_the_first_command_of_the_page_trains(tmp_path: Path) -> None:
    write_config(tmp_path, "run", checkpoint={"resume": False})
    done = by_torchrun(COMMANDS[0], tmp_path, "")
    assert done.returncode == 0, done.stderr
    assert len(state_of(tmp_path / "run")["ranks"]) == 1


def test_torchrun_starts_a_run_again_that_has_lost_a_rank(tmp_path: Path) -> None:
    """`torchrun --max-restarts` and `checkpoint.resume=auto`; the callback kills rank 1 in the first attempt only."""
    write_config(tmp_path, "run", checkpoint={"resume": False})
    done = by_torchrun(COMMANDS[1], tmp_path, "SIGKILL:1:5")
    assert done.returncode == 0, done.stderr
    assert state_of(tmp_path / "run")["step"] == 8
    assert "resumed at step 4" in done.stdout


@pytest.fixture
def slurm(tmp_path: Path) -> dict[str, str]:
    """The environment of a job on one machine, with stand-ins for Slurm's commands."""
    commands = tmp_path / "bin"
    commands.mkdir()
    stand_ins = {
        "srun": 'shift\nexec "$@"',
        "scontrol": f'case "$1" in show) echo 127.0.0.1;; requeue) echo "$2" >> {tmp_path}/requeued;; esac',
        "torchrun": f'exec {sys.executable} -m torch.distributed.run "$@"',
    }
    for name, body in stand_ins.items():
        (commands / name).write_text(f"#!/bin/sh\n{body}\n")
        (commands / name).chmod(0o755)
    names = {"SLURM_JOB_NODELIST": "one", "SLURM_JOB_NUM_NODES": "1", "SLURM_GPUS_ON_NODE": "2", "SLURM_JOB_ID": "7"}
    return {**environment(), **names, "PATH": f"{commands}{os.pathsep}{os.environ['PATH']}"}


def job(folder: Path, names: dict[str, str]) -> subprocess.Popen[bytes]:
    """The script of the example, on a port of its own."""
    script = (ROOT / "examples/cluster/slurm.sh").read_text().replace(":29500", f":{free_port()}")
    (folder / "job.sh").write_text(script)
    return subprocess.Popen(
        ["bash", "job.sh", "run.yaml"], cwd=folder, env=names, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )


def test_a_slurm_job_goes_back_into_the_queue_when_it_is_preempted_and_goes_on(
    tmp_path: Path, slurm: dict[str, str]
) -> None:
    write_config(tmp_path, "run", run={"max_steps": 100_000, "seed": 5}, checkpoint={"keep_last": 2})
    first = job(tmp_path, slurm)
    while CheckpointManager(tmp_path / "run/checkpoints").latest_path() is None:
        assert first.poll() is None
        time.sleep(0.1)
    first.terminate()
    first.wait(timeout=120)
    assert (tmp_path / "requeued").read_text() == "7\n"
    step = state_of(tmp_path / "run")["step"]
    write_config(tmp_path, "run", run={"max_steps": step + 2, "seed": 5})
    second = job(tmp_path, slurm)
    assert second.wait(timeout=120) == 0
    assert state_of(tmp_path / "run")["step"] == step + 2
    assert (tmp_path / "requeued").read_text() == "7\n"
