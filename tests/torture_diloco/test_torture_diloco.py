"""A slice of the torture."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest

from tests.torture_diloco.lives import fates

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(900)  # a minute or so, but each of a dozen starts takes long where the machine is busy
def test_three_processes_that_are_killed_again_and_again_lose_and_double_nothing(tmp_path: Path) -> None:
    sizes = ["--steps", "40", "--inner-steps", "10", "--every", "30", "--pace", "0.02"]
    command = [sys.executable, "-m", "tests.torture_diloco", "--seeds", "2", "--only-killed", "--json", *sizes]
    done = subprocess.run([*command, "--folder", str(tmp_path)], cwd=ROOT, text=True, capture_output=True, timeout=840)
    assert done.returncode == 0, done.stdout + done.stderr
    numbers = json.loads(done.stdout)
    assert numbers["faults"] == []
    assert numbers["recomputed"]["versions"] == numbers["versions"] > 4
    assert numbers["recomputed"]["deltas"] >= 12
    assert sum(numbers["kills"].values()) >= 3


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_nodes_of_two_ranks_of_which_any_is_killed_lose_and_double_nothing(tmp_path: Path) -> None:
    sizes = ["--steps", "40", "--inner-steps", "10", "--every", "30", "--pace", "0.02", "--ranks", "2"]
    command = [sys.executable, "-m", "tests.torture_diloco", "--seeds", "2", "--only-killed", "--json", *sizes]
    done = subprocess.run([*command, "--folder", str(tmp_path)], cwd=ROOT, text=True, capture_output=True, timeout=840)
    assert done.returncode == 0, done.stdout + done.stderr
    numbers = json.loads(done.stdout)
    assert numbers["faults"] == []
    assert numbers["recomputed"]["versions"] == numbers["versions"] > 4
    assert sum(numbers["kills"].values()) >= 3


def test_the_same_seed_kills_at_the_same_places() -> None:
    assert list(islice(fates("1-anna", 100), 20)) == list(islice(fates("1-anna", 100), 20))
    assert list(islice(fates("1-anna", 100), 20)) != list(islice(fates("2-anna", 100), 20))
