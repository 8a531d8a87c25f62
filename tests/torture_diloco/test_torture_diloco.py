"""A slice of the torture, and proof that its checks would notice."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest
import torch
from torch import nn

from speedtronic.distributed.master import MasterSettings
from speedtronic.distributed.protocol import DeltaId, Manifest, Position, Rejection
from speedtronic.distributed.requests import perform
from speedtronic.distributed.schema import Schema, snapshot
from speedtronic.distributed.stores.folder import FolderStore
from tests.support.masters import new_master, packed_delta
from tests.torture_diloco import history
from tests.torture_diloco.history import History
from tests.torture_diloco.lives import fates

ROOT = Path(__file__).parents[2]
NODES = ("a", "b")
WHOLE = Position(20, 2000, 2000)


@pytest.mark.slow
@pytest.mark.timeout(900)  # a minute or so, but each of a dozen starts takes long where the machine is busy
def test_three_processes_that_are_killed_again_and_again_lose_and_double_nothing(tmp_path: Path) -> None:
    sizes = ["--steps", "40", "--inner-steps", "10", "--every", "30", "--pace", "0.02"]
    command = [sys.executable, "-m", "tests.torture_diloco", "--seeds", "2", "--only-killed", "--json", *sizes]
    done = subprocess.run([*command, "--folder", str(tmp_path)], cwd=ROOT, text=True, capture_output=True, timeout=840)
    assert done.returncode == 0, done.stdout + done.stderr
    numbers = json.loads(done.stdout)
    assert numbers["faults"] == []
    assert sum(numbers["kills"].values()) >= 3


def test_the_same_seed_kills_at_the_same_places() -> None:
    assert list(islice(fates("1-anna", 100), 20)) == list(islice(fates("1-anna", 100), 20))
    assert list(islice(fates("1-anna", 100), 20)) != list(islice(fates("2-anna", 100), 20))


# ---------------------------------------------------------------------- the checks


@pytest.fixture
def past(tmp_path: Path) -> History:
    """Of two nodes that trained 20 steps each, one of them late, and a real master."""
    model = nn.Linear(2, 1, bias=False)
    schema = Schema.of(model)
    store, kept = FolderStore(tmp_path / "store"), tmp_path / "kept"
    master = new_master(MasterSettings(expected_nodes=2), schema=schema, initial=snapshot(model))

    def send(node: str, seq: int, base: int, value: float) -> None:
        delta = DeltaId(node, "s", seq)
        trained = {"weight": torch.full((1, 2), value)}
        assert store.put_if_absent(delta.name, packed_delta(delta, trained, schema=schema, base_version=base))
        shutil.copytree(tmp_path / "store" / "in", kept / "in", dirs_exist_ok=True)

    perform(master.poll(), store)
    for node, value in zip(NODES, (0.5, -0.25), strict=True):
        send(node, 1, 0, value)
    assert perform(master.poll(), store) == 2
    for node, value in zip(NODES, (0.125, 1.0), strict=True):
        send(node, 2, 1, value)
        assert perform(master.poll(), store) == 1
    return history.read(tmp_path / "store", kept)


def faults(past: History) -> str:
    return "\n".join(history.faults(past, NODES, WHOLE))


def with_version(past: History, version: int, **changes: object) -> History:
    manifests: list[Manifest] = list(past.manifests)
    manifests[version] = manifests[version].model_copy(update=changes)
    return past._replace(manifests=manifests)


def with_steps(past: History, delta: str, steps: int) -> History:
    header = past.headers[delta].model_copy(update={"steps": steps})
    return past._replace(headers={**past.headers, delta: header})


def test_a_true_history_has_no_faults(past: History) -> None:
    assert faults(past) == ""
    assert history.distance(past, nodes=2) < 1e-6
    fractions = [manifest.fraction for manifest in past.manifests[1:]]
    assert fractions[:2] == [1.0, 0.5]
    assert fractions[2] == pytest.approx(0.5 * 1.5**-0.5)  # a delta that is half a round old


def test_a_fork_is_noticed(past: History) -> None:
    assert "version 2 is not the child" in faults(with_version(past, 2, parent="0" * 64))


def test_a_delta_that_enters_twice_is_noticed(past: History) -> None:
    again = (*past.manifests[3].applied, "in/a/s/00000001.safetensors")
    assert "in/a/s/00000001.safetensors was taken in 2 times" in faults(with_version(past, 3, applied=again))


def test_a_delta_that_is_left_out_is_noticed(past: History) -> None:
    found = faults(with_version(past, 1, applied=("in/b/s/00000001.safetensors",)))
    assert "the marks of version 1 are not those of the deltas that it deals with" in found
    assert "a: not at all is in the weights what lies between (10, 1000, 1000) and (0, 0, 0)" in found


def test_a_delta_out_of_turn_is_noticed(past: History) -> None:
    assert "version 2 deals with in/a/s/00000002.safetensors out of turn" in faults(with_version(past, 1, marks={}))


def test_a_refused_delta_is_noticed(past: History) -> None:
    refused = (Rejection(name="in/a/s/00000009.safetensors", reason="stale"),)
    assert "in/a/s/00000009.safetensors was refused" in faults(with_version(past, 3, rejected=refused))


@pytest.mark.parametrize(("steps", "what"), [(15, "twice"), (5, "not at all")])
def test_steps_in_two_deltas_and_steps_in_none_are_noticed(past: History, steps: int, what: str) -> None:
    assert f"a: {what} is in the weights" in faults(with_steps(past, "in/a/s/00000002.safetensors", steps))


def test_a_node_whose_last_steps_are_missing_is_noticed(past: History) -> None:
    found = "\n".join(history.faults(past, NODES, WHOLE._replace(step=21)))
    assert "b: the deltas end at (20, 2000, 2000), and not at (21, 2000, 2000)" in found
    assert "the marks of a end at (20, 2000, 2000), and not at (21, 2000, 2000)" in found


def test_weights_that_do_not_follow_from_the_deltas_are_noticed(past: History) -> None:
    moved = {name: tensor + 1e-3 for name, tensor in past.last.items()}
    assert history.distance(past._replace(last=moved), nodes=2) == pytest.approx(1e-3, rel=1e-3)
    one_is_missing = with_version(past, 3, applied=())
    assert history.distance(one_is_missing, nodes=2) > 0.1
