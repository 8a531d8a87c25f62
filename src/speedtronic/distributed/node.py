"""A node: trains, sends pseudo-gradients, and installs new versions of the global weights.

The training thread counts steps, gives snapshots away and installs versions. Background threads run `begin`, `spool`,
`upload` and `poll`, which do all the work on disk, with the store and on whole models. State that both touch changes
under one lock, which is held for assignments only: whole models are computed outside it, and computed again if the
other side was faster.

In copies of the trained parameters, a node holds: its base; one per delta that no version of the store covers yet,
usually one or two and at most `MAX_PENDING`; a snapshot from a boundary to its commit, when it becomes the base; the
base before, as memory for the next snapshot, since a copy into fresh memory takes several times as long; a version
(with buffers and frozen weights) from its download to its installation; the residual of a lossy codec. While a delta
is spooled its bytes come on top; while one is uploaded they are read again from the disk.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from speedtronic.distributed.codec import Codec
from speedtronic.distributed.delta import DeltaHeader, compute_pseudo_gradient, pack_delta, spooled_header
from speedtronic.distributed.earlier_sessions import look_back
from speedtronic.distributed.ledger import LEDGER, SPOOL, START, Ledger
from speedtronic.distributed.packed_tensors import unpack_blob
from speedtronic.distributed.protocol import (
    PROTOCOL,
    UNMARKED,
    DeltaId,
    Manifest,
    Position,
    find_head,
    put_own,
    read_blob,
    read_manifest,
)
from speedtronic.distributed.requests import EventSink, Procedure, ReadFile, RemoveFile, WriteFile
from speedtronic.distributed.schema import Schema, Tensors, TensorType
from speedtronic.errors import CheckpointError, StoreContentError, StoreError

MAX_PENDING = 8
"""With so many deltas in no version yet, boundaries are skipped: memory and store stay bounded without a master."""

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
    """

    new_base: Tensors
    base: Tensors
    adopt: bool
    manifest: Manifest
    ahead: Position | None


class _Snapshot(NamedTuple):
    """What a boundary gave away: values, and from where to where they were trained."""

    values: Tensors
    began: Position
    position: Position
    seconds: float


class _Pending(NamedTuple):
    """A committed delta that is in no version yet, as the master decodes it; `trained` is the work that it holds."""

    id: DeltaId
    trained: Position
    delta: Tensors


class _Spooled(NamedTuple):
    """The delta on disk that is not uploaded yet; its size in bytes."""

    id: DeltaId
    position: Position
    size: int


