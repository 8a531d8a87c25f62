"""A node: trains, hands over what it has learnt, and takes up what all have learnt.

The training thread counts, gives snapshots away and installs; the lanes run `begin`, `spool`, `upload` and `poll`,
which do all the work on disk, with the store and on whole models. What both touch is changed under one lock that is
held for assignments only: whole models are computed outside it, and computed again where the other side was faster.

A node holds, in copies of the trained parameters: its base; one per delta that no version of the store covers yet,
usually one or two and at most `MAX_PENDING`; a snapshot from a boundary to its commit, when it becomes the base; the
base before, as memory for the next snapshot, since a copy into fresh memory takes several times as long; a version
(with buffers and frozen weights) from its download to its installation; the residual of a lossy codec. While a delta
is spooled its bytes come on top, while one is uploaded they are read again from the disk.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from speedtronic.distributed.codec import Codec
from speedtronic.distributed.delta import DeltaHeader, pack_delta
from speedtronic.distributed.earlier_sessions import Past, look_back, spooled_delta
from speedtronic.distributed.ledger import LEDGER, SPOOL, START, Ledger
from speedtronic.distributed.protocol import (
    PROTOCOL,
    DeltaId,
    Manifest,
    Mark,
    Position,
    find_head,
    is_processed,
    put_own,
    read_manifest,
)
from speedtronic.distributed.requests import Procedure, Say, get, read_file, remove_file, write_file
from speedtronic.distributed.tensors import PackedTensors, Schema, TensorFormatError, Tensors
from speedtronic.errors import CheckpointError, StoreContentError, StoreError

MAX_PENDING = 8
"""Deltas in no version yet, at which boundaries are skipped: memory and store stay bounded when the master is gone."""

PATIENCE = 60.0  # seconds that `state_dict` waits for a delta to be written to disk


class Install(NamedTuple):
    """A version to put the model on, by `tensors.rebase_`, between two steps.

    Attributes:
        new_base: for every name of the schema. The trained parameters without this node's deltas that the version
            does not cover yet, all else as in the version. `rebase_` may replace entries.
        base: of the trained parameters, what they are measured from now.
        adopt: whether what was learnt since is dropped.
        manifest: of the version.
        ahead: where the training data must go on, because the store has this node's work up to there.
    """

    new_base: Tensors
    base: Tensors
    adopt: bool
    manifest: Manifest
    ahead: Position | None


class _Snapshot(NamedTuple):
    """What a boundary handed over: values, and from where to where they were trained."""

    values: Tensors
    began: Position
    position: Position
    seconds: float


class _Pending(NamedTuple):
    """A delta that is committed and in no version yet, as the master decodes it; `trained` is what it holds."""

    id: DeltaId
    trained: Position
    delta: Tensors


class _Spooled(NamedTuple):
    """The delta on disk that is not uploaded yet; its size in bytes."""

    id: DeltaId
    position: Position
    size: int


class _Entry(NamedTuple):
    """How a node enters the history of a store at its first look.

    Attributes:
        origin: the SHA-256 of the store's version 0.
        stranger: whether what this node remembers is of another store.
        ahead: the position which the store covers, where that is beyond what this node remembers.
        lost: pending deltas that are nowhere any more.
        seen: by session of this node, the greatest number that an earlier life may have reached.
    """

    origin: str
    stranger: bool = False
    ahead: Position | None = None
    lost: frozenset[DeltaId] = frozenset()
    seen: Mapping[str, int] = {}

    @property
    def starts_anew(self) -> bool:
        return self.stranger or self.ahead is not None


@dataclass(frozen=True)
class _Prepared:
    """A version on its way into the model.

    Attributes:
        is_base: whether its trained parameters are those that the node was made with.
    """

    manifest: Manifest
    new_base: Tensors
    is_base: bool


def is_ahead(known: Position, covered: Position) -> bool:
    """Whether more is known to be handed over than a checkpoint (or a new node) has covered."""
    return known.step > covered.step


class Node:
    """The protocol's side of a training process.

    Args:
        schema: of the model.
        node: this node's name in the store, one path component.
        session: the name of this life of it, never used before.
        codec: how deltas are encoded.
        inner_steps: optimizer steps from boundary to boundary.
        initial: float32 CPU values of the trained parameters (others are ignored), as training starts or goes on.
        say: told of events, and of words as `log` with `level` and `message`.
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
        say: Say,
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

        # Of the training thread alone.
        self._step: int | None = None
        self._samples = 0
        self._tokens: int | Tensor = 0
        self._boundary = 0
        self._waited = 0

        # Under the lock.
        self._base = self._only_trained(initial)
        self._own_base: Tensors | None = None
        self._spare: Tensors | None = None
        self._began = START
        self._covered = START
        self._last: DeltaId | None = None
        self._version: int | None = None
        self._rounds = 0.0
        self._fresh = True
        self._pending: tuple[_Pending, ...] = ()
        self._snapshot: _Snapshot | None = None
        self._prepared: _Prepared | None = None
        self._spooled: _Spooled | None = None
        self._met = False
        self._drops_local = False
        self._ahead: Position | None = None

        # Of the lanes: set by `begin`, then each of one lane.
        self._known = START
        self._known_id: DeltaId | None = None
        self._has_ledger = False
        self._on_disk: tuple[str, ...] = ()
        self._origin: str | None = None
        self._sessions: tuple[str, ...] = (session,)
        self._seq = 0
        self._residual: Tensors | None = None
        self._stored: DeltaId | None = None
        self._seen: Manifest | None = None
        self._seen_sessions: Mapping[str, int] = {}
        self._unread: int | None = None
        self._said: set[str] = set()

    # ------------------------------------------------------------------ the training thread

    @property
    def exchanged(self) -> tuple[str, ...]:
        """The names that `boundary` wants values of."""
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
    def commits(self) -> bool:
        """Whether a snapshot waits for `spool`."""
        return self._snapshot is not None

    @property
    def uploads(self) -> bool:
        """Whether a delta waits for `upload`."""
        return self._spooled is not None

    def count(self, samples: int, tokens: int | Tensor) -> None:
        """Add what a step trained on. A tensor of one number stays on its device until a boundary."""
        self._samples += samples
        self._tokens = self._tokens + tokens

    def stepped(self, step: int) -> None:
        """Note that a global step is done; after its `count`."""
        if self._step is None:
            self._began = self._began._replace(step=step - 1)
            self._boundary = step - 1
        self._step = step

    def wants_boundary(self) -> bool:
        return self.local_step - self._boundary >= self._inner_steps

    def take(self, *, last: bool = False) -> Literal["queued", "full", "waiting", "idle"]:
        """Decide what becomes of a boundary; only `queued` asks for a call of `boundary`.

        Otherwise everything stays as it is, and the next delta is cumulative: the spool is full, or the store has not
        been read yet, or (`idle`) there is nothing to send.

        Args:
            last: whether no step follows. Then there is no next delta, so this one goes, however many wait already.
        """
        self._boundary = self.local_step
        if self.unsent_steps <= 0:
            return "idle"
        if self._version is None or not self._met:
            self._say_that_it_waits()
            return "waiting"
        reason = self._why_full(last)
        if reason is None:
            return "queued"
        self._say("delta_upload_skipped", {"step": self.local_step, "reason": reason})
        return "full"

    def boundary(self, values: Tensors, seconds: float) -> None:
        """Hand over a snapshot. Nothing is installed until `spool` has committed it.

        Args:
            values: CPU values of the names in `exchanged`, in the schema's dtypes. They belong to the node from now on.
            seconds: how long was trained since the last boundary that was queued.
        """
        snapshot = _Snapshot(values, self._began, self._position(), seconds)
        with self._lock:
            self._snapshot = snapshot

    def spare(self) -> Tensors | None:
        """Memory for the next snapshot, where there is some: values of `exchanged` that nobody needs any more."""
        with self._lock:
            spare, self._spare = self._spare, None
        return spare

    def installable(self) -> Install | None:
        """A version to install now. Call `installed` after it was put into the model, before anything else here."""
        with self._lock:
            prepared = self._prepared
            if prepared is None or self._snapshot is not None:
                return None
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
            if install.ahead is not None:
                self._covered, self._last = install.ahead, None
            self._drops_local, self._ahead = False, None
            if self._prepared is not None and self._prepared.manifest is manifest:
                self._prepared = None
            pending = len(self._pending)
        self._waited = 0
        if dropped:
            self._log(
                "INFO", f"version {manifest.version} is adopted; {dropped} local steps made before it are dropped"
            )
        self._say(
            "global_installed",
            {"step": self.local_step, "version": manifest.version, "staleness": staleness, "pending": pending},
        )

    def continue_at(self) -> Position | None:
        """Where the trainer must go on, because everything before is handed over already; None most of the time.

        The node counts from there as soon as it has answered.
        """
        with self._lock:
            goal = self._covered
            if goal.step <= self.local_step:
                return None
            here = self._position()
            self._began = _minus(goal, _minus(here, self._began))
            self._step, self._samples, self._tokens = goal
            self._boundary = goal.step
        self._log("INFO", f"the work of this node up to step {goal.step} is handed over already; it goes on from there")
        return goal

    def state_dict(self, patience: float = PATIENCE) -> dict[str, Any]:
        """What a checkpoint must hold, together with the model as it is. Tensors are the node's own and never change.

        A commit in progress is waited for, so that the checkpoint is not older than the spool. One that takes longer
        than `patience`, in seconds, is left out: after a crash right then, steps since its boundary would be lost.
        """
        position = self._position()
        with self._lock:
            self._lock.wait_for(lambda: self._snapshot is None, patience)
            self._own_base = None  # given away, so its memory must not be used again
            return {
                "node": self.node,
                "session": self.session,
                "origin": self._origin,
                "version": self._version,
                "rounds": self._rounds,
                "fresh": self._fresh,
                "covered": position_tree(self._covered),
                "position": position_tree(position),
                "began": position_tree(self._began),
                "boundary": self._boundary,
                "base": dict(self._base),
                "last": None if self._last is None else {"session": self._last.session, "seq": self._last.seq},
                "pending": [_pending_tree(pending) for pending in self._pending],
                "residual": None if self._residual is None else dict(self._residual),
                "pending_upload": self._pending_upload(),
            }

    def _pending_upload(self) -> dict[str, int] | None:
        waiting = self._snapshot or self._spooled
        return None if waiting is None else {"step": waiting.position.step}

    def _position(self) -> Position:
        return Position(self.local_step, self._samples, int(self._tokens))

    def _why_full(self, last: bool) -> str | None:
        if self._snapshot is not None:
            return "the delta before is still being written to disk"
        if self._spooled is not None:
            return f"delta {self._spooled.id.seq} is not uploaded yet"
        if len(self._pending) >= MAX_PENDING and not last:
            return f"{len(self._pending)} deltas wait for the master to take them up"
        return None

    def _say_that_it_waits(self) -> None:
        """At the first boundary in vain, the second, the fourth, …"""
        self._waited += 1
        if self._waited & (self._waited - 1) == 0:
            self._log(
                "INFO",
                f"step {self.local_step}: trains alone until a version of the master can be read from the store",
            )

    # ------------------------------------------------------------------ starting

    def begin(self, state: Mapping[str, Any] | None) -> Procedure[None]:
        """Take up what a checkpoint and this node's disk know. Reads local files only.

        Args:
            state: of `state_dict`, when the model was restored from the same checkpoint.

        Raises:
            CheckpointError: the state is not of this model.
            OSError: the disk cannot be read.
        """
        ledger = yield from self._read_ledger()
        spooled = yield from self._read_spool()
        known = [START, *([ledger.position] if ledger else []), *([spooled.position] if spooled else [])]
        self._known = max(known)
        self._known_id = spooled.id if spooled else ledger.last(self.node) if ledger else None
        self._origin = ledger.origin if ledger else None
        self._has_ledger = ledger is not None
        self._spooled = spooled
        self._on_disk = (*(ledger.sessions if ledger else ()), *([spooled.id.session] if spooled else []))
        self._sessions = tuple(dict.fromkeys((*self._on_disk, self.session)))
        if state is not None:
            self._restore(state)

    def _restore(self, state: Mapping[str, Any]) -> None:
        self._step, self._samples, self._tokens = position_of(state["position"])
        self._boundary = state["boundary"]
        self._began = position_of(state["began"])
        covered = position_of(state["covered"])
        if state["node"] != self.node or (self._origin and state["origin"] not in {None, self._origin}):
            self._start_beside(state["node"])
        elif is_ahead(self._known, covered) or self._is_another(state, covered):
            self._start_behind(self._known)
        else:
            self._go_on(state, covered)

    def _start_beside(self, other: str) -> None:
        """The checkpoint is of another node, which sends its unsent work itself, or of a run with another store."""
        where = "another store" if other == self.node else f"node {other!r}"
        self._log("WARNING", f"the checkpoint is of {where}: it only gives {self.node!r} the weights to begin with")
        self._began = self._position()
        self._fresh = False
        self._covered = self._known

    def _is_another(self, state: Mapping[str, Any], covered: Position) -> bool:
        """Whether the disk's last delta ends where the checkpoint's does and is another one: of a life since then that
        put into it what had been lost with a disk."""
        if self._known.step != covered.step or self._known_id is None or state["last"] is None:
            return False
        return self._known_id != self._id_of(state["last"])

    def _start_behind(self, known: Position) -> None:
        """The checkpoint is older than what was handed over: its unsent work is in there, and is not sent again."""
        dropped = self.local_step - known.step
        then = f"the {dropped} steps after that are dropped" if dropped > 0 else "it goes on from there"
        self._log(
            "WARNING" if dropped > 0 else "INFO",
            f"this node handed over its work up to step {known.step}, which its checkpoint of step {self.local_step} "
            f"does not know: {then}",
        )
        self._began = self._position()
        self._fresh = False
        self._covered = known

    def _go_on(self, state: Mapping[str, Any], covered: Position) -> None:
        self._origin = state["origin"] or self._origin
        self._version, self._rounds, self._fresh = state["version"], state["rounds"], state["fresh"]
        self._covered = covered
        self._last = None if state["last"] is None else self._id_of(state["last"])
        self._base = self._restored(state["base"], "base")
        self._pending = tuple(
            _Pending(self._id_of(entry), position_of(entry["trained"]), self._restored(entry["tensors"], "pending"))
            for entry in state["pending"]
        )
        earlier = (*(p.id.session for p in self._pending), state["session"])
        self._sessions = tuple(dict.fromkeys((*earlier, *self._sessions)))
        if state["residual"] is not None:
            self._residual = self._restored(state["residual"], "residual")

    def _id_of(self, entry: Mapping[str, Any]) -> DeltaId:
        return DeltaId(self.node, entry["session"], entry["seq"])

    def _restored(self, tensors: Mapping[str, Tensor], part: str) -> Tensors:
        forms = self._schema.forms("trained")
        if {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()} != forms:
            raise CheckpointError(
                f"the checkpoint's distributed state ({part}) is of other parameters than this model trains; start "
                "from its weights alone, with run.init_from"
            )
        return dict(tensors)

    def _read_ledger(self) -> Procedure[Ledger | None]:
        data = yield from read_file(LEDGER)
        if data is None:
            return None
        ledger = Ledger.from_bytes(data)
        if ledger is None:
            self._log("WARNING", "this node's ledger is damaged; what was handed over is asked from the store instead")
        return ledger

    def _read_spool(self) -> Procedure[_Spooled | None]:
        data = yield from read_file(SPOOL)
        if data is None:
            return None
        header = spooled_delta(data)
        if header is None or header.node != self.node:
            self._log("WARNING", "the delta in this node's spool is damaged; its work is not sent")
            yield from remove_file(SPOOL)
            return None
        return _Spooled(DeltaId(header.node, header.session, header.seq), header.position, len(data))

    # ------------------------------------------------------------------ handing over

    def spool(self) -> Procedure[bool]:
        """Commit the snapshot in hand: write its delta to disk, and move the base. True when there was one.

        A disk that does not take it leaves everything as it was; the next delta is cumulative.
        """
        snapshot = self._snapshot
        if snapshot is None:
            return False
        delta = DeltaId(self.node, self.session, self._seq + 1)
        data, decoded, residual = self._encode(delta, snapshot)
        try:
            yield from write_file(SPOOL, data)
        except OSError as error:
            yield from self._clear_spool()
            self._give_up(snapshot, error)
            return False
        spooled = _Spooled(delta, snapshot.position, len(data))
        del data
        self._commit(snapshot, spooled, decoded, residual)
        payload = {"step": snapshot.position.step, "seq": delta.seq, "bytes": spooled.size}
        self._say("delta_upload_queued", payload)
        return True

    def _encode(self, delta: DeltaId, snapshot: _Snapshot) -> tuple[bytes, Tensors, Tensors | None]:
        base = self._base
        assert self._version is not None, "no boundary is queued before the first version"
        learnt = {name: base[name] - snapshot.values[name] for name in self._trained}
        encoded, decoded, residual = self._codec.encode(learnt, self._residual)
        trained = _minus(snapshot.position, snapshot.began)
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

    def _clear_spool(self) -> Procedure[None]:
        """A write that failed may still have put the file in its place: nothing must take it for committed."""
        try:
            yield from remove_file(SPOOL)
        except OSError:
            return

    def _give_up(self, snapshot: _Snapshot, error: OSError) -> None:
        with self._lock:
            self._snapshot, self._spare = None, snapshot.values
            self._lock.notify_all()
        payload = {"step": snapshot.position.step, "error": f"the spool cannot be written: {error.strerror or error}"}
        self._say("delta_upload_failed", payload)

    def _commit(self, snapshot: _Snapshot, spooled: _Spooled, decoded: Tensors, residual: Tensors | None) -> None:
        """What the durable spool makes true, all at once."""
        while True:
            prepared = self._prepared
            moved = None if prepared is None else replace(prepared, new_base=_less(prepared.new_base, decoded))
            with self._lock:
                if self._prepared is not prepared:  # another version came meanwhile
                    continue
                self._prepared = moved
                self._seq = spooled.id.seq
                self._residual = residual
                self._spooled = spooled
                self._snapshot = None
                trained = _minus(snapshot.position, snapshot.began)
                self._move_base(snapshot, _Pending(spooled.id, trained, decoded))
                self._lock.notify_all()
                return

    def _move_base(self, snapshot: _Snapshot, pending: _Pending) -> None:
        """The base is what the delta was measured to, and the delta is on its way."""
        self._set_base(snapshot.values, own=snapshot.values)
        self._pending = (*self._pending, pending)
        self._began = snapshot.position
        self._covered, self._last = snapshot.position, pending.id

    def upload(self) -> Procedure[bool]:
        """Send the delta in the spool, the very bytes, until the store has them. True when it was sent.

        One from before a restart is sent after the first look, which tells whether this is still the same store.
        """
        spooled = self._spooled
        if spooled is None or not self._met:
            return False
        try:
            yield from self._send(spooled)
        except (StoreError, OSError) as error:
            payload = {"seq": spooled.id.seq, "session": spooled.id.session, "error": str(error)}
            self._say("delta_upload_failed", payload)
            return False
        self._acknowledge(spooled)
        return True

    def _send(self, spooled: _Spooled) -> Procedure[None]:
        """The store first, then the ledger, then the spool: whichever a crash leaves, the next start knows enough."""
        if self._stored != spooled.id:
            data = yield from read_file(SPOOL)
            if data is None:
                raise OSError("the delta is gone from this node's spool; a restart puts its work into another one")
            yield from put_own(spooled.id.name, data)
            self._stored = spooled.id
        ledger = Ledger.of(spooled.id, spooled.position, self._sessions, self._origin)
        yield from write_file(LEDGER, ledger.to_bytes())
        yield from remove_file(SPOOL)

    def _acknowledge(self, spooled: _Spooled) -> None:
        with self._lock:
            self._spooled = None
        self._say("delta_uploaded", {"seq": spooled.id.seq, "bytes": spooled.size, "session": spooled.id.session})

    # ------------------------------------------------------------------ taking up

    def poll(self) -> Procedure[bool]:
        """Look for a newer version and prepare it for installation. True when there is one."""
        manifest = yield from find_head(self._seen)
        if manifest is None or not self._is_of_this_model(manifest):
            return False
        entry = None
        if not self._met:
            entry, manifest = yield from self._enter(manifest)
        data = None
        if self._needs(manifest, entry):
            blob = manifest.weights
            data = yield from get(blob.path, limit=blob.size, size=blob.size, sha256=blob.sha256)
            if data is None:
                self._say_what_is_missing(manifest)
                return False
        self._take_up(manifest, entry, data)
        if entry is not None and entry.stranger:
            self._log(
                "WARNING",
                "this store was begun anew, or is another one than this node took part in: it enters it as a new "
                "node, and takes its weights from it",
            )
        self._report_marks(manifest)
        self._seen = manifest
        return data is not None

    def _say_what_is_missing(self, manifest: Manifest) -> None:
        """Weights that were replaced and pruned meanwhile are no fault, and the next look finds what came after. If it
        finds nothing, the newest are missing."""
        if self._unread == manifest.version and "weights" not in self._said:
            self._said.add("weights")
            self._log(
                "WARNING",
                f"the weights of version {manifest.version} ({manifest.weights.path}) are missing in the store or "
                "damaged: this node trains on what it has until there is a newer version",
            )
        self._unread = manifest.version

    def _is_of_this_model(self, manifest: Manifest) -> bool:
        if manifest.schema_id == self._schema.fingerprint:
            return True
        if "model" not in self._said:
            self._said.add("model")
            self._log(
                "ERROR",
                f"version {manifest.version} of the store is of another model (names, shapes or which parameters are "
                "trained differ): this node trains alone. Give it the same model section as the master, or another "
                "distributed.repo_id",
            )
        return False

    def _needs(self, manifest: Manifest, entry: _Entry | None) -> bool:
        """Whether the version's weights are wanted, and not only its marks."""
        newest = self._prepared.manifest.version if self._prepared is not None else self._version
        return newest is None or manifest.version > newest or (entry is not None and entry.starts_anew)

    def _enter(self, manifest: Manifest) -> Procedure[tuple[_Entry, Manifest]]:
        """Find out, at the first look, where in the store's history this node stands: as of the manifest returned."""
        origin = yield from self._origin_of(manifest)
        stranger = self._origin not in {None, origin}
        if stranger:
            yield from remove_file(SPOOL)
            yield from remove_file(LEDGER)
            self._has_ledger, self._known = False, START
        covered = START if stranger else self._covered
        # A disk that knows less than the checkpoint is not the one that the checkpoint was written beside.
        complete = not stranger and not is_ahead(covered, self._known)
        past, manifest = yield from self._look_back(manifest, self._on_disk if complete else ())
        handed_over = max(past.covered, self._known)
        yield from self._remember(handed_over, origin)
        ahead = handed_over if is_ahead(handed_over, covered) else None
        lost = frozenset[DeltaId]() if complete else frozenset(self._lost(manifest, past))
        return _Entry(origin, stranger, ahead, lost, past.seen), manifest

    def _look_back(self, manifest: Manifest, on_disk: Collection[str]) -> Procedure[tuple[Past, Manifest]]:
        """Again where a newer version came meanwhile: it may have what was not found any more."""
        while True:
            past = yield from look_back(self.node, manifest, self._schema, self._codec, self._sessions, on_disk)
            newer = yield from find_head(manifest)
            if newer is None:
                return past, manifest
            manifest = newer

    def _origin_of(self, manifest: Manifest) -> Procedure[str]:
        first = manifest if manifest.version == 0 else (yield from read_manifest(0))
        if first is None:
            raise StoreContentError("the store has lost head/00000000.json; use a new distributed.repo_id")
        return first.sha256

    def _lost(self, manifest: Manifest, past: Past) -> Iterable[DeltaId]:
        """Deltas of the checkpoint that were in the spool of a disk that is gone, and never reached the store."""
        for pending in self._pending:
            if not (is_processed(manifest, pending.id) or pending.id in past.whole):
                yield pending.id

    def _remember(self, handed_over: Position, origin: str) -> Procedure[None]:
        """Let the disk know what the store said. It can be asked again, so a full disk is no fault here."""
        if self._spooled is not None or (self._has_ledger and handed_over <= self._known):
            return
        ledger = Ledger.of(DeltaId(self.node, self.session, 0), handed_over, self._sessions, origin)
        try:
            yield from write_file(LEDGER, ledger.to_bytes())
        except OSError:
            return

    def _take_up(self, manifest: Manifest, entry: _Entry | None, data: bytes | None) -> None:
        """Prepare a version, and forget the deltas that it covers."""
        weights = None if data is None else self._unpacked(manifest, data)
        anew = entry is not None and entry.starts_anew
        lost = frozenset[DeltaId]() if entry is None else entry.lost
        while True:
            pending, prepared = self._pending, self._prepared
            kept = () if anew else tuple(p for p in pending if not (is_processed(manifest, p.id) or p.id in lost))
            if weights is not None:
                new_base = self._without(weights, kept)
                prepared = _Prepared(manifest, new_base, self._fresh and _same(self._base, new_base))
            with self._lock:
                if self._pending is not pending:  # a delta was committed meanwhile
                    continue
                self._pending, self._prepared = kept, prepared
                if entry is not None:
                    self._apply(entry, [p for p in pending if p.id in lost])
                return

    def _unpacked(self, manifest: Manifest, data: bytes) -> PackedTensors:
        try:
            return PackedTensors(data, self._schema.forms())
        except TensorFormatError as error:
            raise StoreContentError(f"{manifest.weights.path}: {error}") from error

    def _without(self, weights: Mapping[str, Tensor], pending: Iterable[_Pending]) -> Tensors:
        """θ - Σ Δ over what is pending, in the order in which it was committed."""
        new_base: Tensors = {}
        deltas = [p.delta for p in pending]
        for name, value in weights.items():
            for delta in deltas:
                if name in delta:
                    value = value - delta[name]
            new_base[name] = value
        return new_base

    def _apply(self, entry: _Entry, lost: Iterable[_Pending]) -> None:
        self._met = True
        self._origin = entry.origin
        self._seen_sessions = entry.seen
        if entry.starts_anew:
            self._version, self._rounds, self._residual = None, 0.0, None
            self._drops_local, self._ahead = True, entry.ahead
        else:
            for pending in lost:
                self._base = {name: base + pending.delta[name] for name, base in self._base.items()}
                self._began = _minus(self._began, pending.trained)
        if entry.stranger:
            self._covered, self._last, self._spooled, self._sessions = START, None, None, (self.session,)

    def _report_marks(self, manifest: Manifest) -> None:
        """Say which deltas of this node were refused, and whether somebody else sends in its name."""
        before = self._seen.marks if self._seen is not None else None
        for lineage, mark in manifest.marks.items():
            node, _, session = lineage.partition("/")
            if node != self.node:
                continue
            old = before.get(lineage) if before is not None else None
            if session in self._sessions:
                self._report_rejection(session, mark, old, is_first_look=before is None)
            elif before is not None and mark.seq > max(self._seen_sessions.get(session, 0), old.seq if old else 0):
                self._warn_of_a_twin(session)

    def _report_rejection(self, session: str, mark: Mark, old: Mark | None, *, is_first_look: bool) -> None:
        known = old.rejected if old is not None else 0
        if mark.rejected > known and not (is_first_look and session != self.session):
            self._say("delta_rejected", {"seq": mark.seq, "session": session, "reason": mark.reason or "unknown"})

    def _warn_of_a_twin(self, session: str) -> None:
        if "twin" not in self._said:
            self._said.add("twin")
            self._log(
                "WARNING",
                f"another machine sends deltas as node {self.node!r} (session {session}): two nodes of one name read "
                "the same data. Give each its own distributed.node_id",
            )

    # ------------------------------------------------------------------ small things

    def _set_base(self, values: Mapping[str, Tensor], *, own: Tensors | None) -> None:
        """Replace the base; `own` are the values of all that is exchanged, where nobody else has them."""
        self._spare = self._own_base or self._spare
        self._base, self._own_base = self._only_trained(values), own

    def _only_trained(self, values: Mapping[str, Tensor]) -> Tensors:
        return {name: values[name] for name in self._trained}

    def _log(self, level: str, message: str) -> None:
        self._say("log", {"level": level, "message": message})


def _pending_tree(pending: _Pending) -> dict[str, Any]:
    return {
        "session": pending.id.session,
        "seq": pending.id.seq,
        "trained": position_tree(pending.trained),
        "tensors": dict(pending.delta),
    }


def position_tree(position: Position) -> dict[str, int]:
    """A position as a checkpoint holds it."""
    return position._asdict()


def position_of(tree: Mapping[str, int]) -> Position:
    return Position(tree["step"], tree["samples"], tree["tokens"])


def _minus(left: Position, right: Position) -> Position:
    return Position(left.step - right.step, left.samples - right.samples, left.tokens - right.tokens)


def _less(values: Tensors, delta: Mapping[str, Tensor]) -> Tensors:
    return {name: value - delta[name] if name in delta else value for name, value in values.items()}


def _same(these: Mapping[str, Tensor], those: Mapping[str, Tensor]) -> bool:
    return all(torch.equal(tensor, those[name]) for name, tensor in these.items())
