"""The master: when a round is due, which deltas it takes, and how it becomes a version.

Everything that a master knows is in the store. In memory it holds the version that it read or made last. If it cannot
be sure of that (a request failed during a publication, another master was faster), it reads the version again.
"""

from __future__ import annotations

import hashlib
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from speedtronic.distributed.codec import make_codec
from speedtronic.distributed.delta import Delta, DeltaHeader, Refusal, admit, max_delta_bytes
from speedtronic.distributed.packed_tensors import pack_tensors, unpack_blob
from speedtronic.distributed.protocol import (
    DELTAS,
    MANIFEST_LIMIT,
    MOMENTUM,
    MOST_COPIES,
    PROTOCOL,
    WEIGHTS,
    Blob,
    DeltaId,
    Manifest,
    Mark,
    Outer,
    Rejection,
    copy_name,
    find_head,
    head_name,
    list_all,
    momentum_name,
    parse_blob_version,
    parse_delta_name,
    put_own,
    read_blob,
    read_manifest,
    weights_name,
)
from speedtronic.distributed.requests import Delete, EventSink, Get, Procedure, Put
from speedtronic.distributed.schema import Schema, Tensors, TensorType
from speedtronic.distributed.stores.base import Entry
from speedtronic.errors import StoreContentError, StoreError

RECENT_ROUNDS = 5  # a node that was in one of the last five rounds takes part
DOUBTFUL_LOOKS = 10  # after so many looks a torn or missing delta is given up
LONG_WAIT = 10  # looks, after which a warning says that a synchronous round is incomplete
_MOST_REMEMBERED = 4096  # versions
_LONGEST_REASON = 200  # characters
_MOST_IN_A_VERSION = 1024  # deltas; the rest waits for the next version, so that a manifest stays small enough to read
_LARGEST_STEP = 2.0**40  # tokens of one inner step


@dataclass(frozen=True)
class MasterSettings:
    """How rounds are formed and what they do. The fields are named as in the `distributed` section.

    Attributes:
        outer_lr: η of the outer step. None: 1.0, or 0.7 if rounds are synchronous.
        outer_momentum: μ of it. None: 0.5, or 0.9 if rounds are synchronous.
        outer: name of the outer optimizer.
        codec: name of the encoding of the deltas.
        expected_nodes: how many nodes take part. None: those in the last five rounds.
        quorum: a round starts when deltas of so many nodes are there. None: half the expected ones.
        grace: seconds after which a round starts without quorum. None: as long as the fastest node trains for a delta;
            never, if rounds are synchronous.
        max_staleness: age in rounds beyond which a delta is refused. None: at no age.
        keep_versions: how many versions of the weights stay in the store.
        poll_interval: seconds between looks; also the grace time while no node's speed is known.

    Raises:
        ValueError: a value is out of range.
    """

    outer_lr: float | None = None
    outer_momentum: float | None = None
    outer: str = "nesterov"
    codec: str = "fp32"
    expected_nodes: int | None = None
    quorum: int | None = None
    grace: float | None = None
    max_staleness: float | None = None
    keep_versions: int = 8
    poll_interval: float = 60.0

    def __post_init__(self) -> None:
        counts = {"expected_nodes": self.expected_nodes, "quorum": self.quorum, "keep_versions": self.keep_versions}
        for key, count in counts.items():
            if count is not None and count < 1:
                raise ValueError(f"{key} must be at least 1, not {count}")
        amounts = {"grace": self.grace, "max_staleness": self.max_staleness, "poll_interval": self.poll_interval}
        for key, amount in amounts.items():
            if amount is not None and not 0.0 <= amount < math.inf:
                raise ValueError(f"{key} must be 0 or a positive number, not {amount}")
        if self.quorum is not None and self.expected_nodes is not None and self.quorum > self.expected_nodes:
            raise ValueError(f"a quorum of {self.quorum} is more than expected_nodes, which is {self.expected_nodes}")

    @property
    def synchronous(self) -> bool:
        """Whether a round waits for all nodes."""
        return self.quorum is not None and self.quorum == self.expected_nodes

    @property
    def lr(self) -> float:
        """η, with its default filled in."""
        return self.outer_lr if self.outer_lr is not None else (0.7 if self.synchronous else 1.0)

    @property
    def momentum(self) -> float:
        """μ, with its default filled in."""
        return self.outer_momentum if self.outer_momentum is not None else (0.9 if self.synchronous else 0.5)


