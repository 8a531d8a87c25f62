"""The protocol with one of its rules left out, to see that the explorer notices."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from speedtronic.distributed import marks, master, node, protocol
from speedtronic.distributed.earlier_sessions import EarlierSessions
from speedtronic.distributed.ledger import START
from speedtronic.distributed.master import Master
from speedtronic.distributed.node import Node
from speedtronic.distributed.protocol import Manifest, head_name
from speedtronic.distributed.records import NodeMark, SessionMark
from speedtronic.distributed.requests import Delete, Get, List, Procedure, Put
from tests.distributed.explorer.explore import Exploration


@dataclass(frozen=True, slots=True)
class Mutant:
    """A protocol that lacks a rule.

    Attributes:
        change: leaves the rule out.
        noticed_as: by which words it is noticed, a regular expression.
        focus: decisions of schedules that reach what the rule guards against; see `Plan.directed`.
    """

    change: Callable[[pytest.MonkeyPatch], None]
    noticed_as: str
    focus: Mapping[str, Any] = field(default_factory=dict)


def _marks_outside(patch: pytest.MonkeyPatch) -> None:
    """Marks in an object of their own, written after the manifest."""
    to_bytes, look, create = Manifest.to_bytes, protocol._look_for, protocol.create_manifest

    def without_marks(self: Manifest) -> bytes:
        return to_bytes(self.model_copy(update={"nodes": {}}))

    def look_for_both(version: int, *arguments: Any, **options: Any) -> Procedure[tuple[Manifest | None, int]]:
        manifest, copy = yield from look(version, *arguments, **options)
        for number in range(version, -1, -1) if manifest is not None else ():
            data = yield from Get(f"marks/{number:08d}.json", limit=1 << 20)
            if data is not None:
                nodes = {name: NodeMark.model_validate_json(json.dumps(one)) for name, one in json.loads(data).items()}
                return manifest.model_copy(update={"nodes": nodes}), copy
        return manifest, copy

    def create_both(manifest: Manifest, parent: Manifest | None) -> Procedure[bool]:
        won = yield from create(manifest, parent)
        nodes = {name: mark.model_dump(mode="json") for name, mark in manifest.nodes.items()}
        yield from Put(f"marks/{manifest.version:08d}.json", json.dumps(nodes).encode())
        return won

    patch.setattr(Manifest, "to_bytes", without_marks)
    patch.setattr(protocol, "_look_for", look_for_both)
    patch.setattr(master, "create_manifest", create_both)
    _prepare(patch, _look_at_consequences)


def _overwritable_head(patch: pytest.MonkeyPatch) -> None:
    """A store that lets the second create through."""
    _prepare(patch, lambda exploration: setattr(exploration.stage.bucket, "overwrites", ("head/",)))


def _no_reread(patch: pytest.MonkeyPatch) -> None:
    """A master that takes the version that it sent for the one that stands."""

    def create(manifest: Manifest, parent: Manifest | None) -> Procedure[bool]:
        yield from Put(head_name(manifest.version), manifest.to_bytes())
        return True

    patch.setattr(master, "create_manifest", create)


def _no_session(patch: pytest.MonkeyPatch) -> None:
    """Deltas that are numbered from 1 again after a restart, under the same name."""
    patch.setattr(node, "session_name", lambda number, nonce: "00000001-00000000")


def _delete_before_commit(patch: pytest.MonkeyPatch) -> None:
    publish = Master._publish

    def delete_and_publish(self: Master, round_: Any, **arguments: Any) -> Procedure[Manifest | None]:
        for delta in round_.applied:
            yield from Delete(delta.name)
        return (yield from publish(self, round_, **arguments))

    patch.setattr(Master, "_publish", delete_and_publish)
    _prepare(patch, _look_at_consequences)


def _manifests_pruned(patch: pytest.MonkeyPatch) -> None:
    """Manifests that go with the weights that they name; all but the first, by which nodes know the store."""
    prune = master.prune

    def prune_all(head: Manifest, kept: set[str]) -> Procedure[None]:
        yield from prune(head, kept)
        for entry in (yield from List("head/")).entries:
            if head_name(0) < entry.name < head_name(head.version):
                yield from Delete(entry.name)

    patch.setattr(master, "prune", prune_all)
    _prepare(patch, _look_at_consequences)


def _base_moved_on_acknowledgement(patch: pytest.MonkeyPatch) -> None:
    acknowledge = Node._acknowledge
    postponed: dict[Node, Any] = {}

    def later(self: Node, snapshot: Any, pending: Any) -> None:
        self._pending = (*self._pending, pending)
        postponed[self] = snapshot

    def now(self: Node, spooled: Any) -> None:
        snapshot = postponed.pop(self, None)
        if snapshot is not None:
            self._set_base(snapshot.values, own=snapshot.values)
            self._began = self._covered = snapshot.position
            self._last = spooled.id
        acknowledge(self, spooled)

    patch.setattr(Node, "_move_base", later)
    patch.setattr(Node, "_acknowledge", now)


def _ledger_ignored(patch: pytest.MonkeyPatch) -> None:
    """A restart from a checkpoint that is older than the spool, without a look at what was sent since."""
    patch.setattr(node, "is_ahead", lambda known, covered: False)


def _momentum_forgotten(patch: pytest.MonkeyPatch) -> None:
    """A master that starts over with the momentum when it takes over."""
    read_version = Master._read_version

    def weights_only(self: Master, head: Manifest) -> Procedure[bool]:
        whole = yield from read_version(self, head)
        self.outer = self._new_outer(self._trained_weights())
        return whole

    patch.setattr(Master, "_read_version", weights_only)


def _no_look_back(patch: pytest.MonkeyPatch) -> None:
    """A node on a new disk that does not ask the store what its earlier sessions have sent."""

    def nothing(*arguments: Any) -> Procedure[EarlierSessions]:
        yield from ()
        return EarlierSessions(START, frozenset(), {})

    patch.setattr(node, "look_back", nothing)


def _pending_forgotten(patch: pytest.MonkeyPatch) -> None:
    """A node that takes an uploaded delta for one that every version has."""
    acknowledge = Node._acknowledge

    def forget(self: Node, *arguments: Any) -> None:
        self._pending = ()
        acknowledge(self, *arguments)

    patch.setattr(Node, "_acknowledge", forget)


# --- Rules of protocol 2


def _no_look_after_a_put(patch: pytest.MonkeyPatch) -> None:
    """What a put was answered counts, whether it is still the store or not."""

    def put_own(name: str, data: Any, store: str | None) -> Procedure[str]:
        return (yield from protocol.put_own(name, data, None))

    patch.setattr(node, "put_own", put_own)


def _no_look_at_the_head_before(patch: pytest.MonkeyPatch) -> None:
    """A version is created where the one before it may be missing."""

    def nothing(manifest: Manifest, parent: Manifest | None) -> Procedure[None]:
        yield from ()

    patch.setattr(protocol, "_check_standing", nothing)


def _junk_counts_as_absent(patch: pytest.MonkeyPatch) -> None:
    """What lies in the place of a version and is none is not stepped over."""
    look = protocol._look_for

    def look_once(version: int, *arguments: Any, **options: Any) -> Procedure[tuple[Manifest | None, int]]:
        manifest, copy = yield from look(version, *arguments, **options)
        return (manifest, copy) if copy == 0 else (None, 0)

    patch.setattr(protocol, "_look_for", look_once)


def _no_look_beside_a_free_name(patch: pytest.MonkeyPatch) -> None:
    """A name that is free means that there is no such version, although junk may have been removed from it."""
    look = protocol._look_for

    def look_at_names(version: int, *arguments: Any, **options: Any) -> Procedure[tuple[Manifest | None, int]]:
        return (yield from look(version, *arguments, **options | {"beside": False}))

    patch.setattr(protocol, "_look_for", look_at_names)


def _closed_session_opens_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(NodeMark, "has_closed", lambda self, session: False)


def _folded_too_early(patch: pytest.MonkeyPatch) -> None:
    """A session is closed as soon as the next one is there, whatever is still on its way."""
    folded = marks._folded

    def close_all(mark: NodeMark, sessions: dict[str, SessionMark], most: int) -> NodeMark:
        done = {
            name: one if one.last is None else one.model_copy(update={"last": one.seq})
            for name, one in sessions.items()
        }
        return folded(mark, done, most)

    patch.setattr(marks, "_folded", close_all)


def _anybody_moves_a_node(patch: pytest.MonkeyPatch) -> None:
    """A node believes what the store says of its position, although its disk knows all that it sent."""
    begin = Node.begin

    def begin_without_knowledge(self: Node, state: Any) -> Procedure[None]:
        yield from begin(self, state)
        self._knows_all = False

    patch.setattr(Node, "begin", begin_without_knowledge)


def _refusals_make_a_quorum(patch: pytest.MonkeyPatch) -> None:
    is_enough = Master._is_enough

    def count_all(self: Master, seen: Any, head: Manifest) -> bool:
        return is_enough(self, {delta.node: since for delta, since in self._seen.items()} | dict(seen), head)

    patch.setattr(Master, "_is_enough", count_all)


def _no_horizon(patch: pytest.MonkeyPatch) -> None:
    """Of a node that was forgotten, sessions open as if it were new."""
    obstacle = marks.Marks.obstacle

    def forget_horizon(self: marks.Marks, header: Any) -> str | None:
        self._head = self._head.model_copy(update={"horizon": 0})
        return obstacle(self, header)

    patch.setattr(marks.Marks, "obstacle", forget_horizon)


def _residual_outside_the_commit(patch: pytest.MonkeyPatch) -> None:
    """What a codec owes is in memory and in checkpoints alone."""

    def forget(self: Node, owed: str) -> Procedure[None]:
        yield from ()

    patch.setattr(Node, "_restore_residual", forget)


def _base_kept_after_a_refusal(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Node, "_refuse", lambda self, id, reason, forget=False: None)


def _sends_what_is_not_finite(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(node, "can_be_added", lambda tensor: True)


def _hint_is_believed_for_ever(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(master, "HINTED_VERSIONS", 10**9)


def _nodes_that_came_once_are_expected(patch: pytest.MonkeyPatch) -> None:
    """Who took part counts for five rounds, however many versions these are."""
    patch.setattr(master, "taking_part", lambda head: set(marks.recent_marks(head)))


def _look_at_consequences(exploration: Exploration) -> None:
    exploration.truth.marks_in_heads = exploration.truth.forbids = False


def _prepare(patch: pytest.MonkeyPatch, prepare: Callable[[Exploration], None]) -> None:
    """Do something to each exploration before it runs."""
    run = Exploration.run

    def prepared(self: Exploration) -> None:
        prepare(self)
        run(self)

    patch.setattr(Exploration, "run", prepared)


# Decisions of schedules that reach a fault soon.
_CROWDED = {"quorum": 1, "expected_nodes": None, "grace": 5.0, "new_disks": False, "strangers": ()}
_LONG = {"ticks": 800, "inner_steps": 1, "units_each": 20, "forgets": False}
_NEW_DISKS = {"crash": 0.03, "ticks": 400, "new_disks": True, "torn": 0.0, "strangers": ()}
_LATE = {"doubled": 0.3, "arrival": 0.0}  # everything late comes last

MUTANTS = {
    # The eight of diloco.md.
    "mark-outside-the-manifest": Mutant(_marks_outside, "processed again|differs from the head|off by"),
    "overwritable-head": Mutant(_overwritable_head, r"head/\d+.json was created when the chain had"),
    "no-nonce-re-read": Mutant(_no_reread, "does not follow the|a recent head needs it|before a head had it"),
    "no-session-id": Mutant(_no_session, "was committed a second time", _NEW_DISKS),
    "delete-before-commit": Mutant(_delete_before_commit, "does not become quiet: .*in/|missing, although"),
    "manifests-pruned": Mutant(
        _manifests_pruned, r"at version \d+ of|when the chain had|weights or momentum of version \d+"
    ),
    "base-moved-on-acknowledgement": Mutant(
        _base_moved_on_acknowledgement, "off by|sent 2 times|moves a slot", _LONG | {"disk": 0.0, "crash": 0.02}
    ),
    "ledger-ignored": Mutant(_ledger_ignored, "sent 2 times|off by"),
    # And some more.
    "momentum-forgotten": Mutant(_momentum_forgotten, "the (weights|momentum) of version"),
    "no-look-back": Mutant(
        _no_look_back, "sent 2 times|off by", _LONG | {"new_disks": True, "crash": 0.03, "checkpoint_share": 0.0}
    ),
    "pending-forgotten": Mutant(_pending_forgotten, "off by|moves a slot"),
    # Protocol 2.
    "no-look-after-a-put": Mutant(
        _no_look_after_a_put, r"does not become quiet: .*in/|missing, although", {"vanish_at": "^in/"}
    ),
    "no-look-at-the-head-before": Mutant(
        _no_look_at_the_head_before,
        "deleted before a head|when the chain had|not become quiet",
        _CROWDED | _LONG | {"vanish_at": "^head/", "vanish": 0.0},
    ),
    "junk-counts-as-absent": Mutant(_junk_counts_as_absent, "does not become quiet|nobody published"),
    "no-look-beside-a-free-name": Mutant(
        _no_look_beside_a_free_name,
        "when the chain had|not become quiet|is gone",
        {"strangers": ("stray head",), "stranger_share": 0.1, "crash": 0.03},
    ),
    "closed-session-opens-again": Mutant(
        _closed_session_opens_again,
        "was closed, and is open again",
        _CROWDED | _LONG | _LATE | {"crash": 0.02, "nodes": 1, "masters": 1, "max_staleness": None},
    ),
    "folded-too-early": Mutant(
        _folded_too_early, "was closed before", _CROWDED | {"hidden": r"/00000001-\w+/", "crash": 0.02, "ticks": 800}
    ),
    "anybody-moves-a-node": Mutant(
        _anybody_moves_a_node,
        "where it never was|sent 2 times|is in no delta",
        {"new_disks": False, "strangers": ("forged",), "stranger_share": 0.05, "crash": 0.03},
    ),
    "no-horizon": Mutant(_no_horizon, "processed again|the horizon is", _CROWDED | _LATE | {"forgets": True}),
    "refusals-make-a-quorum": Mutant(
        _refusals_make_a_quorum,
        "without a quorum",
        {"strangers": ("junk",), "stranger_share": 0.05, "nodes": 2, "grace": 1e6, "quorum": 2, "expected_nodes": None},
    ),
    "residual-outside-the-commit": Mutant(
        _residual_outside_the_commit, "is owed", _LONG | {"codec": "bf16", "crash": 0.03, "new_disks": False}
    ),
    "base-kept-after-a-refusal": Mutant(
        _base_kept_after_a_refusal,
        "does not become quiet|differs from the head",
        _CROWDED | {"max_staleness": 0.2, "nodes": 3, "inner_steps": 1, "units_each": 14},
    ),
    "sends-what-is-not-finite": Mutant(_sends_what_is_not_finite, "not finite"),
    "hint-is-believed-for-ever": Mutant(
        _hint_is_believed_for_ever,
        "of a round, not",
        {"expected_nodes": 6, "quorum": 1, "even": True, "inner_steps": 1, "units_each": 14},
    ),
    "nodes-that-came-once-are-expected": Mutant(
        _nodes_that_came_once_are_expected,
        "of a round, not",
        _CROWDED | _LONG | {"even": True, "units_each": 40, "nodes": 3, "masters": 1, "turns": 1, "ticks": 1500},
    ),
}
