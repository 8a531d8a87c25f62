"""The master: when a round is due, which deltas it takes, and how it becomes a version.

Everything that a master knows is in the store. In memory it holds the version that it read or made last. If it cannot
be sure of that (a request failed during a publication, another master was faster), it reads the version again.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from speedtronic.distributed.averaging import Round, per_step
from speedtronic.distributed.codec import make_codec
from speedtronic.distributed.delta import (
    Delta,
    DeltaHeader,
    Refusal,
    admit,
    header_limit,
    max_delta_bytes,
    norm,
    read_header,
)
from speedtronic.distributed.marks import (
    CLIPPED,
    RECENT_ROUNDS,
    REFUSED,
    Marks,
    SessionKey,
    Settled,
    most_tokens,
    recent_marks,
    seconds_of_a_delta,
    taking_part,
    usual_norm,
)
from speedtronic.distributed.packed_tensors import TensorFormatError, pack_tensors, unpack_blob
from speedtronic.distributed.protocol import (
    DELTAS,
    MOMENTUM,
    MOST_COPIES,
    PROTOCOL,
    WEIGHTS,
    DeltaId,
    Manifest,
    check_head,
    check_identity,
    copy_name,
    create_identity,
    create_manifest,
    find_head,
    head_name,
    list_all,
    momentum_name,
    parse_blob_version,
    parse_delta_name,
    put_own,
    read_blob,
    read_past,
    weights_name,
)
from speedtronic.distributed.records import Blob, Outer, seconds_of
from speedtronic.distributed.requests import Delete, EventSink, Get, Procedure
from speedtronic.distributed.schema import Schema, Tensors, TensorType
from speedtronic.distributed.stores.base import Entry
from speedtronic.errors import StoreContentError, StoreError

HINTED_VERSIONS = 5  # the first ones, for which `expected_nodes` decides; afterwards who takes part decides
DOUBTFUL_LOOKS = 10  # after so many looks a torn or missing delta is given up
LONG_WAIT = 10  # looks, after which a warning says that a synchronous round is incomplete
_MOST_REMEMBERED = 4096  # versions
_MOST_REFUSED = 65_536  # sessions that nothing opened, whose refusals are remembered
_MOST_IN_A_VERSION = 1024  # deltas; the rest waits for the next version, so that a manifest stays small enough to read


@dataclass(frozen=True)
class MasterSettings:
    """How rounds are formed and what they do. The fields are named as in the `distributed` section.

    Attributes:
        outer_lr: η of the outer step. None: 1.0, or 0.7 if rounds are synchronous.
        outer_momentum: μ of it. None: 0.5, or 0.9 if rounds are synchronous.
        outer: name of the outer optimizer.
        codec: name of the encoding of the deltas.
        expected_nodes: how many nodes will take part. It decides for the first five versions, and in synchronous
            rounds; else those that took part lately and those that wait count (see `taking_part`).
        quorum: a round starts when deltas of so many nodes are there. None: half the expected ones. After five
            versions at most as many as take part, unless rounds are synchronous.
        grace: seconds after which a round starts without quorum. None: the median of what the nodes take for a whole
            delta; never, if rounds are synchronous.
        inner_steps: of a whole delta. None: as many as the nodes' last deltas had.
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
    inner_steps: int | None = None
    max_staleness: float | None = None
    keep_versions: int = 8
    poll_interval: float = 60.0

    def __post_init__(self) -> None:
        counts = {
            "expected_nodes": self.expected_nodes,
            "quorum": self.quorum,
            "inner_steps": self.inner_steps,
            "keep_versions": self.keep_versions,
        }
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


# --- Rules: which nodes take part, and when a round starts


def expected_nodes(head: Manifest, present: Iterable[str], settings: MasterSettings) -> int:
    """How many nodes a whole round has: as configured at first, later those that take part and those present."""
    hint = settings.expected_nodes
    if hint is not None and (settings.synchronous or head.version < HINTED_VERSIONS):
        return hint
    return max(1, len(taking_part(head) | set(present)))


