"""A slice of the torture, and proof that it would notice."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest

from speedtronic.durable.files import FileSystem
from tests.torture.disk import TorturedFileSystem
from tests.torture.mutants import MUTANTS

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the harness forks; Windows has no fork")


def torture(*arguments: str) -> subprocess.CompletedProcess[str]:
    # In a process of its own: this one may have threads, which do not survive a fork.
    command = [sys.executable, "-m", "tests.torture", *arguments]
    return subprocess.run(command, cwd=ROOT, text=True, capture_output=True, timeout=280)


@pytest.mark.slow
def test_a_run_that_is_killed_again_and_again_equals_one_that_never_was(tmp_path: Path) -> None:
    done = torture("--kills", "30", "--each", "1", "--seed", "7", "--folder", str(tmp_path), "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    numbers = json.loads(done.stdout)
    assert numbers["error"] is None
    assert numbers["kills"] >= 30
    assert min(numbers["phases"][p] for p in ("training", "snapshot", "write", "rename", "pointer", "prune")) >= 1
    # Which kinds so few lives meet depends on when they are killed; `make torture` meets each hundreds of times.
    assert sum(numbers["faults"].values()) > 0


@pytest.mark.slow
def test_faults_built_into_the_code_are_noticed_for_what_they_are(tmp_path: Path) -> None:
    done = torture("--self-test", "--folder", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("noticed after") == len(MUTANTS)


def test_every_operation_of_the_file_layer_can_be_tortured() -> None:
    operations = {name for name, _ in inspect.getmembers(FileSystem, inspect.isfunction)}
    assert operations <= vars(TorturedFileSystem).keys()


@pytest.mark.slow
def test_a_run_of_two_ranks_survives_the_loss_of_any_of_them(tmp_path: Path) -> None:
    """20 kills; `make torture` has 100, in every phase."""
    command = [sys.executable, "-m", "tests.torture.ranks", "--kills", "20", "--seed", "7", "--folder", str(tmp_path)]
    done = subprocess.run([*command, "--json"], cwd=ROOT, text=True, capture_output=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    numbers = json.loads(done.stdout)
    assert numbers["kills"] >= 20
    assert min(numbers["ranks"].values()) > 0