class _FirstLook(NamedTuple):
    """Where a node stands in the history of a store, as its first look found out.

    Attributes:
        origin: the SHA-256 of the store's version 0.
        other_store: whether what this node remembers is of another store.
        ahead: the position that the store covers, if that is beyond what this node remembers.
        lost: pending deltas that exist nowhere any more.
        last_seq: by session of this node, the greatest number that an earlier session may have reached.
    """

    origin: str
    other_store: bool = False
    ahead: Position | None = None
    lost: frozenset[DeltaId] = frozenset()
    last_seq: Mapping[str, int] = {}

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
        session: the name of this session, never used before.
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
        session: str,
        codec: Codec,
        inner_steps: int,
        initial: Tensors,
        say: EventSink,
        now: Callable[[], str],
    ) -> None:
        self.node = node
        self.session = session
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
        self._ahead: Position | None = None

        # Used by background threads: set by `begin`, then each by one thread.
        self._known = START  # what the disk says was sent
        self._known_id: DeltaId | None = None
        self._has_ledger = False
        self._on_disk: tuple[str, ...] = ()
        self._origin: str | None = None
        self._sessions: tuple[str, ...] = (session,)
        self._seq = 0
        self._residual: Tensors | None = None
        self._stored: DeltaId | None = None
        self._seen: Manifest | None = None
        self._last_seq: Mapping[str, int] = {}
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
        been read yet, or (`idle`) there is nothing to send.

        Args:
            last: whether no step follows. Then there is no next delta, so this one is sent even if many are pending.
        """
        self._boundary = self.local_step
        if self.unsent_steps <= 0:
            return "idle"
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
            return Install(dict(prepared.new_base), self._base, adopt, prepared.manifest, self._ahead)

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
            self._drops_local, self._ahead = False, None
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
        if data is not None and ledger is None:
            self._log("WARNING", "this node's ledger is damaged; the store is asked for what was sent instead")
        if ledger is not None:
            self._has_ledger = True
            self._known, self._known_id = ledger.position, ledger.last(self.node)
            self._origin, self._on_disk = ledger.origin, ledger.sessions
        data = yield from ReadFile(SPOOL)
        if data is not None:
            header = spooled_header(data)
            if header is None or header.node != self.node:
                self._log("WARNING", "the delta in this node's spool is damaged; its work is not sent")
                yield from RemoveFile(SPOOL)
            else:
                self._spooled = _Spooled(header.id, header.position, len(data))
                self._known, self._known_id = max(self._known, header.position), header.id
                self._on_disk = (*self._on_disk, header.session)
        self._sessions = tuple(dict.fromkeys((*self._on_disk, self.session)))
        if state is not None:
            self._restore(state)

    def _restore(self, state: Mapping[str, Any]) -> None:
        """Restore a checkpoint as far as the disk allows it. What was sent once must not be trained or sent again."""
        self._step, self._samples, self._tokens = Position(**state["position"])
        self._boundary = state["boundary"]
        self._began = Position(**state["began"])
        covered = Position(**state["covered"])
        last = None if state["last"] is None else DeltaId(self.node, **state["last"])

        # The checkpoint is of another node, which sends its unsent work itself, or of a run with another store.
        if state["node"] != self.node or (self._origin and state["origin"] not in {None, self._origin}):
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
        earlier = (*(pending.id.session for pending in self._pending), state["session"])
        self._sessions = tuple(dict.fromkeys((*earlier, *self._sessions)))
        if state["residual"] is not None:
            self._residual = self._checked(state["residual"], "residual")

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
        delta = DeltaId(self.node, self.session, self._seq + 1)
        trained = snapshot.position.since(snapshot.began)
        data, decoded, residual = self._encode(delta, snapshot, trained)

        # The spool. Until it is durable nothing has changed.
        try:
            yield from WriteFile(SPOOL, data)
        except OSError as error:
            # A write that failed may still have put the file in its place: it must not look committed.
            with suppress(OSError):
                yield from RemoveFile(SPOOL)
            with self._lock:
                self._snapshot, self._spare = None, snapshot.values
                self._lock.notify_all()
            reason = f"the spool cannot be written: {error.strerror or error}"
            self._say("delta_upload_failed", {"step": snapshot.position.step, "error": reason})
            return False
        spooled = _Spooled(delta, snapshot.position, len(data))
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
                self._seq = delta.seq
                self._residual = residual
                self._spooled = spooled
                self._snapshot = None
                self._move_base(snapshot, _Pending(delta, trained, decoded))
                self._lock.notify_all()
                break
        self._say("delta_upload_queued", {"step": snapshot.position.step, "seq": delta.seq, "bytes": spooled.size})
        return True

    def _encode(self, delta: DeltaId, snapshot: _Snapshot, trained: Position) -> tuple[bytes, Tensors, Tensors | None]:
        assert self._version is not None, "no boundary is queued before the first version"
        gradient = compute_pseudo_gradient(self._base, {name: snapshot.values[name] for name in self._trained})
        encoded, decoded, residual = self._codec.encode(gradient, self._residual)
        header = DeltaHeader(
            protocol=PROTOCOL,
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
        )
        buffers = {name: snapshot.values[name] for name in self._buffers}
        return pack_delta(header, encoded, buffers), decoded, residual

    def _move_base(self, snapshot: _Snapshot, pending: _Pending) -> None:
        """The snapshot becomes the base, and its delta is pending."""
        self._set_base(snapshot.values, own=snapshot.values)
        self._pending = (*self._pending, pending)
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
                yield from put_own(spooled.id.name, data)
                self._stored = spooled.id
            ledger = Ledger.of(spooled.id, spooled.position, self._sessions, self._origin)
            yield from WriteFile(LEDGER, ledger.to_bytes())
            yield from RemoveFile(SPOOL)
        except (StoreError, OSError) as error:
            payload = {"seq": spooled.id.seq, "session": spooled.id.session, "error": str(error)}
            self._say("delta_upload_failed", payload)
            return False
        self._acknowledge(spooled)
        return True

    def _acknowledge(self, spooled: _Spooled) -> None:
        with self._lock:
            self._spooled = None
        self._say("delta_uploaded", {"seq": spooled.id.seq, "bytes": spooled.size, "session": spooled.id.session})

    # ------------------------------------------------------------------ receiving

    def poll(self) -> Procedure[bool]:
        """Look for a newer version and prepare it for installation. True if there is one."""
        manifest = yield from find_head(self._seen)
        if manifest is None:
            return False
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

        # Download the weights if they are newer than what the model is on or is about to be on. Else marks are enough.
        newest = self._prepared.manifest.version if self._prepared is not None else self._version
        weights = None
        if newest is None or manifest.version > newest or (first_look is not None and first_look.starts_over):
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
        self._report_marks(manifest)
        self._seen = manifest
        return weights is not None

    def _look_first(self, manifest: Manifest) -> Procedure[tuple[_FirstLook, Manifest]]:
        """Find out, at the first look, where this node stands in the store's history: as of the returned manifest."""
        # Is it still the same store?
        first = manifest if manifest.version == 0 else (yield from read_manifest(0))
        if first is None:
            raise StoreContentError("the store has lost head/00000000.json; use a new distributed.repo_id")
        other_store = self._origin not in {None, first.sha256}
        if other_store:
            yield from RemoveFile(SPOOL)
            yield from RemoveFile(LEDGER)
            self._has_ledger, self._known = False, START
        covered = START if other_store else self._covered

        # What did earlier sessions send? A disk that knows less than the checkpoint is not the disk of the checkpoint,
        # so the store is asked about all sessions.
        complete = not other_store and not is_ahead(covered, self._known)
        on_disk: Collection[str] = self._on_disk if complete else ()
        while True:
            earlier = yield from look_back(self.node, manifest, self._schema, self._codec, self._sessions, on_disk)
            newer = yield from find_head(manifest)
            if newer is None:
                break
            manifest = newer  # it may have processed deltas that `look_back` did not find any more
        sent = max(earlier.covered, self._known)
        lost: set[DeltaId] = set()
        if not complete:
            # Deltas of the checkpoint that were in the spool of a lost disk, and never reached the store.
            pending = {pending.id for pending in self._pending}
            lost = {id for id in pending - earlier.outstanding if not manifest.has_processed(id)}

        # The disk shall know what the store said. A full disk is no fault here: the store can be asked again.
        if self._spooled is None and not (self._has_ledger and sent <= self._known):
            ledger = Ledger.of(DeltaId(self.node, self.session, 0), sent, self._sessions, first.sha256)
            with suppress(OSError):
                yield from WriteFile(LEDGER, ledger.to_bytes())
        ahead = sent if is_ahead(sent, covered) else None
        return _FirstLook(first.sha256, other_store, ahead, frozenset(lost), earlier.last_seq), manifest

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
                    self._apply(first_look, [p for p in pending if p.id in lost])
                return

    def _without(self, weights: Mapping[str, Tensor], deltas: Collection[Tensors]) -> Tensors:
        """θ - Σ Δ, in the order of the deltas. One tensor at a time, so that memory holds no second copy."""
        new_base: Tensors = {}
        for name, value in weights.items():
            for delta in deltas:
                if name in delta:
                    value = value - delta[name]
            new_base[name] = value
        return new_base

    def _apply(self, first_look: _FirstLook, lost: Iterable[_Pending]) -> None:
        self._looked = True
        self._origin = first_look.origin
        self._last_seq = first_look.last_seq
        if first_look.starts_over:
            # The model is on no version of this store, or behind what was sent: it adopts the next version.
            self._version, self._rounds, self._residual = None, 0.0, None
            self._drops_local, self._ahead = True, first_look.ahead
        else:
            # A lost delta is undone: its progress counts as unsent again, and enters the next delta.
            for pending in lost:
                self._base = {name: base + pending.delta[name] for name, base in self._base.items()}
                self._began = self._began.since(pending.trained)
        if first_look.other_store:
            self._covered, self._last, self._spooled, self._sessions = START, None, None, (self.session,)

    def _report_marks(self, manifest: Manifest) -> None:
        """Report which deltas of this node were refused, and whether another machine sends in its name."""
        is_first_look = self._seen is None
        before = {} if self._seen is None else self._seen.marks
        for key, mark in manifest.marks.items():
            node, _, session = key.partition("/")
            if node != self.node:
                continue
            old = before.get(key, UNMARKED)
            if session in self._sessions:
                # At the first look, refusals of earlier sessions are old news.
                if mark.rejected > old.rejected and (not is_first_look or session == self.session):
                    reason = mark.reason or "unknown"
                    self._say("delta_rejected", {"seq": mark.seq, "session": session, "reason": reason})
            # A session that is not ours moves while we run: another machine has this node's name.
            elif not is_first_look and mark.seq > max(self._last_seq.get(session, 0), old.seq):
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