def quorum(head: Manifest, present: Iterable[str], settings: MasterSettings) -> int:
    expected = expected_nodes(head, present, settings)
    if settings.quorum is None:
        return -(-expected // 2)
    if settings.synchronous or head.version < HINTED_VERSIONS:
        return settings.quorum
    return min(settings.quorum, expected)


def grace(head: Manifest, settings: MasterSettings) -> float | None:
    """Seconds that waiting deltas wait for a quorum; None: for as long as it takes."""
    if settings.grace is not None or settings.synchronous:
        return settings.grace
    usual = seconds_of_a_delta(recent_marks(head).values(), settings.inner_steps)
    return settings.poll_interval if usual is None else usual


# --- Publication


def publish_tensors(name: str, tensors: Mapping[str, Tensor], store: str | None) -> Procedure[Blob]:
    """Put tensors into the store of this identity, and return the manifest's entry for them."""
    data = pack_tensors(tensors, {})
    path = yield from put_own(name, data, store)
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
        is_last: whether none after it in its session is known of.
        gap_ends: the last number that is missing, if this one is.
        waits: whether anything of its session was listed.
    """

    delta: DeltaId
    entries: tuple[Entry, ...]
    is_last: bool
    gap_ends: int
    waits: bool


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


class _Fetched(NamedTuple):
    """What the store has of a delta.

    Attributes:
        outcome: the delta, or why none of its copies is admitted.
        size: in bytes.
        garbage: names of copies that nobody needs.
    """

    outcome: Delta | Refusal
    size: int
    garbage: tuple[str, ...] = ()


def _delete(names: Iterable[str]) -> Procedure[None]:
    for name in names:
        yield from Delete(name)


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
        store_id: identity of the store, if it is known, as a node knows it: an empty folder in its place gets no
            version then.
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
        store_id: str | None = None,
    ) -> None:
        self.weights = initial
        self._schema = schema
        self._settings = settings
        self._new_outer = new_outer
        self.outer = new_outer(self._trained_weights())
        self._codec = make_codec(settings.codec)
        self._limit = max_delta_bytes(schema, self._codec)
        self._largest = max_delta_bytes(schema, make_codec("fp32"))  # with any codec
        self._header_limit = header_limit(schema, self._codec)
        self._nonce = nonce
        self._clock = clock
        self._now = now
        self._say = say
        self._store_id = store_id
        self._head: Manifest | None = None
        self._known: Manifest | None = None  # the last head
        self._may_be_behind = False  # a delta tells of a newer version, which may lie beside its name
        self._past: dict[int, _PastVersion] = {}
        self._suspects: dict[DeltaId, _Suspect] = {}
        self._refused: dict[SessionKey, tuple[Settled, ...]] = {}  # of sessions that nothing opened
        self._seen: dict[DeltaId, float] = {}  # since when deltas wait
        self._warned_at: int | None = None  # the version at which a warning said that the round is incomplete
        self._differs_since: float | None = None  # rounds since when more or fewer nodes take part than expected
        self._clipped: set[str] = set()  # nodes of which a delta was scaled down
        self._beyond: set[str] = set()  # nodes whose last delta had a norm to be refused
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
        head = yield from self._newest()
        if head is not None:
            head = yield from self._load(head)
            yield from self._identify(head.store)
            self._log("INFO", f"continues from version {head.version} of the store")
            return

        # The store is empty: commit the initial weights. Another master may do the same at this moment.
        yield from self._identify(None)
        nonce = self._nonce()
        weights = yield from publish_tensors(weights_name(0, nonce), self.weights, self._store_id)
        first = Manifest(
            protocol=PROTOCOL,
            version=0,
            parent=None,
            nonce=nonce,
            time=self._now(),
            store=self._store_id,
            schema_id=self._schema.fingerprint,
            weights=weights,
            momentum=None,
            outer=Outer(name=self.outer.name, scalars=dict(self.outer.scalars())),
            nodes={},
            horizon=0,
            applied=(),
            rejected=(),
            fraction=0.0,
            rounds=0.0,
        )
        if (yield from create_manifest(first, None)):
            self._set_head(first)
            self._log("INFO", "published the initial weights as version 0")
        else:
            yield from self.adopt()

    def _newest(self) -> Procedure[Manifest | None]:
        if self._known is None:
            yield from check_identity(self._store_id)
            return (yield from find_head(None))
        newer = yield from find_head(self._known)
        if newer is None:
            yield from check_head(self._known)
        return newer or self._known

    def _identify(self, known: str | None) -> Procedure[None]:
        """Learn the identity of the store, and give it one if it has none: it is empty, or of protocol 1."""
        known = known or self._store_id  # where that is not found, the store is away: it gets no other identity
        if known is None:
            fresh = hashlib.sha256(self._nonce().encode()).hexdigest()[:32]
            known = yield from create_identity(fresh)
        self._store_id = known

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
                yield from check_head(head)
                yield from check_identity(head.store)  # the bare folder below a mount may hold that manifest
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
        self._head = self._known = head
        self._remember(head)

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
        elif (newer := (yield from find_head(self._head, beside=self._may_be_behind))) is not None:
            yield from self._load(newer)
        self._may_be_behind = False
        head = self._head
        assert head is not None, "adopted"

        # The deltas: processed ones are deleted, also those that an earlier master left.
        entries = yield from list_all(DELTAS)
        yield from self._tidy(sweep(entries, head))
        candidates = self._candidates(entries, head)
        seen = self._note(candidates)
        if not self._is_due(seen, head):
            return 0

        # The round: each candidate enters or is refused, one at a time, in the order of its identity.
        taken, left = candidates[:_MOST_IN_A_VERSION], candidates[_MOST_IN_A_VERSION:]
        round_ = yield from self._begin(head, taken)
        for candidate in taken:
            yield from self._process(candidate, round_)
        alone = self._refusals_alone(round_)
        self._refused = dict([*alone.marks.refused.items()][-_MOST_REFUSED:])
        # What nobody can admit is deleted at once, unless a version will cover it.
        garbage = [name for delta, names in round_.garbage.items() if not round_.marks.is_open(delta) for name in names]
        yield from self._tidy(_delete(garbage))

        # Only deltas that entered make a quorum, with those that nobody has looked at yet. Without one, refusals are
        # still said to nodes whose sessions are open.
        waiting = self._since([*round_.applied, *(candidate.delta for candidate in left if candidate.waits)])
        if not round_.applied or not self._is_enough(waiting, head):
            round_ = alone
        version = None
        if round_.marks.moved:
            version = yield from self._publish(round_, waiting=seen.keys())
        if version is None:
            return 0

        # Only a committed version allows deletions: of the deltas that it has processed, and of old weights.
        yield from self._tidy(sweep(entries, version))
        yield from self._tidy(self._prune(version))
        return len(round_.applied)

    def _candidates(self, entries: Iterable[Entry], head: Manifest) -> list[_Candidate]:
        """The deltas that come next in their sessions, in sorted order."""
        self._forget(head)
        listed: defaultdict[SessionKey, defaultdict[int, list[Entry]]] = defaultdict(lambda: defaultdict(list))
        for entry in entries:
            delta = parse_delta_name(entry.name)
            if delta is not None and not head.has_processed(delta):
                listed[delta.node, delta.session][delta.seq].append(entry)
        # Of a session that has a successor more may come, though nothing is listed.
        for node, mark in head.nodes.items():
            for session, known in mark.sessions.items():
                if known.last is not None:
                    listed[node, session].setdefault(known.last, [])
        self._suspects = {
            delta: suspect for delta, suspect in self._suspects.items() if (delta.node, delta.session) in listed
        }

        # Numbers have no gaps in a session, so the walk starts after the mark and stops at the first missing one.
        candidates: list[_Candidate] = []
        for (node, session), copies in sorted(listed.items()):
            last = max(copies)
            for seq in range(self._processed(head, node, session) + 1, last + 1):
                found = tuple(copies.get(seq, ()))
                candidate = _Candidate(
                    DeltaId(node, session, seq),
                    entries=found,
                    is_last=seq == last,
                    gap_ends=seq if found else min((n for n in copies if n > seq and copies[n]), default=last + 1) - 1,
                    waits=any(copies.values()),
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

    def _processed(self, head: Manifest, node: str, session: str) -> int:
        """The number of a session's last delta that needs no further look."""
        known = head.session(node, session)
        if known is not None:
            return known.seq
        refused = self._refused.get((node, session))
        return refused[-1].delta.seq if refused else 0

    def _forget(self, head: Manifest) -> None:
        """Forget refusals that a version knows of, or that may be judged otherwise now."""
        for (node, session), ones in [*self._refused.items()]:
            kept = [*itertools.takewhile(lambda one: one.again is None or head.version < one.again, ones)]
            if head.has_processed(ones[0].delta) or head.session(node, session) is not None or not kept:
                del self._refused[node, session]
            else:
                self._refused[node, session] = tuple(kept)

    def _note(self, candidates: list[_Candidate]) -> dict[str, float]:
        """Since when deltas of each node wait, by this master's clock."""
        now = self._clock()
        self._seen = {one.delta: self._seen.get(one.delta, now) for one in candidates if one.waits}
        return self._since(self._seen)

    def _since(self, deltas: Iterable[DeltaId]) -> dict[str, float]:
        """By node, since when the first of some deltas waits."""
        now = self._clock()
        since: dict[str, float] = {}
        for delta in deltas:
            since[delta.node] = min(self._seen.get(delta, now), since.get(delta.node, now))
        return since

    def _is_enough(self, seen: Mapping[str, float], head: Manifest) -> bool:
        """Whether the deltas of some nodes make a round, given since when they wait: a quorum, or the grace time."""
        if len(seen) >= quorum(head, seen, self._settings):
            return True
        patience = grace(head, self._settings)
        return patience is not None and self._clock() - min(seen.values()) >= patience

    def _is_due(self, seen: Mapping[str, float], head: Manifest) -> bool:
        """Whether a round starts now."""
        if not seen:
            return False
        if self._is_enough(seen, head):
            return True
        waited = self._clock() - min(seen.values())
        endless = grace(head, self._settings) is None
        if endless and waited >= LONG_WAIT * self._settings.poll_interval and self._warned_at != head.version:
            self._warned_at = head.version
            self._log(
                "WARNING",
                f"version {head.version + 1} waits for deltas of {quorum(head, seen, self._settings)} nodes and has "
                f"those of {', '.join(sorted(seen))}; distributed.grace limits how long",
            )
        return False

    def _begin(self, head: Manifest, candidates: Iterable[_Candidate]) -> Procedure[Round]:
        round_ = Round(head, self._marks(head), recent=recent_marks(head))
        claims = [mark.tokens_per_step for mark in round_.recent.values() if mark.tokens_per_step > 0]
        if not claims:
            # Nothing is known of any node. What they claim is read first, so that none carries the round by its claim.
            by_node = {one.delta.node: one.entries[0].name for one in reversed([*candidates]) if one.entries}
            if len(by_node) > 1:
                for name in by_node.values():
                    data = yield from Get(name, limit=8 + self._header_limit, partial=True)
                    with suppress(TensorFormatError):
                        claims.append(per_step(read_header(data or b"", limit=self._header_limit)))
        round_.most_tokens = most_tokens(claims)
        return round_

    def _marks(self, head: Manifest) -> Marks:
        return Marks(head, self._refused, seconds_of(self._now()))

    def _refusals_alone(self, round_: Round) -> Round:
        """A round of the refusals that come before any delta that entered."""
        alone = Round(round_.head, self._marks(round_.head))
        entered: set[SessionKey] = set()
        for one in round_.settled:
            session = one.delta.node, one.delta.session
            if one.reason is None:
                entered.add(session)
            elif session not in entered:
                alone.settle(one)
        return alone

    def _process(self, candidate: _Candidate, round_: Round) -> Procedure[None]:
        """Let a delta enter the round, or refuse it, if all before it in its session are processed."""
        delta = candidate.delta
        if not round_.marks.is_next(delta):
            return  # one before it may still come
        fetched = yield from self._fetch(candidate)
        if fetched is None:
            return
        outcome, size, garbage = fetched
        if isinstance(outcome, Refusal):
            if outcome.damaged and not self._suspects[delta].torn:
                # It is missing for good. The whole gap that it begins is refused with it: otherwise, an object with a
                # great number in its name would cost one version for each number of the gap.
                delta = delta._replace(seq=max(delta.seq, candidate.gap_ends))
            settled = Settled(delta, None, size, outcome.reason)
            round_.garbage[delta] = garbage
        else:
            settled = yield from self._judge(outcome, size, round_)
        round_.settle(settled)
        if settled.reason is not None:
            self._log("WARNING", f"refused {candidate.delta.name}: {settled.reason}")

    def _judge(self, delta: Delta, size: int, round_: Round) -> Procedure[Settled]:
        """Let a sound delta enter, unless its base, its session or its norm do not suit the head."""
        head, header = round_.head, delta.header

        def refused(reason: str, *, header: DeltaHeader | None = header, again: int | None = None) -> Settled:
            return Settled(delta.header.id, header, size, reason, again=again)

        base = None
        if header.base_version <= head.version:
            base = yield from self._recall(header.base_version)
        else:
            self._may_be_behind = True
        if base is None:
            reason = f"its base, version {header.base_version}, is not a version of this store"
            return refused(reason, again=header.base_version)
        if (obstacle := round_.marks.obstacle(header)) is not None:
            return refused(obstacle, header=None)
        # Its age is counted in rounds, not in versions: a small quorum makes many versions of one round.
        age, limit = head.rounds - base.rounds, self._settings.max_staleness
        if limit is not None and age > limit:
            return refused(f"stale: {age:.3g} rounds old, and distributed.max_staleness is {limit:g}")

        # A node that diverges moves the others only so far.
        length, usual = norm(delta.tensors), usual_norm(round_.recent.values(), header.steps)
        scale = 1.0
        self._beyond.discard(header.node)
        if usual is not None and length > REFUSED * usual:
            self._beyond.add(header.node)
            # Where most nodes do so, what is usual has changed: a finished run goes on with a new learning rate.
            if 2 * len(self._beyond) <= len(round_.recent.keys() | self._beyond):
                return refused(f"its norm is {length:.3g}, more than {REFUSED:g} times the usual {usual:.3g}")
        if usual is not None and length > CLIPPED * usual:
            scale = CLIPPED * usual / length
            if header.node not in self._clipped:
                self._clipped.add(header.node)
                self._log(
                    "WARNING",
                    f"{header.id.name} has a norm of {length:.3g}, more than {CLIPPED:g} times the usual {usual:.3g}: "
                    f"it counts as {CLIPPED:g} times; later ones of {header.node} likewise, without a word",
                )
        round_.add(delta, age, scale, self._schema, self.weights)
        return Settled(header.id, header, size, None, tokens_per_step=round_.tokens(header), norm=length * scale)

    def _fetch(self, candidate: _Candidate) -> Procedure[_Fetched | None]:
        """Read a delta: the first of its copies that is admitted. None while one may still come."""
        delta, entries = candidate.delta, candidate.entries
        sizes = {entry.name: entry.size for entry in entries}
        averages = {name: self.weights[name] for name in self._schema.names("average")}
        # A node puts a copy under another name beside what its own upload tore, and beside what is not its own.
        names = [copy_name(delta.name, copy) for copy in range(MOST_COPIES)]
        others = sorted(sizes.keys() - set(names))  # protocol 1 named copies otherwise
        refused: Refusal | None = None
        size, torn, missing = 0, None, False
        garbage: list[str] = []
        for name in (*names, *others):
            if missing and name not in sizes:
                continue
            if sizes.get(name, 0) > self._limit:
                refusal = Refusal(
                    f"{sizes[name]} bytes; a delta of this model has at most {self._limit}",
                    damaged=False,
                    lasting=sizes[name] > self._largest,
                )
            else:
                data = yield from Get(name, limit=self._limit)
                if data is None:
                    missing = True
                    continue
                outcome = admit(data, delta, self._schema, self._codec, averages=averages)
                if isinstance(outcome, Delta):
                    return _Fetched(outcome, len(data))
                size, refusal = max(size, len(data)), outcome
                del data
            if refusal.damaged:
                torn = refusal.reason
            else:
                refused = refusal
            if refusal.lasting:
                garbage.append(name)
        if refused is not None and torn is None:
            return _Fetched(refused, size, tuple(garbage))

        # Torn or missing: wait until nothing better will come.
        suspect = self._suspects.get(delta)
        if suspect is None or suspect.entries != entries:
            suspect = self._suspects[delta] = _Suspect(entries, torn is not None)
            self._may_be_behind |= torn is None  # a newer version may have taken it
        if not suspect.is_hopeless(candidate):
            return None
        reason = torn or "missing, although a later one of its session is there"
        return _Fetched(Refusal(reason, damaged=True), 0)

    def _publish(self, round_: Round, waiting: Collection[str]) -> Procedure[Manifest | None]:
        """Make a version of a round; None if another master made that version. `waiting` are nodes with deltas."""
        head = round_.head
        fraction = round_.fraction(expected_nodes(head, round_.per_step, self._settings))
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
            weights = yield from publish_tensors(weights_name(version, nonce), self.weights, self._store_id)
            state = self.outer.tensors()
            momentum = None
            if state:
                momentum = yield from publish_tensors(momentum_name(version, nonce), state, self._store_id)
            outer = Outer(name=self.outer.name, scalars=dict(self.outer.scalars()))

        # The manifest: marks, weights and momentum become true together, or not at all.
        rounds = head.rounds + fraction
        nodes, horizon = round_.marks.complete(rounds, waiting)
        manifest = Manifest(
            protocol=PROTOCOL,
            version=version,
            parent=head.sha256,
            nonce=nonce,
            time=self._now(),
            store=self._store_id,
            schema_id=head.schema_id,
            weights=weights,
            momentum=momentum,
            outer=outer,
            nodes=nodes,
            horizon=horizon,
            applied=tuple(delta.name for delta in round_.applied),
            rejected=tuple(round_.marks.rejected),
            fraction=fraction,
            rounds=rounds,
        )
        if not (yield from create_manifest(manifest, head)):
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
                "rejected": len(manifest.rejected),
            },
        )
        self._compare_with_hint(manifest)
        return manifest

    def _compare_with_hint(self, head: Manifest) -> None:
        """Say once that more or fewer nodes take part than `expected_nodes`, if that lasts."""
        hint, actual = self._settings.expected_nodes, len(taking_part(head))
        if self._differs_since == math.inf:
            return  # it is said
        if hint in {None, actual}:
            self._differs_since = None
        elif self._differs_since is None:
            self._differs_since = head.rounds
        elif head.rounds - self._differs_since >= RECENT_ROUNDS:
            self._differs_since = math.inf
            self._log(
                "WARNING",
                f"distributed.expected_nodes is {hint}, and {actual} nodes take part; "
                + ("rounds wait for all that are expected" if self._settings.synchronous else "these count"),
            )

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
            manifest = yield from read_past(version)
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