class OuterOptimizer(Protocol):
    """Moves weights by pseudo-gradients, which point from the nodes' new weights back to their old ones."""

    @property
    def name(self) -> str:
        """What `distributed.outer` calls it."""

    def step(self, state: Mapping[str, Tensor], delta: Mapping[str, Tensor], fraction: float = 1.0) -> None:
        """Move weights, in place.

        Args:
            state: the weights. Tensors that `delta` does not name stay as they are.
            delta: the mean pseudo-gradient, of every trained tensor, in float32 or complex64.
            fraction: f, the fraction of the expected weight that the round brought.

        Raises:
            ValueError: names or shapes are not those of the optimizer's weights, or f is not in (0, 1]. Nothing was
                changed.
        """

    def tensors(self) -> Tensors:
        """The tensors of its state, under names of its own. They are not copies: the next step changes them."""

    def scalars(self) -> dict[str, float]:
        """The numbers of its state."""

    def load(self, tensors: Mapping[str, Tensor], scalars: Mapping[str, float]) -> None:
        """Continue from the state of another optimizer of this kind; the values are copied.

        Raises:
            ValueError: the state is not of this optimizer. Nothing was changed.
        """


# --- Rules: which nodes take part, when a round starts, how much a delta weighs


def recent_marks(head: Manifest) -> dict[str, Mark]:
    """By node, the last mark of each that has contributed to one of the last rounds."""
    recent: dict[str, Mark] = {}
    for key, mark in head.marks.items():
        node = key.partition("/")[0]
        contributes = mark.rejected < mark.seq and head.rounds - mark.rounds < RECENT_ROUNDS
        if contributes and (node not in recent or recent[node].version < mark.version):
            recent[node] = mark
    return recent


def expected_nodes(head: Manifest, present: Iterable[str], settings: MasterSettings) -> int:
    """How many nodes a whole round has: as configured, or those of the last rounds and those present now."""
    return settings.expected_nodes or max(1, len(recent_marks(head).keys() | set(present)))


