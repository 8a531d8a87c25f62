"""The protocol with one of its rules left out, to see that the explorer notices."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from speedtronic.distributed import master, node, protocol
from speedtronic.distributed.earlier_sessions import EarlierSessions
from speedtronic.distributed.ledger import START
from speedtronic.distributed.master import Master
from speedtronic.distributed.node import Node
from speedtronic.distributed.protocol import Manifest, Mark, head_name
from speedtronic.distributed.requests import Delete, Get, List, Procedure, Put
from tests.distributed.explorer.explore import Exploration
from tests.distributed.explorer.machines import NodeMachine


@dataclass(frozen=True, slots=True)
class Mutant:
    """What is left out, and by which words it is noticed (a regular expression)."""

    change: Callable[[pytest.MonkeyPatch], None]
    noticed_as: str


def _marks_outside(patch: pytest.MonkeyPatch) -> None:
    """Marks in an object of their own, written after the manifest."""
    to_bytes, read, commit = Manifest.to_bytes, protocol.read_manifest, master.commit

    def without_marks(self: Manifest) -> bytes:
        return to_bytes(self.model_copy(update={"marks": {}}))

    def read_both(version: int) -> Procedure[Manifest | None]:
        manifest = yield from read(version)
        for number in range(version, -1, -1) if manifest is not None else ():
            data = yield from Get(f"marks/{number:08d}.json", limit=1 << 20)
            if data is not None:
                marks = {lineage: Mark.model_validate(mark) for lineage, mark in json.loads(data).items()}
                return manifest.model_copy(update={"marks": marks})
        return manifest

    def commit_both(manifest: Manifest) -> Procedure[bool]:
        won = yield from commit(manifest)
        marks = {lineage: mark.model_dump() for lineage, mark in manifest.marks.items()}
        yield from Put(f"marks/{manifest.version:08d}.json", json.dumps(marks).encode())
        return won

    patch.setattr(Manifest, "to_bytes", without_marks)
    for module in (protocol, master, node):
        patch.setattr(module, "read_manifest", read_both)
    patch.setattr(master, "commit", commit_both)
    _prepare(patch, _look_at_consequences)


def _overwritable_head(patch: pytest.MonkeyPatch) -> None:
    """A store that lets the second create through."""
    _prepare(patch, lambda exploration: setattr(exploration.stage.bucket, "overwrites", ("head/",)))


def _no_reread(patch: pytest.MonkeyPatch) -> None:
    """A master that takes the version that it sent for the one that stands."""

    def commit(manifest: Manifest) -> Procedure[bool]:
        yield from Put(head_name(manifest.version), manifest.to_bytes())
        return True

    patch.setattr(master, "commit", commit)


def _no_session(patch: pytest.MonkeyPatch) -> None:
    """Deltas that are numbered from 1 again after a restart, under the same name."""
    patch.setattr(NodeMachine, "new_session", lambda self: "s")


def _delete_before_commit(patch: pytest.MonkeyPatch) -> None:
    publish = Master._publish

    def delete_and_publish(self: Master, gathering: Any) -> Procedure[Manifest | None]:
        for delta in gathering.applied:
            yield from Delete(delta.name)
        return (yield from publish(self, gathering))

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


def _look_at_consequences(exploration: Exploration) -> None:
    exploration.truth.marks_in_heads = exploration.truth.forbids = False


def _prepare(patch: pytest.MonkeyPatch, prepare: Callable[[Exploration], None]) -> None:
    """Do something to each exploration before it runs."""
    run = Exploration.run

    def prepared(self: Exploration) -> None:
        prepare(self)
        run(self)

    patch.setattr(Exploration, "run", prepared)


MUTANTS = {
    # The eight of diloco.md.
    "mark-outside-the-manifest": Mutant(_marks_outside, "processed again|differs from the head|off by"),
    "overwritable-head": Mutant(_overwritable_head, r"head/\d+.json was created when the chain had"),
    "no-nonce-re-read": Mutant(_no_reread, "does not follow the|a recent head needs it|before a head had it"),
    "no-session-id": Mutant(_no_session, "was committed a second time"),
    "delete-before-commit": Mutant(_delete_before_commit, "does not become quiet: .*in/|missing, although"),
    "manifests-pruned": Mutant(_manifests_pruned, r"at version \d+ of|when the chain had"),
    "base-moved-on-acknowledgement": Mutant(_base_moved_on_acknowledgement, "off by|sent 2 times|moves a slot"),
    "ledger-ignored": Mutant(_ledger_ignored, "sent 2 times|off by"),
    # And some more.
    "momentum-forgotten": Mutant(_momentum_forgotten, "the (weights|momentum) of version"),
    "no-look-back": Mutant(_no_look_back, "sent 2 times|off by"),
    "pending-forgotten": Mutant(_pending_forgotten, "off by|moves a slot"),
}
