"""The audit finds nothing wrong with what a real master made, to the last bit, and whatever is put wrong there."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors.torch import load, save
from torch import nn

from speedtronic.distributed.master import MasterSettings
from speedtronic.distributed.protocol import DeltaId
from speedtronic.distributed.records import session_name
from speedtronic.distributed.requests import perform
from speedtronic.distributed.schema import Schema, snapshot
from speedtronic.distributed.stores.memory import MemoryStore
from tests.distributed.explorer.explore import Exploration, Plan
from tests.distributed.explorer.truth import LATEST, MEAN
from tests.support.masters import names, new_master, packed_delta
from tests.torture_diloco.audit import Audit, Position, Rules

NODES = ("a", "b")
WHOLE = Position(20, 2000, 2000)
SESSION = session_name(1, "00000000")
LAST = "head/00000003.json"

Change = Callable[[dict[str, Any]], None]


@pytest.fixture
def past() -> dict[str, bytes]:
    """Of two nodes that trained 20 steps each, one of them late, and a real master."""
    model = nn.Linear(2, 1, bias=False)
    schema = Schema.of(model)
    store, past = MemoryStore(), dict[str, bytes]()
    master = new_master(MasterSettings(expected_nodes=2), schema=schema, initial=snapshot(model))

    def send(node: str, seq: int, base: int, value: float) -> None:
        delta = DeltaId(node, SESSION, seq)
        trained = {"weight": torch.full((1, 2), value)}
        assert store.put_if_absent(delta.name, packed_delta(delta, trained, schema=schema, base_version=base))

    def keep() -> None:
        past.update({name: store.get(name, limit=1 << 20) or b"" for name in [*names(store), "store.json"]})

    perform(master.poll(), store)
    for node, value in zip(NODES, (0.5, -0.25), strict=True):
        send(node, 1, 0, value)
    keep()
    assert perform(master.poll(), store) == 2
    for node, value in zip(NODES, (0.125, 1.0), strict=True):
        send(node, 2, 1, value)
        keep()
        assert perform(master.poll(), store) == 1
    keep()
    return past


def faults(past: dict[str, bytes], whole: Position = WHOLE) -> str:
    return "\n".join(Audit(Rules(expected=2), past).run(dict.fromkeys(NODES, whole)).faults)


def with_last(past: dict[str, bytes], change: Change) -> dict[str, bytes]:
    """A history whose last manifest says something else."""
    manifest = json.loads(past[LAST])
    change(manifest)
    return past | {LAST: json.dumps(manifest, sort_keys=True, separators=(",", ":")).encode()}


def with_header(past: dict[str, bytes], name: str, **changes: object) -> dict[str, bytes]:
    """A history in which a delta says something else of itself."""
    size = int.from_bytes(past[name][:8], "little")
    head = json.loads(past[name][8 : 8 + size])
    header = json.loads(head["__metadata__"]["speedtronic_delta"]) | changes
    head["__metadata__"]["speedtronic_delta"] = json.dumps(header)
    text = json.dumps(head).encode()
    text += b" " * (-len(text) % 8)
    return past | {name: len(text).to_bytes(8, "little") + text + past[name][8 + size :]}


def test_a_true_history_has_no_faults(past: dict[str, bytes]) -> None:
    audit = Audit(Rules(expected=2), past).run(dict.fromkeys(NODES, WHOLE))
    assert audit.faults == []
    assert (audit.versions, len(audit.deltas)) == (3, 4)
    fractions = [head["fraction"] for head in audit.heads[1:]]
    assert fractions[:2] == [1.0, 0.5]
    assert fractions[2] == pytest.approx(0.5 * 1.5**-0.5)  # a delta that is half a round old


@pytest.mark.parametrize("outer", ["nesterov", "sgd", "delayed_nesterov"])
def test_histories_of_the_explorer_have_no_faults(outer: str) -> None:
    """Late deltas, other codecs, buffers, nodes of unequal speed, crashes: still not a bit is off."""
    deltas = seed = 0
    while deltas < 20:
        seed += 1
        plan = Plan.of(seed)
        settings = plan.settings
        if plan.strangers or settings.outer != outer:
            continue
        exploration = Exploration(plan)
        exploration.run()
        copies = exploration.stage.bucket.history.items()
        objects = {name: next((copy.data for copy in all_ if copy.whole), b"") for name, all_ in copies}
        rules = Rules(
            outer,
            settings.lr,
            settings.momentum,
            settings.expected_nodes,
            settings.synchronous,
            average=frozenset({MEAN} if plan.buffers else ()),
            newest=frozenset({LATEST} if plan.buffers else ()),
            turns=plan.turns,
        )
        audit = Audit(rules, objects).recompute()
        assert audit.faults == [], seed
        deltas += len(audit.deltas)


def test_a_fork_is_noticed(past: dict[str, bytes]) -> None:
    forked = with_last(past, lambda manifest: manifest.update(parent="0" * 64))
    assert f"{LAST} is in no line of versions" in faults(forked)


def test_a_delta_that_enters_twice_is_noticed(past: dict[str, bytes]) -> None:
    again = with_last(past, lambda manifest: manifest["applied"].append(DeltaId("a", SESSION, 1).name))
    found = faults(again)
    assert f"in/a/{SESSION}/00000001.safetensors was dealt with 2 times" in found
    assert "version 3: weight in" in found


def test_a_delta_that_is_left_out_is_noticed(past: dict[str, bytes]) -> None:
    found = faults(with_last(past, lambda manifest: manifest.update(applied=[])))
    assert f"in/b/{SESSION}/00000002.safetensors was sent, and no version deals with it" in found
    assert "b: the deltas end at (10, 1000, 1000), and not at (20, 2000, 2000)" in found
    assert "version 3: the mark of b is" in found


def test_a_mark_that_moves_too_far_is_noticed(past: dict[str, bytes]) -> None:
    found = faults(with_last(past, lambda manifest: manifest["nodes"]["a"]["sessions"][SESSION].update(seq=3)))
    assert "version 3: the mark of a is" in found


def test_a_refused_delta_is_noticed(past: dict[str, bytes]) -> None:
    refused = [{"name": f"in/a/{SESSION}/00000009.safetensors", "reason": "stale"}]
    found = faults(with_last(past, lambda manifest: manifest.update(rejected=refused)))
    assert f"in/a/{SESSION}/00000009.safetensors was refused: stale" in found


@pytest.mark.parametrize(("steps", "what"), [(15, "twice"), (5, "not at all")])
def test_steps_in_two_deltas_and_steps_in_none_are_noticed(past: dict[str, bytes], steps: int, what: str) -> None:
    assert f"a: {what} is in the weights" in faults(with_header(past, DeltaId("a", SESSION, 2).name, steps=steps))


def test_a_node_whose_last_steps_are_missing_is_noticed(past: dict[str, bytes]) -> None:
    found = faults(past, WHOLE._replace(step=21))
    assert "b: the deltas end at (20, 2000, 2000), and not at (21, 2000, 2000)" in found


def test_one_bit_of_the_weights_is_noticed(past: dict[str, bytes]) -> None:
    path = json.loads(past[LAST])["weights"]["path"]
    weights = load(past[path])
    weights["weight"].view(torch.int32)[0, 0] ^= 1
    other = save(weights)
    blob = {"path": path, "size": len(other), "sha256": hashlib.sha256(other).hexdigest()}
    found = faults(with_last(past | {path: other}, lambda manifest: manifest.update(weights=blob)))
    assert f"version 3: weight in {path} is off by" in found


def test_a_fraction_that_is_a_little_off_is_noticed(past: dict[str, bytes]) -> None:
    found = faults(with_last(past, lambda manifest: manifest.update(fraction=manifest["fraction"] + 1e-9)))
    assert "version 3: f is" in found


def test_a_torn_delta_is_read_from_its_copy(past: dict[str, bytes]) -> None:
    name = DeltaId("a", SESSION, 2).name
    torn = past | {name: past[name][:100], name.replace(".safe", ".1.safe"): past[name]}
    assert faults(torn) == ""
    assert "which are not whole in the store" in faults(past | {name: past[name][:100]})