def quorum(head: Manifest, present: Iterable[str], settings: MasterSettings) -> int:
    return settings.quorum or -(-expected_nodes(head, present, settings) // 2)


def grace(head: Manifest, settings: MasterSettings) -> float | None:
    """Seconds that waiting deltas wait for a quorum; None: for as long as it takes."""
    if settings.grace is not None or settings.synchronous:
        return settings.grace
    return min((mark.seconds for mark in recent_marks(head).values()), default=settings.poll_interval)


def per_step(header: DeltaHeader) -> float:
    """n of a delta: the tokens, of data without them the samples, of one inner step.

    The number of inner steps is not part of the weight: a delta grows with it by itself. A header's claim is bounded,
    so that a weighted sum cannot leave float32.
    """
    return min(max(1.0, (header.tokens or header.samples) / header.steps), _LARGEST_STEP)


def staleness_weight(rounds: float) -> float:
    """What is left of a delta's weight at this age: (1 + r)^(-1/2)."""
    return float((1.0 + rounds) ** -0.5)


# --- Publication


def commit(manifest: Manifest) -> Procedure[bool]:
    """Create a manifest, and so the version; false if another master was faster.

    The answer to the creation decides nothing: it may be lost, or belong to the repetition of a request that had
    succeeded. The nonce of the manifest that stands there afterwards tells which master created it.
    """
    data = manifest.to_bytes()
    if len(data) > MANIFEST_LIMIT:
        raise StoreContentError(f"a manifest of {len(data)} bytes is too large to read; use a new distributed.repo_id")
    yield from Put(head_name(manifest.version), data)
    standing = yield from read_manifest(manifest.version)
    if standing is None:
        raise StoreContentError(f"{head_name(manifest.version)} cannot be read after it was created")
    return standing.nonce == manifest.nonce


def publish_tensors(name: str, tensors: Mapping[str, Tensor]) -> Procedure[Blob]:
    """Put tensors into the store, and return the manifest's entry for them."""
    data = pack_tensors(tensors, {})
    path = yield from put_own(name, data)
    return Blob(path=path, size=len(data), sha256=hashlib.sha256(data).hexdigest())


def sweep(entries: Iterable[Entry], head: Manifest) -> Procedure[None]:
    """Delete the deltas that a committed version has processed.

    A stale master does no harm here: what its old head covers, every later one covers.
    """
    for entry in entries:
        delta = parse_delta_name(entry.name)
        if delta is not None and head.has_processed(delta):
            yield from Delete(entry.name)


def prune(head: Manifest, kept: set[str]) -> Procedure[None]:
    """Delete weights and momentum that no kept version names.

    Objects for a version beyond the head may still be named: their master is publishing. For a version up to the head
    the manifest exists, so an object that it does not name never will be.
    """
    for prefix in (WEIGHTS, MOMENTUM):
        for entry in (yield from list_all(prefix)):
            version = parse_blob_version(entry.name)
            if version is not None and version <= head.version and entry.name not in kept:
                yield from Delete(entry.name)


# --- A round


class _Candidate(NamedTuple):
    """A delta that may be next in its session.

    Attributes:
        delta: its identity.
        entries: its copies that were listed.
        is_last: whether no later one of its session was listed.
        listed: the first number from this one on that was listed.
    """

    delta: DeltaId
    entries: tuple[Entry, ...]
    is_last: bool
    listed: int


@dataclass
class _Suspect:
    """A delta that is torn or missing, and perhaps still on its way.

    Attributes:
        entries: its copies that were listed then. While they are the same, it is not read again.
        torn: whether there was something.
        looks: how often it was found like this.
    """

    entries: tuple[Entry, ...]
    torn: bool
    looks: int = 1

    def is_hopeless(self, candidate: _Candidate) -> bool:
        """Whether nothing better will come: a node sends a delta only when the one before is whole in the store."""
        return self.looks >= DOUBTFUL_LOOKS or (self.torn and not candidate.is_last)


class _PastVersion(NamedTuple):
    """What a master remembers of a version."""

    rounds: float
    blobs: tuple[str, ...]


@dataclass
class _Round:
    """A round as it is put together: one running sum, whatever the number of deltas.

    Attributes:
        head: the version on which it builds.
        sum: of w·Δ, and of w·(b - B) for averaged buffers.
        weights_of: by node, the w of each of its deltas, in units of `unit`.
        newest: the buffers that are taken from the newest delta, and in `newest_base` the version it is based on.
        unit: n of the first delta. While all are equal, every weight is exactly 1.
        per_step: n by node.
        marks: of the sessions that moved; their `rounds` are known when the round is complete.
        applied, rejected: the deltas that entered, and those that did not.
    """

    head: Manifest
    sum: Tensors = field(default_factory=dict)
    newest: Tensors = field(default_factory=dict)
    newest_base: int = -1
    weights_of: dict[str, list[float]] = field(default_factory=dict)
    unit: float | None = None
    per_step: dict[str, float] = field(default_factory=dict)
    marks: dict[str, Mark] = field(default_factory=dict)
    applied: list[DeltaId] = field(default_factory=list)
    rejected: list[Rejection] = field(default_factory=list)

    def mark(self, delta: DeltaId) -> Mark:
        """The mark of a delta's session, as this round has it so far."""
        return self.marks.get(delta.session_key) or self.head.mark(delta)

    def add(self, delta: Delta, age: float, schema: Schema, weights: Tensors) -> None:
        """Add up a delta of an age in rounds. `weights` are those of the head."""
        header = delta.header
        # w = n · (1 + r)^(-1/2), with n in units of the first delta's n, so that equal nodes weigh exactly 1.
        n = per_step(header)
        self.unit = self.unit or n
        self.per_step[header.node] = n
        weight = n / self.unit * staleness_weight(age)
        self.weights_of.setdefault(header.node, []).append(weight)

        for name in schema.names("trained"):
            self._add(name, delta.tensors[name], weight)
        for name in schema.names("average"):
            # What the buffer changed by. Zero where it is equal, also for the infinite values of a mask.
            local, value = delta.buffers[name], weights[name]
            self._add(name, (local - value).masked_fill_(local == value, 0.0), weight)
        # Integer buffers cannot be averaged: the delta with the newest base gives them.
        if header.base_version >= self.newest_base:
            self.newest_base = header.base_version
            self.newest = {name: delta.buffers[name].clone() for name in schema.names("newest")}

    def _add(self, name: str, value: Tensor, weight: float) -> None:
        if name not in self.sum:
            self.sum[name] = torch.zeros_like(value)
        self.sum[name].add_(value, alpha=weight)

    def settle(self, delta: DeltaId, header: DeltaHeader | None, size: int, time: str, reason: str | None) -> None:
        """Note that a delta is processed: it was added up, or refused for a reason."""
        # A refused delta advances the mark too: it is never looked at again.
        mark = self.mark(delta)
        moved: dict[str, Any] = {
            "seq": delta.seq,
            "version": self.head.version + 1,
            "time": time,
            "bytes": mark.bytes + size,
        }
        if header is not None:
            moved |= header.position._asdict() | {"tokens_per_step": per_step(header), "seconds": header.seconds}
        if reason is None:
            self.applied.append(delta)
        else:
            reason = reason[:_LONGEST_REASON]
            moved |= {"rejected": mark.rejected + 1, "reason": reason}
            self.rejected.append(Rejection(name=delta.name, reason=reason))
        self.marks[delta.session_key] = mark.model_copy(update=moved)

    @property
    def weight(self) -> float:
        """The sum of w over nodes. Deltas of one node follow each other: together they are one larger one."""
        return sum(statistics.fmean(weights) for weights in self.weights_of.values())

    def mean(self, schema: Schema) -> Tensors:
        """The weighted means, in the memory of the sums: of deltas over nodes, of buffers over all that was sent."""
        # Deltas of one node add up to one larger step, so Δ is divided by a weight per node. Buffers are values, not
        # steps, so they are divided by a weight per delta.
        sent = sum(sum(weights) for weights in self.weights_of.values())
        averages = set(schema.names("average"))
        return {name: total.div_(sent if name in averages else self.weight) for name, total in self.sum.items()}

    def fraction(self, settings: MasterSettings) -> float:
        """f: the weight of this round, as a fraction of a whole one's: all nodes, each with the median n, at r = 0."""
        if self.unit is None:
            return 0.0
        # The nodes of this round tell their n themselves; of absent ones the last mark tells it.
        known = {node: mark.tokens_per_step for node, mark in recent_marks(self.head).items()} | self.per_step
        weight = self.weight * (self.unit / statistics.median(known.values()))
        return min(1.0, weight / expected_nodes(self.head, self.per_step, settings))


# --- The master


class Master:
    """Applies deltas to the global weights and publishes them, as procedures over the store.

    For a model of size S it holds 2 S, 4 S at most while a round runs (with an outer optimizer that keeps one tensor
    for each of the model's), whatever the number of nodes.

    Args:
        schema: of the model.
        initial: its values, for version 0 if there is none yet; every entry of the schema, as `snapshot` gives them.
            They belong to the master from now on, and are written in place.
        settings: see `MasterSettings`.
        new_outer: makes a fresh outer optimizer for the trained weights.
        nonce: gives another text (letters, digits, '-') at each call, in any process.
        clock: monotonic, in seconds; measures grace.
        now: the time of day, UTC, ISO 8601, for people to read.
        say: receives events and log messages.
    """

    def __init__(
        self,
        schema: Schema,
        initial: Tensors,
        settings: MasterSettings,
        *,
        new_outer: Callable[[Mapping[str, Tensor]], OuterOptimizer],
        nonce: Callable[[], str],
        clock: Callable[[], float],
        now: Callable[[], str],
        say: EventSink,
    ) -> None:
        self.weights = initial
        self._schema = schema
        self._settings = settings
        self._new_outer = new_outer
        self.outer = new_outer(self._trained_weights())
        self._codec = make_codec(settings.codec)
        self._limit = max_delta_bytes(schema, self._codec)
        self._nonce = nonce
        self._clock = clock
        self._now = now
        self._say = say
        self._head: Manifest | None = None
        self._past: dict[int, _PastVersion] = {}
        self._suspects: dict[DeltaId, _Suspect] = {}
        self._waiting_since: float | None = None
        self._warned_at: int | None = None  # the version at which a warning said that the round is incomplete
        self._reported: set[type[StoreError]] = set()  # errors of deletions that were reported

    @property
    def head(self) -> Manifest | None:
        """The version of `weights` and `outer`; None while they belong to no version."""
        return self._head

    # --- Taking over the state of the store

    def adopt(self) -> Procedure[None]:
        """Take over the newest version; if there is none, make the initial weights version 0.

        Raises:
            StoreContentError: the store holds another model, or a version that cannot be read.
        """
        head = yield from find_head(None)
        if head is not None:
            head = yield from self._load(head)
            self._log("INFO", f"continues from version {head.version} of the store")
            return

        # The store is empty: commit the initial weights. Another master may do the same at this moment.
        nonce = self._nonce()
        weights = yield from publish_tensors(weights_name(0, nonce), self.weights)
        first = Manifest(
            protocol=PROTOCOL,
            version=0,
            parent=None,
            nonce=nonce,
            time=self._now(),
            schema_id=self._schema.fingerprint,
            weights=weights,
            momentum=None,
            outer=Outer(name=self.outer.name, scalars=dict(self.outer.scalars())),
            marks={},
            applied=(),
            rejected=(),
            fraction=0.0,
            rounds=0.0,
        )
        if (yield from commit(first)):
            self._set_head(first)
            self._log("INFO", "published the initial weights as version 0")
        else:
            yield from self.adopt()

    def _load(self, head: Manifest) -> Procedure[Manifest]:
        """Read weights and momentum of a version, or of a newer one if another master has pruned it meanwhile."""
        while True:
            if head.schema_id != self._schema.fingerprint:
                raise StoreContentError(
                    "the store holds another model: names, shapes or dtypes of its weights differ from this model's; "
                    "configure the model of the store, or another distributed.repo_id"
                )
            self._head = None  # weights and momentum belong to no version until both are read
            if (yield from self._read_version(head)):
                self._set_head(head)
                return head
            newer = yield from find_head(head)
            if newer is None:
                raise StoreContentError(
                    f"weights or momentum of version {head.version} ({head.weights.path}) are missing or damaged: "
                    "restore them from a backup, or continue with another distributed.repo_id and run.init_from"
                )
            head = newer

    def _read_version(self, head: Manifest) -> Procedure[bool]:
        """Read weights and momentum of a version; false if they are missing or damaged."""
        weights = yield from read_blob(head.weights)
        if weights is None:
            return False
        for name, value in unpack_blob(head.weights, weights, self._schema.types()).items():
            self.weights[name].copy_(value)
        del weights

        # The outer optimizer continues with its momentum, unless the configuration now names another one.
        self.outer = self._new_outer(self._trained_weights())
        if head.outer.name != self.outer.name:
            self._log("WARNING", f"{self.outer.name} starts without the state of {head.outer.name}, used until now")
            return True
        if head.momentum is None:
            return True
        momentum = yield from read_blob(head.momentum)
        if momentum is None:
            return False
        types = {name: TensorType(value.dtype, tuple(value.shape)) for name, value in self.outer.tensors().items()}
        try:
            self.outer.load(unpack_blob(head.momentum, momentum, types), head.outer.scalars)
        except ValueError as error:
            raise StoreContentError(f"{head_name(head.version)}: {error}") from error
        return True

    def _trained_weights(self) -> Tensors:
        return {name: self.weights[name] for name in self._schema.names("trained")}

    def _set_head(self, head: Manifest) -> None:
        self._head = head
        self._remember(head)
        self._waiting_since = None

    # --- Rounds

    def poll(self) -> Procedure[int]:
        """Look once for deltas, and make a version of them if a round is due.

        If nothing is new this is two requests, whatever the history.

        Returns:
            How many deltas entered.
        """
        # The head: read again if the last publication did not end, or if another master made a version.
        if self._head is None:
            yield from self.adopt()
        elif (newer := (yield from find_head(self._head))) is not None:
            yield from self._load(newer)
        head = self._head
        assert head is not None, "adopted"

        # The deltas: processed ones are deleted, also those that an earlier master left.
        entries = yield from list_all(DELTAS)
        yield from self._tidy(sweep(entries, head))
        candidates = self._candidates(entries, head)
        if not self._is_due(candidates, head):
            return 0

        # The round: each candidate enters or is refused, one at a time, in the order of its identity.
        round_ = _Round(head)
        for candidate in candidates[:_MOST_IN_A_VERSION]:
            yield from self._process(candidate, round_)
        if not round_.marks:
            return 0
        version = yield from self._publish(round_)
        if version is None:
            return 0

        # Only a committed version allows deletions: of the deltas that it has processed, and of old weights.
        yield from self._tidy(sweep(entries, version))
        yield from self._tidy(self._prune(version))
        return len(round_.applied)

    def _candidates(self, entries: Iterable[Entry], head: Manifest) -> list[_Candidate]:
        """The deltas that come next in their sessions, in sorted order."""
        listed: defaultdict[tuple[str, str], defaultdict[int, list[Entry]]] = defaultdict(lambda: defaultdict(list))
        for entry in entries:
            delta = parse_delta_name(entry.name)
            if delta is not None and not head.has_processed(delta):
                listed[delta.node, delta.session][delta.seq].append(entry)
        self._suspects = {
            delta: suspect for delta, suspect in self._suspects.items() if (delta.node, delta.session) in listed
        }

        # Numbers have no gaps in a session, so the walk starts after the mark and stops at the first missing one.
        candidates: list[_Candidate] = []
        for (node, session), copies in sorted(listed.items()):
            last = max(copies)
            for seq in range(head.mark(DeltaId(node, session, 0)).seq + 1, last + 1):
                candidate = _Candidate(
                    DeltaId(node, session, seq),
                    entries=tuple(copies[seq]) if seq in copies else (),
                    is_last=seq == last,
                    listed=seq if seq in copies else min(number for number in copies if number > seq),
                )
                suspect = self._suspects.get(candidate.delta)
                if suspect is not None and suspect.entries == candidate.entries:
                    # It was torn or missing at the last look, and nothing has changed.
                    suspect.looks += 1
                    if not suspect.is_hopeless(candidate):
                        break
                candidates.append(candidate)
                if not candidate.entries:
                    break  # A listing may lag behind: the store is asked for this one by name, and the rest waits.
        return candidates

    def _is_due(self, candidates: list[_Candidate], head: Manifest) -> bool:
        """Whether a round starts now: at a quorum of nodes, or after the grace time."""
        present = {candidate.delta.node for candidate in candidates}
        if not present:
            self._waiting_since = None
            return False
        # Grace is measured from the first look at which deltas waited.
        if self._waiting_since is None:
            self._waiting_since = self._clock()
        needed = quorum(head, present, self._settings)
        if len(present) >= needed:
            return True
        patience = grace(head, self._settings)
        waited = self._clock() - self._waiting_since
        if patience is not None:
            return waited >= patience
        if waited >= LONG_WAIT * self._settings.poll_interval and self._warned_at != head.version:
            self._warned_at = head.version
            self._log(
                "WARNING",
                f"version {head.version + 1} waits for deltas of {needed} nodes and has those of "
                f"{', '.join(sorted(present))}; distributed.grace limits how long",
            )
        return False

    def _process(self, candidate: _Candidate, round_: _Round) -> Procedure[None]:
        """Let a delta enter the round, or refuse it, if all before it in its session are processed."""
        delta, head = candidate.delta, round_.head
        if round_.mark(delta).seq + 1 != delta.seq:
            return  # one before it may still come
        fetched = yield from self._fetch(candidate, head)
        if fetched is None:
            return
        outcome, size = fetched
        header, reason = None, None
        if isinstance(outcome, Refusal):
            reason = outcome.reason
            if outcome.damaged and not self._suspects[delta].torn:
                # It is missing for good. The whole gap that it begins is refused with it: otherwise, an object with a
                # great number in its name would cost one version for each number of the gap.
                delta = delta._replace(seq=max(delta.seq, candidate.listed - 1))
        else:
            # Its age is counted in rounds, not in versions: a small quorum makes many versions of one round.
            header = outcome.header
            base = yield from self._recall(header.base_version)
            limit = self._settings.max_staleness
            if base is None:
                reason = "its base is not a version of this store"
            elif limit is not None and head.rounds - base.rounds > limit:
                age = head.rounds - base.rounds
                reason = f"stale: {age:.3g} rounds old, and distributed.max_staleness is {limit:g}"
            else:
                round_.add(outcome, head.rounds - base.rounds, self._schema, self.weights)
        round_.settle(delta, header, size, self._now(), reason)
        if reason is not None:
            self._log("WARNING", f"refused {candidate.delta.name}: {reason}")

    def _fetch(self, candidate: _Candidate, head: Manifest) -> Procedure[tuple[Delta | Refusal, int] | None]:
        """Read a delta: the first of its copies that is not torn, and its size. None while it may still come."""
        delta, entries = candidate.delta, candidate.entries
        if entries and min(entry.size for entry in entries) > self._limit:
            reason = f"{entries[0].size} bytes; a delta of this model has at most {self._limit}"
            return Refusal(reason, damaged=False), 0
        averages = {name: self.weights[name] for name in self._schema.names("average")}
        # A node puts a copy under another name beside an object that its own upload tore.
        torn: str | None = None
        for copy in range(MOST_COPIES):
            data = yield from Get(copy_name(delta.name, copy), limit=self._limit)
            if data is None:
                break
            outcome = admit(data, delta, self._schema, self._codec, max_base_version=head.version, averages=averages)
            if isinstance(outcome, Delta) or not outcome.damaged:
                return outcome, len(data)
            torn = outcome.reason
            del data, outcome

        # Torn or missing: wait until nothing better will come.
        suspect = self._suspects.get(delta)
        if suspect is None or suspect.entries != entries:
            suspect = self._suspects[delta] = _Suspect(entries, torn is not None)
        if not suspect.is_hopeless(candidate):
            return None
        return Refusal(torn or "missing, although a later one of its session is there", damaged=True), 0

    def _publish(self, round_: _Round) -> Procedure[Manifest | None]:
        """Make a version of a round; None if another master made that version."""
        head = round_.head
        fraction = round_.fraction(self._settings)
        version, nonce = head.version + 1, self._nonce()
        weights, momentum, outer = head.weights, head.momentum, head.outer
        self._head = None  # until the commit is known, weights and momentum belong to no version

        # The outer step, then weights and momentum into the store, before the manifest that names them.
        if round_.applied:
            mean = round_.mean(self._schema)
            gradient = {name: mean[name] for name in self._schema.names("trained")}
            self.outer.step(self._trained_weights(), gradient, fraction)
            for name in self._schema.names("average"):
                self.weights[name].add_(mean[name], alpha=fraction)  # (1 - f)·B + f·mean; without momentum
            for name, value in round_.newest.items():
                self.weights[name].copy_(value)
            round_.sum.clear()
            del mean, gradient  # the memory of the sums is needed for the upload
            weights = yield from publish_tensors(weights_name(version, nonce), self.weights)
            state = self.outer.tensors()
            momentum = (yield from publish_tensors(momentum_name(version, nonce), state)) if state else None
            outer = Outer(name=self.outer.name, scalars=dict(self.outer.scalars()))

        # The manifest: marks, weights and momentum become true together, or not at all.
        rounds = head.rounds + fraction
        moved = {key: mark.model_copy(update={"rounds": rounds}) for key, mark in round_.marks.items()}
        manifest = Manifest(
            protocol=PROTOCOL,
            version=version,
            parent=head.sha256,
            nonce=nonce,
            time=self._now(),
            schema_id=head.schema_id,
            weights=weights,
            momentum=momentum,
            outer=outer,
            marks=head.marks | moved,
            applied=tuple(delta.name for delta in round_.applied),
            rejected=tuple(round_.rejected),
            fraction=fraction,
            rounds=rounds,
        )
        if not (yield from commit(manifest)):
            self._log("INFO", f"another master published version {version} first: that one is used, this one dropped")
            yield from self.adopt()
            return None
        self._set_head(manifest)
        self._say(
            "outer_step",
            {
                "version": version,
                "deltas": len(round_.applied),
                "nodes": len(round_.per_step),
                "fraction": fraction,
                "rounds": rounds,
                "rejected": len(round_.rejected),
            },
        )
        return manifest

    # --- Deletions, and what is remembered of versions

    def _tidy(self, deletions: Procedure[None]) -> Procedure[None]:
        """Delete what is no longer needed. Leftovers do no harm, and the next version tries again."""
        try:
            yield from deletions
        except StoreError as error:
            if type(error) not in self._reported:
                self._reported.add(type(error))
                self._log("WARNING", f"objects that are no longer needed could not be deleted: {error}")

    def _prune(self, head: Manifest) -> Procedure[None]:
        kept: set[str] = set()
        for version in range(max(0, head.version - self._settings.keep_versions + 1), head.version + 1):
            past = yield from self._recall(version)
            if past is not None:
                kept.update(past.blobs)
        yield from prune(head, kept)

    def _recall(self, version: int) -> Procedure[_PastVersion | None]:
        if version not in self._past:
            manifest = yield from read_manifest(version)
            if manifest is None:
                return None
            self._remember(manifest)
        return self._past[version]

    def _remember(self, manifest: Manifest) -> None:
        if len(self._past) >= _MOST_REMEMBERED:
            self._past.clear()
        blobs = (manifest.weights, manifest.momentum)
        paths = tuple(blob.path for blob in blobs if blob is not None)
        self._past[manifest.version] = _PastVersion(manifest.rounds, paths)

    def _log(self, level: str, message: str) -> None:
        self._say("log", {"level": level, "message": message})
