"""A node: trains, sends pseudo-gradients, and installs new versions of the global weights.

The training thread counts steps, gives snapshots away and installs versions. Background threads run `begin`, `spool`,
`upload` and `poll`, which do all the work on disk, with the store and on whole models. State that both touch changes
under one lock, which is held for assignments only: whole models are computed outside it, and computed again if the
other side was faster.

In copies of the trained parameters, a node holds: its base; one per delta that no version of the store covers yet, at
most `MAX_PENDING` of them; a snapshot from a boundary to its commit, when it becomes the base; the base before, as
memory for the next snapshot, since a copy into fresh memory takes several times as long; a version (with buffers and
frozen weights) from its download to its installation; the residual of a lossy codec. While a delta is spooled its bytes
come on top; while one is uploaded they are read again from the disk. So without a master the peak is five copies, three
between two boundaries, and six in the last boundary of a run.

What a lossy codec still owes (the residual) is part of the commit of a delta. It has two files in turn, and is written
before the spool that names it: a crash between the two leaves the file that the spool or the ledger before names.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from speedtronic.distributed.codec import Codec
from speedtronic.distributed.delta import (
    DeltaHeader,
    Predecessor,
    can_be_added,
    compute_pseudo_gradient,
    pack_delta,
    spooled_header,
)
from speedtronic.distributed.earlier_sessions import look_back
from speedtronic.distributed.ledger import LEDGER, RESIDUALS, SPOOL, START, Ledger
from speedtronic.distributed.packed_tensors import TensorFormatError, pack_tensors, unpack_blob, unpack_tensors
from speedtronic.distributed.protocol import (
    DeltaId,
    Manifest,
    check_identity,
    find_head,
    put_own,
    read_blob,
    read_manifest,
)
from speedtronic.distributed.records import NodeMark, Position, session_name, session_number
from speedtronic.distributed.requests import EventSink, Get, Procedure, ReadFile, RemoveFile, WriteFile
from speedtronic.distributed.schema import Schema, Tensors, TensorType
from speedtronic.errors import CheckpointError, StoreContentError, StoreError, StoreRefusedError

MAX_PENDING = 2
"""With so many deltas in no version yet, boundaries are skipped: memory and store stay bounded without a master."""

LOOKS_PER_CHECK = 8
"""So many looks that find nothing new, and one is thorough: the next version may lie beside a name that is free again,
and the mount may be away."""

REFUSED_IF_GONE, REFUSED_AT_ANY_RATE = 1.0, 3.0
"""Rounds after which a delta that is uploaded, and in no version, was refused: if it is gone; if it still stands."""

PATIENCE = 60.0  # seconds that `state_dict` waits for a delta to be written to disk


class Install(NamedTuple):
    """A version to move the model to, with `schema.rebase_`, between two steps.

    Attributes:
        new_base: for every name of the schema. The trained parameters, without this node's deltas that the version does
            not cover yet; everything else as in the version. `rebase_` may replace entries.
        base: of the trained parameters, what the model's progress is measured from now.
        adopt: whether local progress is dropped.
        manifest: of the version.
        ahead: where the training data must continue, because the store has this node's work up to there.
        resets_optimizer: whether the state of the optimizer must go too: the weights were not finite.
    """

    new_base: Tensors
    base: Tensors
    adopt: bool
    manifest: Manifest
    ahead: Position | None
    resets_optimizer: bool = False


class _Snapshot(NamedTuple):
    """What a boundary gave away: values, and from where to where they were trained."""

    values: Tensors
    began: Position
    position: Position
    seconds: float


class _Pending(NamedTuple):
    """A committed delta that is in no version yet, as the master decodes it; `trained` is the work that it holds.

    A tensor of `delta` may be decoded each time that it is asked for: only the encoded one takes memory then.
    """

    id: DeltaId
    trained: Position
    delta: Mapping[str, Tensor]


class _Spooled(NamedTuple):
    """The delta on disk that is not uploaded yet; its size in bytes, and the checksum of the residual after it."""

    id: DeltaId
    position: Position
    size: int
    residual: str | None


class _FirstLook(NamedTuple):
    """Where a node stands in the history of a store, as its first look found out.

    Attributes:
        origin: the SHA-256 of the store's version 0.
        store: its identity; None if it has none.
        other_store: whether what this node remembers is of another store.
        ahead: the position that is handed over, if that is beyond what this node's checkpoint remembers.
        lost: pending deltas that exist nowhere any more.
        adopted: by session that the disk does not know and the node takes for its own, the greatest number that it may
            have reached.
        committed: the last delta of this node.
        owes: whether the residual is the one after that delta.
    """

    origin: str
    store: str | None
    other_store: bool
    ahead: Position | None
    lost: frozenset[DeltaId]
    adopted: Mapping[str, int]
    committed: DeltaId | None
    owes: bool

    @property
    def starts_over(self) -> bool:
        return self.other_store or self.ahead is not None


@dataclass(frozen=True)
class _Prepared:
    """A version that is ready to be installed.

    Attributes:
        is_base: whether its trained parameters equal the node's base.
    """

    manifest: Manifest
    new_base: Tensors
    is_base: bool


def is_ahead(known: Position, covered: Position) -> bool:
    """Whether more work is known to be sent than a checkpoint (or a new node) has covered."""
    return known.step > covered.step


class Node:
    """The protocol's side of a training process.

    Args:
        schema: of the model.
        node: this node's name in the store, one path component.
        nonce: eight hexadecimal digits for the names of this process's sessions, never used before.
        codec: how deltas are encoded.
        inner_steps: optimizer steps from boundary to boundary.
        initial: float32 CPU values of the trained parameters (others are ignored), as training starts or continues.
        say: receives events, and log messages as `log` with `level` and `message`.
        now: the time, UTC, ISO 8601.
    """

    def __init__(
        self,
        schema: Schema,
        *,
        node: str,
        nonce: str,
        codec: Codec,
        inner_steps: int,
        initial: Tensors,
        say: EventSink,
        now: Callable[[], str],
    ) -> None:
        self.node = node
        self.session: str | None = None  # its number is known after the first look
        self.recoveries = 0  # how often local progress was dropped because it was refused, or not finite
        self._nonce = nonce
        self._schema = schema
        self._codec = codec
        self._inner_steps = inner_steps
        self._say = say
        self._now = now
        self._trained = schema.names("trained")
        self._buffers = schema.names("average", "newest")
        self._lock = threading.Condition()

        # Used by the training thread alone.
        self._step: int | None = None
        self._samples = 0
        self._tokens: int | Tensor = 0
        self._boundary = 0
        self._skipped = 0  # boundaries without a version to send a delta for

        # Guarded by the lock.
        self._base = {name: initial[name] for name in self._trained}
        self._own_base: Tensors | None = None  # all exchanged values of the base, if nobody else has them
        self._spare: Tensors | None = None
        self._began = START  # where the unsent progress begins
        self._covered = START  # what all committed deltas cover
        self._last: DeltaId | None = None
        self._version: int | None = None
        self._rounds = 0.0
        self._fresh = True
        self._pending: tuple[_Pending, ...] = ()
        self._snapshot: _Snapshot | None = None
        self._prepared: _Prepared | None = None
        self._spooled: _Spooled | None = None
        self._looked = False
        self._drops_local = False
        self._resets_optimizer = False
        self._ahead: Position | None = None
        self._committed: DeltaId | None = None  # the last delta, of any session
        self._predecessor: DeltaId | None = None  # the last delta of the session before that one's

        # Used by background threads: set by `begin`, then each by one thread.
        self._known = START  # what the disk says was sent
        self._known_id: DeltaId | None = None
        self._has_ledger = False
        self._knows_all = False  # whether the disk is whole
        self._origin: str | None = None
        self._store: str | None = None
        self._sessions: tuple[str, ...] = ()
        self._residual: Tensors | None = None
        self._residual_id: str | None = None
        self._residual_slot = 0
        self._stored: DeltaId | None = None
        self._seen: Manifest | None = None
        self._idle_looks = 0
        self._last_seq: Mapping[str, int] = {}
        self._refusals = 0
        self._uploaded: dict[DeltaId, float] = {}  # `rounds` of the first version that was seen after the upload
        self._unreadable: int | None = None
        self._logged: set[str] = set()

    # ------------------------------------------------------------------ the training thread

    @property
    def exchanged(self) -> tuple[str, ...]:
        """The names that `give_snapshot` wants values of."""
        return self._trained + self._buffers

    @property
    def local_step(self) -> int:
        """The optimizer steps of this node's run."""
        return self._step or 0

    @property
    def version(self) -> int | None:
        """The version that the model is on; None before the first."""
        return self._version

    @property
    def store(self) -> str | None:
        """The identity of the store, if it is known."""
        return self._store

    @property
    def wants_version(self) -> bool:
        """Whether local progress is to be dropped, and no version to adopt is there yet."""
        return self._drops_local and self._prepared is None

    @property
    def unsent_steps(self) -> int:
        """Steps that are in the model and in no delta."""
        return self.local_step - self._began.step if self._step is not None else 0

    @property
    def has_snapshot(self) -> bool:
        """Whether a snapshot waits for `spool`."""
        return self._snapshot is not None

    @property
    def has_spooled(self) -> bool:
        """Whether a delta waits for `upload`."""
        return self._spooled is not None

    def count(self, samples: int, tokens: int | Tensor) -> None:
        """Add what a step trained on. A tensor of one number stays on its device until a boundary."""
        self._samples += samples
        self._tokens = self._tokens + tokens

    def stepped(self, step: int) -> None:
        """Note that a global step is done; after its `count`."""
        # A run may start at any step: progress is counted from the one before the first.
        if self._step is None:
            self._began = self._began._replace(step=step - 1)
            self._boundary = step - 1
        self._step = step

    def wants_boundary(self) -> bool:
        return self.local_step - self._boundary >= self._inner_steps

    def start_boundary(self, *, last: bool = False) -> Literal["queued", "full", "waiting", "idle"]:
        """Decide what happens at a boundary; only `queued` asks for a call of `give_snapshot`.

        Otherwise everything stays as it is, and the next delta is cumulative: the spool is full, or the store has not
        been read yet, or (`idle`) there is nothing to send. A node that is about to adopt a version sends nothing.

        Args:
            last: whether no step follows. Then there is no next delta, so this one is sent even if many are pending.
        """
        self._boundary = self.local_step
        if self.unsent_steps <= 0:
            return "idle"
        if self._drops_local:
            return "waiting"
        if self._version is None or not self._looked:
            # Logged at the first skipped boundary, the second, the fourth, the eighth, …
            self._skipped += 1
            if self._skipped & (self._skipped - 1) == 0:
                self._log(
                    "INFO",
                    f"step {self.local_step}: trains alone until a version of the master can be read from the store",
                )
            return "waiting"
        if self._snapshot is not None:
            reason = "the delta before is still being written to disk"
        elif self._spooled is not None:
            reason = f"delta {self._spooled.id.seq} is not uploaded yet"
        elif len(self._pending) >= MAX_PENDING and not last:
            reason = f"{len(self._pending)} deltas wait for the master to process them"
        else:
            return "queued"
        self._say("delta_upload_skipped", {"step": self.local_step, "reason": reason})
        return "full"

    def give_snapshot(self, values: Tensors, seconds: float) -> None:
        """Give away a snapshot. Nothing is installed until `spool` has committed it.

        Args:
            values: CPU values of the names in `exchanged`, in the schema's dtypes. They belong to the node from now on.
            seconds: the training time since the last boundary that was queued.
        """
        snapshot = _Snapshot(values, self._began, self._position(), seconds)
        with self._lock:
            self._snapshot = snapshot

    def spare(self) -> Tensors | None:
        """Memory for the next snapshot, if there is some: values of `exchanged` that nobody needs any more."""
        with self._lock:
            spare, self._spare = self._spare, None
        return spare

    def installable(self) -> Install | None:
        """A version to install now. Call `installed` after it was put into the model, before any other method here."""
        with self._lock:
            prepared = self._prepared
            if prepared is None or self._snapshot is not None:
                return None
            # A new node joins where the others are: its own start is dropped, unless it is the version's.
            adopt = self._drops_local or (self._fresh and not prepared.is_base)
            resets = adopt and self._resets_optimizer
            return Install(dict(prepared.new_base), self._base, adopt, prepared.manifest, self._ahead, resets)

    def installed(self, install: Install) -> None:
        """Note that the model is on a version."""
        manifest = install.manifest
        staleness = manifest.rounds - self._rounds if self._version is not None else 0.0
        dropped = self.unsent_steps if install.adopt else 0
        with self._lock:
            self._set_base(install.new_base, own=None)
            self._version, self._rounds, self._fresh = manifest.version, manifest.rounds, False
            if install.adopt:
                self._began = self._position()
            if install.ahead is not None:  # the data continues there: see `continue_at`
                self._covered, self._last = install.ahead, None
            self._drops_local, self._resets_optimizer, self._ahead = False, False, None
            # A still newer version may have been prepared meanwhile: it stays.
            if self._prepared is not None and self._prepared.manifest is manifest:
                self._prepared = None
            pending = len(self._pending)
        self._skipped = 0
        if dropped:
            self._log(
                "INFO", f"version {manifest.version} is adopted; {dropped} local steps made before it are dropped"
            )
        self._say(
            "global_installed",
            {"step": self.local_step, "version": manifest.version, "staleness": staleness, "pending": pending},
        )

    def continue_at(self) -> Position | None:
        """Where the trainer must continue, because everything before is sent already; None most of the time.

        The node counts from there as soon as it has answered.
        """
        with self._lock:
            goal = self._covered
            if goal.step <= self.local_step:
                return None
            # What is unsent stays unsent: it moves along with the position.
            self._began = goal.since(self._position().since(self._began))
            self._step, self._samples, self._tokens = goal
            # The next boundary is a full round away.
            self._boundary = goal.step
        self._log("INFO", f"the work of this node up to step {goal.step} is sent already; it continues from there")
        return goal

    def state_dict(self, patience: float = PATIENCE) -> dict[str, Any]:
        """What a checkpoint must hold, together with the model as it is. Tensors are the node's own and never change.

        A commit in progress is waited for, so that the checkpoint is not older than the spool. If it takes longer than
        `patience`, in seconds, it is left out: after a crash right then, steps since its boundary would be lost.
        """
        position = self._position()
        with self._lock:
            self._lock.wait_for(lambda: self._snapshot is None, patience)
            self._own_base = None  # given away, so its memory must not be used again
            waiting = self._snapshot or self._spooled
            return {
                "node": self.node,
                "session": self.session,
                "origin": self._origin,
                "store": self._store,
                "version": self._version,
                "rounds": self._rounds,
                "fresh": self._fresh,
                "covered": self._covered._asdict(),
                "position": position._asdict(),
                "began": self._began._asdict(),
                "boundary": self._boundary,
                "base": dict(self._base),
                "last": None if self._last is None else {"session": self._last.session, "seq": self._last.seq},
                "pending": [
                    {
                        "session": pending.id.session,
                        "seq": pending.id.seq,
                        "trained": pending.trained._asdict(),
                        "tensors": dict(pending.delta),
                    }
                    for pending in self._pending
                ],
                "residual": None if self._residual is None else dict(self._residual),
                "pending_upload": None if waiting is None else {"step": waiting.position.step},
            }

    def _position(self) -> Position:
        return Position(self.local_step, self._samples, int(self._tokens))

    # ------------------------------------------------------------------ starting

    def begin(self, state: Mapping[str, Any] | None) -> Procedure[None]:
        """Restore what a checkpoint and this node's disk know. Reads local files only.

        Args:
            state: of `state_dict`, if the model was restored from the same checkpoint.

        Raises:
            CheckpointError: the state is not of this model.
            OSError: the disk cannot be read.
        """
        # What the disk knows: the ledger of what was sent, and the delta in the spool, which is further.
        data = yield from ReadFile(LEDGER)
        ledger = None if data is None else Ledger.from_bytes(data)
        damaged = data is not None and ledger is None
        if damaged:
            self._log("WARNING", "this node's ledger is damaged; the store is asked for what was sent instead")
        owed: str | None = None
        if ledger is not None:
            self._has_ledger = True
            self._known, self._known_id = ledger.position, ledger.last(self.node)
            self._origin, self._store, self._sessions = ledger.origin, ledger.store, ledger.sessions
            owed = ledger.residual
        data = yield from ReadFile(SPOOL)
        if data is not None:
            header = spooled_header(data)
            if header is None or header.node != self.node:
                damaged = True
                self._log("WARNING", "the delta in this node's spool is damaged; its work is not sent")
                yield from RemoveFile(SPOOL)
            else:
                self._spooled = _Spooled(header.id, header.position, len(data), header.residual)
                self._known, self._known_id = max(self._known, header.position), header.id
                self._sessions = tuple(dict.fromkeys((*self._sessions, header.session)))
                owed = header.residual
        del data
        self._knows_all = not damaged and (self._has_ledger or self._spooled is not None)
        self._committed = self._known_id
        if owed is not None:
            yield from self._restore_residual(owed)
        if state is not None:
            self._restore(state)

    def _restore_residual(self, owed: str) -> Procedure[None]:
        for slot, name in enumerate(RESIDUALS):
            data = yield from ReadFile(name)
            if data is not None and hashlib.sha256(data).hexdigest() == owed:
                try:
                    self._residual, _ = unpack_tensors(data, self._schema.types("trained"))
                except TensorFormatError:
                    continue  # of another model, as the checkpoint will be
                self._residual_id, self._residual_slot = owed, slot
                return
        self._log("WARNING", "what the codec still owed from earlier deltas is damaged on this node's disk: it is lost")

    def _restore(self, state: Mapping[str, Any]) -> None:
        """Restore a checkpoint as far as the disk allows it. What was sent once must not be trained or sent again."""
        self._step, self._samples, self._tokens = Position(**state["position"])
        self._boundary = state["boundary"]
        self._began = Position(**state["began"])
        covered = Position(**state["covered"])
        last = None if state["last"] is None else DeltaId(self.node, **state["last"])

        # The checkpoint is of another node, which sends its unsent work itself, or of a run with another store.
        other_store = _differ(self._origin, state["origin"]) or _differ(self._store, state.get("store"))
        if state["node"] != self.node or other_store:
            where = "another store" if state["node"] == self.node else f"node {state['node']!r}"
            self._log("WARNING", f"the checkpoint is of {where}: {self.node!r} takes only its weights to start with")
            self._start_without_unsent(covered=self._known)
            return

        # The disk's last delta ends where the checkpoint's does and is another one: it is of a session since then,
        # which sent again what had been lost with a disk.
        is_another = (
            self._known.step == covered.step
            and self._known_id is not None
            and last is not None
            and self._known_id != last
        )
        # The checkpoint is older than what was sent: its unsent work is in there, and is not sent again.
        if is_ahead(self._known, covered) or is_another:
            known = self._known
            dropped = self.local_step - known.step
            then = f"the {dropped} steps after that are dropped" if dropped > 0 else "it continues from there"
            self._log(
                "WARNING" if dropped > 0 else "INFO",
                f"this node sent its work up to step {known.step}, which its checkpoint of step {self.local_step} "
                f"does not know: {then}",
            )
            self._start_without_unsent(covered=known)
            return

        # The checkpoint knows everything that was sent: continue with base, pending deltas and residual.
        self._origin = state["origin"] or self._origin
        self._store = state.get("store") or self._store  # absent in checkpoints of protocol 1
        self._version, self._rounds, self._fresh = state["version"], state["rounds"], state["fresh"]
        self._covered, self._last = covered, last
        self._base = self._checked(state["base"], "base")
        self._pending = tuple(
            _Pending(
                DeltaId(self.node, entry["session"], entry["seq"]),
                Position(**entry["trained"]),
                self._checked(entry["tensors"], "pending"),
            )
            for entry in state["pending"]
        )
        earlier = [*(pending.id.session for pending in self._pending), *filter(None, [state["session"]])]
        self._sessions = tuple(dict.fromkeys((*earlier, *self._sessions)))
        if self._known_id is None or is_ahead(covered, self._known):
            self._committed, self._residual_id = last, None  # what the disk has is older
        residual = state["residual"]
        self._residual = None if residual is None else self._checked(residual, "residual")

    def _start_without_unsent(self, *, covered: Position) -> None:
        self._began = self._position()
        self._fresh = False
        self._covered = covered

    def _checked(self, tensors: Mapping[str, Tensor], part: str) -> Tensors:
        types = {name: TensorType(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
        if types != self._schema.types("trained"):
            raise CheckpointError(
                f"the checkpoint's distributed state ({part}) is of other parameters than this model trains; start "
                "from its weights alone, with run.init_from"
            )
        return dict(tensors)

    # ------------------------------------------------------------------ sending

    def spool(self) -> Procedure[bool]:
        """Commit the snapshot: write its delta to disk, and move the base. True if there was one.

        If the disk does not take it, everything stays as it was, and the next delta is cumulative.
        """
        snapshot = self._snapshot
        if snapshot is None:
            return False

        # The delta: from the base to the snapshot, encoded, with what the codec still owes from earlier deltas.
        with self._lock:
            assert self.session is not None, "no boundary is queued before the first look"
            committed, predecessor = self._committed, self._predecessor
            seq = 1
            if committed is not None and committed.session == self.session:
                seq = committed.seq + 1
            else:
                predecessor = committed
            delta = DeltaId(self.node, self.session, seq)
        trained = snapshot.position.since(snapshot.began)
        gradient = compute_pseudo_gradient(self._base, {name: snapshot.values[name] for name in self._trained})
        encoded, decoded, residual = self._codec.encode(gradient, self._residual)
        del gradient
        broken = [name for name, tensor in decoded.items() if not can_be_added(tensor)]
        if broken:
            self._give_up(snapshot, broken[0])
            return False

        # What the codec owes then, and the spool. Until that is durable nothing has changed.
        slot = 1 - self._residual_slot
        residual_id: str | None = None
        try:
            if residual is not None:
                owed = pack_tensors(residual, {})
                residual_id = hashlib.sha256(owed).hexdigest()
                yield from WriteFile(RESIDUALS[slot], owed)
                del owed
            header = self._header(delta, predecessor, snapshot, trained, residual_id)
            data = pack_delta(header, encoded, {name: snapshot.values[name] for name in self._buffers})
            del encoded
            yield from WriteFile(SPOOL, data)
        except OSError as error:
            # A write that failed may still have put the file in its place: it must not look committed.
            with suppress(OSError):
                yield from RemoveFile(SPOOL)
            self._drop_snapshot(snapshot)
            reason = f"the spool cannot be written: {error.strerror or error}"
            self._say("delta_upload_failed", {"step": snapshot.position.step, "error": reason})
            return False
        spooled = _Spooled(delta, snapshot.position, len(data), residual_id)
        del data

        # The durable spool is the commit. What it makes true becomes true here, all at once. A prepared version does
        # not have the new delta, so that is subtracted from it, outside the lock, and again if another version came.
        while True:
            prepared = self._prepared
            moved = prepared
            if prepared is not None:
                moved = replace(prepared, new_base=self._without(prepared.new_base, [decoded]))
            with self._lock:
                if self._prepared is not prepared:
                    continue
                self._prepared = moved
                self._committed, self._predecessor = delta, predecessor
                self._residual, self._residual_id = residual, residual_id
                if residual is not None:
                    self._residual_slot = slot
                self._spooled = spooled
                self._snapshot = None
                self._move_base(snapshot, _Pending(delta, trained, decoded))
                self._lock.notify_all()
                break
        self._say("delta_upload_queued", {"step": snapshot.position.step, "seq": delta.seq, "bytes": spooled.size})
        return True

    def _header(
        self,
        delta: DeltaId,
        predecessor: DeltaId | None,
        snapshot: _Snapshot,
        trained: Position,
        residual: str | None,
    ) -> DeltaHeader:
        assert self._version is not None, "no boundary is queued before the first version"
        before = None if predecessor is None else Predecessor(session=predecessor.session, last=predecessor.seq)
        return DeltaHeader(
            node=delta.node,
            session=delta.session,
            seq=delta.seq,
            base_version=self._version,
            steps=trained.step,
            samples=trained.samples,
            tokens=trained.tokens,
            seconds=snapshot.seconds,
            position=snapshot.position,
            schema_id=self._schema.fingerprint,
            codec=self._codec.name,
            time=self._now(),
            predecessor=before,
            residual=residual,
        )

    def _drop_snapshot(self, snapshot: _Snapshot) -> None:
        with self._lock:
            self._snapshot, self._spare = None, snapshot.values
            self._lock.notify_all()

    def _give_up(self, snapshot: _Snapshot, name: str) -> None:
        """Drop progress that nobody could use: no later delta would be better."""
        with self._lock:
            self._resets_optimizer = True
        self._recover(f"{name} has values that are not finite, or beyond 2^64")
        self._drop_snapshot(snapshot)

    def _recover(self, reason: str, *, forget: bool = False) -> None:
        """Let the newest version be adopted; local progress is dropped then.

        Args:
            forget: whether what is pending will not be in any version.
        """
        with self._lock:
            self._drops_local, self._prepared = True, None
            if forget:
                self._pending = ()
        self.recoveries += 1
        self._log(
            "WARNING",
            f"{reason}: this node takes the newest version and drops what it learned since its last delta (recovery "
            f"{self.recoveries} since its start)",
        )

    def _move_base(self, snapshot: _Snapshot, pending: _Pending) -> None:
        """The snapshot becomes the base, and its delta is pending."""
        self._set_base(snapshot.values, own=snapshot.values)
        self._pending = (*self._pending, pending)
        if len(self._pending) >= MAX_PENDING:
            self._spare = None  # until a version comes there is no snapshot to fill it
        self._began = snapshot.position
        self._covered, self._last = snapshot.position, pending.id

    def _set_base(self, values: Mapping[str, Tensor], *, own: Tensors | None) -> None:
        """Replace the base. `own` are the values of everything that is exchanged, if nobody else has them."""
        self._spare = self._own_base or self._spare
        self._base = {name: values[name] for name in self._trained}
        self._own_base = own

    def upload(self) -> Procedure[bool]:
        """Send the delta in the spool, the very same bytes, until the store has them. True if it was sent.

        A delta from before a restart is sent after the first look, which tells whether this is still the same store.

        Raises:
            StoreRefusedError: the store will most likely refuse it again.
        """
        spooled = self._spooled
        if spooled is None or not self._looked:
            return False
        try:
            # The store first, then the ledger, then the spool: whichever a crash leaves, the next start knows enough.
            if self._stored != spooled.id:
                data = yield from ReadFile(SPOOL)
                if data is None:
                    raise OSError("the delta is missing in this node's spool; a restart puts its work into another one")
                yield from put_own(spooled.id.name, data, self._store)
                del data
                self._stored = spooled.id
            ledger = Ledger.of(
                spooled.id,
                spooled.position,
                self._sessions,
                origin=self._origin,
                store=self._store,
                residual=spooled.residual,
            )
            yield from WriteFile(LEDGER, ledger.to_bytes())
            yield from RemoveFile(SPOOL)
            if spooled.residual is not None:
                yield from RemoveFile(RESIDUALS[1 - self._residual_slot])
        except (StoreError, OSError) as error:
            payload = {"seq": spooled.id.seq, "session": spooled.id.session, "error": str(error)}
            self._say("delta_upload_failed", payload)
            if isinstance(error, StoreRefusedError):
                raise
            return False
        self._acknowledge(spooled)
        return True

    def _acknowledge(self, spooled: _Spooled) -> None:
        with self._lock:
            self._spooled = None
        self._say("delta_uploaded", {"seq": spooled.id.seq, "bytes": spooled.size, "session": spooled.id.session})

    # ------------------------------------------------------------------ receiving

    def poll(self) -> Procedure[bool]:
        """Look for a newer version and prepare it for installation. True if there is one.

        Raises:
            StoreUnavailableError: the store does not answer, or is not there.
            StoreContentError: it holds another history, or another store lies there.
        """
        if self._seen is None:  # before anything is made in an empty folder where a mount is away
            yield from check_identity(self._store, or_another=True)
        thorough = self._seen is None or self._idle_looks % LOOKS_PER_CHECK == LOOKS_PER_CHECK - 1
        manifest = yield from find_head(self._seen, beside=thorough)
        if manifest is None:
            self._idle_looks += 1
            if thorough:  # a mount that is away looks like a store in which nothing is new
                yield from check_identity(self._store)
            if self._seen is None or not self.wants_version:
                return False
            manifest = self._seen
        if manifest.schema_id != self._schema.fingerprint:
            self._log_once(
                "ERROR",
                f"version {manifest.version} of the store is of another model (names, shapes or the trained parameters "
                "differ): this node trains alone. Give it the same model section as the master, or another "
                "distributed.repo_id",
                key="model",
            )
            return False
        first_look = None
        if not self._looked:
            first_look, manifest = yield from self._look_first(manifest)
        else:
            self._store = manifest.store or self._store
            manifest = yield from self._look_for_refusals(manifest)

        # Download the weights if they are newer than what the model is on or is about to be on. Else marks are enough.
        newest = self._prepared.manifest.version if self._prepared is not None else self._version
        weights = None
        starts_over = first_look is not None and first_look.starts_over
        if newest is None or manifest.version > newest or starts_over or self.wants_version:
            data = yield from read_blob(manifest.weights)
            if data is None:
                # Weights that were replaced and pruned meanwhile are no fault: the next look finds a newer version. If
                # it does not, the newest weights are missing.
                if self._unreadable == manifest.version:
                    self._log_once(
                        "WARNING",
                        f"the weights of version {manifest.version} ({manifest.weights.path}) are missing in the store "
                        "or damaged: this node trains on what it has until there is a newer version",
                        key="weights",
                    )
                self._unreadable = manifest.version
                return False
            weights = unpack_blob(manifest.weights, data, self._schema.types())
            del data
        self._prepare(manifest, first_look, weights)
        if first_look is not None and first_look.other_store:
            self._log(
                "WARNING",
                "this store was created again, or is not the one that this node took part in: the node joins it as a "
                "new node, and takes its weights from it",
            )
        self._look_for_twins(manifest)
        self._seen = manifest
        return weights is not None

    def _look_first(self, manifest: Manifest) -> Procedure[tuple[_FirstLook, Manifest]]:
        """Find out, at the first look, where this node stands in the store's history: as of the returned manifest."""
        # Is it still the same store?
        first = manifest if manifest.version == 0 else (yield from read_manifest(0))
        if first is None:
            yield from check_identity(manifest.store)
            raise StoreContentError("the store has lost head/00000000.json; use a new distributed.repo_id")
        other_store = _differ(self._store, manifest.store) or _differ(self._origin, first.sha256)
        if other_store:
            for name in (SPOOL, LEDGER, *RESIDUALS):
                yield from RemoveFile(name)
            self._has_ledger, self._knows_all, self._known, self._known_id = False, False, START, None
        elif manifest.store is None:
            yield from check_identity(self._store)
        store = manifest.store if other_store else manifest.store or self._store
        sessions, covered, committed = self._sessions, self._covered, self._committed
        if other_store:
            sessions, covered, committed = (), START, None

        # What did earlier sessions send? A disk that knows less than the checkpoint is not the disk of the checkpoint.
        # Then the store is asked, and believed: without keys nobody else can tell whose sessions these are.
        sent, lost, adopted = self._known, frozenset[DeltaId](), dict[str, int]()
        if not self._knows_all or is_ahead(covered, self._known):
            while True:
                earlier = yield from look_back(self.node, manifest, self._schema, self._codec, sessions)
                newer = yield from find_head(manifest)
                if newer is None:
                    break
                manifest = newer  # it may have processed deltas that `look_back` did not find any more
            sent = max(earlier.covered, sent)
            # Deltas of the checkpoint that were in the spool of a lost disk, and never reached the store.
            pending = {pending.id for pending in self._pending}
            lost = frozenset(id for id in pending - earlier.outstanding if not manifest.has_processed(id))
            reached = {session: seq for session, seq in earlier.last_seq.items() if seq}
            # What the store has not, may still come, too late: the next session says that the one before ends here.
            ends = [DeltaId(self.node, *end) for end in reached.items()]
            committed = max(ends, key=lambda end: (session_number(end.session), end.seq), default=None)
            adopted = {session: seq for session, seq in reached.items() if session not in sessions}
            if adopted:
                self._log_once(
                    "INFO",
                    f"this disk does not know all that node {self.node!r} sent; the store says that its work up to "
                    f"step {sent.step} is there",
                    key="new disk",
                )

        # The disk shall know what the store said. A full disk is no fault here: the store can be asked again.
        owes = not other_store and sent <= max(covered, self._known)
        knows = self._has_ledger and sent <= self._known and (self._origin, self._store) == (first.sha256, store)
        look = _FirstLook(
            first.sha256, store, other_store, sent if is_ahead(sent, covered) else None, lost, adopted, committed, owes
        )
        if not knows and (self._spooled is None or other_store):
            residual = self._residual_id if owes else None
            ledger = Ledger.of(
                committed, sent, (*sessions, *adopted), origin=first.sha256, store=store, residual=residual
            )
            with suppress(OSError):
                yield from WriteFile(LEDGER, ledger.to_bytes())
        return look, manifest

    def _look_for_refusals(self, manifest: Manifest) -> Procedure[Manifest]:
        """Notice what a version, or that it came, says of this node's deltas; the newest version is returned.

        What was refused, or can no longer enter, is not waited for: the node adopts the newest version.
        """
        assert self._seen is not None
        assert self.session is not None
        session = self.session

        # Refused in a version.
        mark = manifest.nodes.get(self.node)
        dealt_with = [pending.id for pending in self._pending if manifest.has_processed(pending.id)]
        refusals = 0 if mark is None else mark.rejected
        if dealt_with and mark is not None and refusals > self._refusals:
            self._refuse(dealt_with[-1], mark.reason or "unknown")
        self._refusals = refusals

        # The session was closed, by a machine of the same name or for too many open ones; or the node was forgotten.
        is_closed = mark is not None and mark.has_closed(session)
        was_open = self._seen.session(self.node, session) is not None
        if is_closed or (was_open and manifest.session(self.node, session) is None):
            if any(pending.id.session == session for pending in self._pending):
                self._recover(
                    f"session {session} of this node was closed, by another machine of its name or for too many open "
                    "ones",
                    forget=True,
                )
            self._open_session(mark)
            return manifest

        # Refused without a word: a version of a whole round came, and did not take it.
        spooled = self._spooled
        waiting = [pending.id for pending in self._pending if spooled is None or pending.id != spooled.id]
        self._uploaded = {id: self._uploaded.get(id, manifest.rounds) for id in waiting}
        for id, rounds in self._uploaded.items():
            age = manifest.rounds - rounds
            if id in dealt_with or age < REFUSED_IF_GONE:
                continue
            if age < REFUSED_AT_ANY_RATE:
                if (yield from Get(id.name, limit=1, partial=True)) is not None:
                    continue
                newer = yield from find_head(manifest)  # it may have taken the delta
                if newer is not None:
                    return (yield from self._look_for_refusals(newer))
            self._refuse(id, "the master took it into no version; its log says why", forget=True)
            self._open_session(mark)
            break
        return manifest

    def _refuse(self, id: DeltaId, reason: str, *, forget: bool = False) -> None:
        self._say("delta_rejected", {"seq": id.seq, "session": id.session, "reason": reason})
        self._recover(f"delta {id.seq} of session {id.session} was refused ({reason})", forget=forget)

    def _open_session(self, mark: NodeMark | None) -> None:
        """Let the next delta be the first of a new session."""
        with self._lock:
            number = 1 + max((session_number(session) for session in self._sessions), default=0)
            number = max(number, 0 if mark is None else mark.closed_below)
            self.session = session_name(number, self._nonce)
            self._sessions = (*self._sessions, self.session)

    def _prepare(self, manifest: Manifest, first_look: _FirstLook | None, weights: Mapping[str, Tensor] | None) -> None:
        """Prepare a version, and forget the deltas that it covers."""
        starts_over = first_look is not None and first_look.starts_over
        lost = frozenset[DeltaId]() if first_look is None else first_look.lost
        while True:
            # Computed outside the lock, which is why it may have to be computed again.
            pending, prepared = self._pending, self._prepared
            kept = tuple(one for one in pending if one.id not in lost and not manifest.has_processed(one.id))
            if starts_over:
                kept = ()
            if weights is not None:
                new_base = self._without(weights, [one.delta for one in kept])
                is_base = self._fresh and all(torch.equal(value, new_base[n]) for n, value in self._base.items())
                prepared = _Prepared(manifest, new_base, is_base)
            with self._lock:
                if self._pending is not pending:  # a delta was committed meanwhile
                    continue
                self._pending, self._prepared = kept, prepared
                if first_look is not None:
                    self._apply(first_look, [p for p in pending if p.id in lost], manifest.nodes.get(self.node))
                return

    def _without(self, weights: Mapping[str, Tensor], deltas: Collection[Mapping[str, Tensor]]) -> Tensors:
        """θ - Σ Δ, in the order of the deltas. One tensor at a time, so that memory holds no second copy."""
        new_base: Tensors = {}
        for name, value in weights.items():
            for delta in deltas:
                if name in delta:
                    value = value - delta[name]
            new_base[name] = value
        return new_base

    def _apply(self, look: _FirstLook, lost: Iterable[_Pending], mark: NodeMark | None) -> None:
        self._origin, self._store = look.origin, look.store
        self._committed, self._last_seq = look.committed, look.adopted
        self._refusals = 0 if mark is None else mark.rejected
        if not look.owes:
            self._residual = self._residual_id = None
        if look.starts_over:
            # The model is on no version of this store, or behind what was sent: it adopts the next version.
            self._version, self._rounds = None, 0.0
            self._drops_local, self._ahead = True, look.ahead
        else:
            # A lost delta is undone: its progress counts as unsent again, and enters the next delta.
            for pending in lost:
                self._base = {name: base + pending.delta[name] for name, base in self._base.items()}
                self._began = self._began.since(pending.trained)
        if look.other_store:
            self._covered, self._last, self._spooled, self._sessions = START, None, None, ()
        self._sessions = (*self._sessions, *look.adopted)
        self._open_session(mark)
        self._looked = True

    def _look_for_twins(self, manifest: Manifest) -> None:
        """Report if another machine sends in this node's name: a session that is not ours moves while we run."""
        mark = manifest.nodes.get(self.node)
        for session, moved in ({} if mark is None else mark.sessions).items():
            if session in self._sessions and session not in self._last_seq:
                continue
            before = None if self._seen is None else self._seen.session(self.node, session)
            if self._seen is not None and moved.seq > max(self._last_seq.get(session, 0), before.seq if before else 0):
                self._log_once(
                    "WARNING",
                    f"another machine sends deltas as node {self.node!r} (session {session}): two nodes of one name "
                    "read the same data. Give each its own distributed.node_id",
                    key="twin",
                )

    # ------------------------------------------------------------------ log

    def _log(self, level: str, message: str) -> None:
        self._say("log", {"level": level, "message": message})

    def _log_once(self, level: str, message: str, *, key: str) -> None:
        if key not in self._logged:
            self._logged.add(key)
            self._log(level, message)


def _differ(known: str | None, other: str | None) -> bool:
    return known is not None and other is not None and known != other
