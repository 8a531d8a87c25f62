"""The master: what becomes of the deltas that nodes put into the store.

All that a master knows is in the store. Its memory is that of the version that it read or made last; where it cannot be
sure of that (a request failed halfway through a publication, another master was faster), it reads it anew.
"""

from __future__ import annotations

import hashlib
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from speedtronic.distributed.codec import Codec, make_codec
from speedtronic.distributed.delta import Delta, DeltaHeader, Refusal, admit, max_delta_bytes
from speedtronic.distributed.outer_optimizers import OuterOptimizer, make_outer
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
    is_processed,
    list_all,
    momentum_name,
    parse_blob_version,
    parse_delta_name,
    put_own,
    read_manifest,
    weights_name,
)
from speedtronic.distributed.requests import Procedure, Say, delete, get, put
from speedtronic.distributed.stores.base import Entry
from speedtronic.distributed.tensors import Form, PackedTensors, Schema, TensorFormatError, Tensors, pack_tensors
from speedtronic.errors import StoreContentError, StoreError

RECENT_ROUNDS = 5  # a node that was in one of so many takes part
DOUBTFUL_LOOKS = 10  # so often a delta that is torn or missing may be found so before it is given up
_MOST_REMEMBERED = 4096  # versions
LONG_WAIT = 10  # looks; after them it is said that a synchronous round does not come together
_LONGEST_REASON = 200  # characters
_MOST_IN_A_VERSION = 1024  # deltas; those beyond are the next version's, so that a manifest stays one that can be read
_LARGEST_STEP = 2.0**40  # tokens of one inner step


@dataclass(frozen=True)
class MasterSettings:
    """How rounds are formed and what they do.

    Attributes:
        lr: η of the outer step. None: 1.0, or 0.7 where rounds are synchronous.
        momentum: μ of it. None: 0.5, or 0.9 where rounds are synchronous.
        outer: name of the outer optimizer.
        codec: name of the encoding in which the deltas must come.
        expected_nodes: how many nodes take part. None: those in the last five rounds.
        quorum: from how many nodes deltas must be there for a round to start. None: half the expected ones.
        grace: seconds after which a round starts without quorum. None: as long as the fastest node trains for a delta;
            never, where rounds are synchronous.
        max_staleness: age in rounds beyond which a delta is refused. None: at no age.
        keep_versions: how many versions of the weights stay in the store.
        poll_interval: seconds between looks; the grace time, while no node's speed is known.

    Raises:
        ValueError: a number is none that it can be.
    """

    lr: float | None = None
    momentum: float | None = None
    outer: str = "nesterov"
    codec: str = "fp32"
    expected_nodes: int | None = None
    quorum: int | None = None
    grace: float | None = None
    max_staleness: float | None = None
    keep_versions: int = 8
    poll_interval: float = 60.0

    def __post_init__(self) -> None:
        for key in ("expected_nodes", "quorum", "keep_versions"):
            count = getattr(self, key)
            if count is not None and count < 1:
                raise ValueError(f"{key} is at least 1, not {count}")
        for key in ("grace", "max_staleness", "poll_interval"):
            amount = getattr(self, key)
            if amount is not None and not 0.0 <= amount < math.inf:
                raise ValueError(f"{key} is a number from 0, not {amount}")
        if self.quorum is not None and self.expected_nodes is not None and self.quorum > self.expected_nodes:
            raise ValueError(f"a quorum of {self.quorum} is more than expected_nodes, which is {self.expected_nodes}")

    @property
    def synchronous(self) -> bool:
        """Whether a round waits for all nodes."""
        return self.quorum is not None and self.expected_nodes is not None and self.quorum == self.expected_nodes

    @property
    def learning_rate(self) -> float:
        return self.lr if self.lr is not None else (0.7 if self.synchronous else 1.0)

    @property
    def outer_momentum(self) -> float:
        return self.momentum if self.momentum is not None else (0.9 if self.synchronous else 0.5)


# --- Rules: who takes part, when a round starts, how much a delta weighs


def recent_marks(head: Manifest) -> dict[str, Mark]:
    """By node, the last mark of each that has contributed to one of the last rounds."""
    recent: dict[str, Mark] = {}
    for lineage, mark in head.marks.items():
        node = lineage.partition("/")[0]
        contributes = mark.rejected < mark.seq and head.rounds - mark.rounds < RECENT_ROUNDS
        if contributes and (node not in recent or recent[node].version < mark.version):
            recent[node] = mark
    return recent


def expected_nodes(head: Manifest, present: Iterable[str], settings: MasterSettings) -> int:
    """How many nodes a whole round has: as configured, or those of the last rounds and those that are present now."""
    return settings.expected_nodes or max(1, len(recent_marks(head).keys() | set(present)))


def quorum(head: Manifest, present: Iterable[str], settings: MasterSettings) -> int:
    return settings.quorum or -(-expected_nodes(head, present, settings) // 2)


def grace(head: Manifest, settings: MasterSettings) -> float | None:
    """Seconds that what is there waits for a quorum; None: for as long as it takes."""
    if settings.grace is not None or settings.synchronous:
        return settings.grace
    return min((mark.seconds for mark in recent_marks(head).values()), default=settings.poll_interval)


def per_step(header: DeltaHeader) -> float:
    """n of a delta: the tokens, of data without them the samples, of one inner step.

    A delta grows with its number of steps by itself, so that stays out of its weight. What a header claims is bounded,
    so that a weighted sum cannot leave float32.
    """
    return min(max(1.0, (header.tokens or header.samples) / header.steps), _LARGEST_STEP)


def staleness_weight(rounds: float) -> float:
    """What is left of a delta's weight at this age: (1 + r)^(-1/2)."""
    return float((1.0 + rounds) ** -0.5)


# --- Publication


def commit(manifest: Manifest) -> Procedure[bool]:
    """Create a manifest, and so the version; false when another master was faster.

    Whose it is tells the nonce of what stands there afterwards, not the answer to the request: that may be lost, or
    belong to the second sending of a request whose first one had succeeded.
    """
    data = manifest.to_bytes()
    if len(data) > MANIFEST_LIMIT:
        raise StoreContentError(f"a manifest of {len(data)} bytes is too large to read; use a new distributed.repo_id")
    yield from put(head_name(manifest.version), data)
    standing = yield from read_manifest(manifest.version)
    if standing is None:
        raise StoreContentError(f"{head_name(manifest.version)} cannot be read after it was created")
    return standing.nonce == manifest.nonce


def publish_tensors(name: str, tensors: Mapping[str, Tensor]) -> Procedure[Blob]:
    """Put tensors into the store, and say what a manifest must say of them."""
    data = pack_tensors(tensors, {})
    path = yield from put_own(name, data)
    return Blob(path=path, size=len(data), sha256=hashlib.sha256(data).hexdigest())


def sweep(entries: Iterable[Entry], head: Manifest) -> Procedure[None]:
    """Delete the deltas that a committed version has dealt with.

    A stale master can do no harm here: what its old head covers, every later one does.
    """
    for entry in entries:
        delta = parse_delta_name(entry.name)
        if delta is not None and is_processed(head, delta):
            yield from delete(entry.name)


def prune(head: Manifest, kept: set[str]) -> Procedure[None]:
    """Delete weights and momentum that no kept version names.

    What was written for a version beyond the head may yet be named: its master is still publishing. For one up to the
    head the manifest exists, so it will never be.
    """
    for prefix in (WEIGHTS, MOMENTUM):
        for entry in (yield from list_all(prefix)):
            version = parse_blob_version(entry.name)
            if version is not None and version <= head.version and entry.name not in kept:
                yield from delete(entry.name)


# --- Rounds


class _Waiting(NamedTuple):
    """A delta whose turn it is.

    Attributes:
        delta: which one.
        entries: its copies that were listed.
        is_last: whether none of the same session was listed after it.
        listed: the first number from this one on that was listed.
    """

    delta: DeltaId
    entries: tuple[Entry, ...]
    is_last: bool
    listed: int


@dataclass
class _Doubt:
    """A delta that is torn or missing: perhaps it is still on its way.

    Attributes:
        entries: its copies that were listed then. While they are the same, it is not read again.
        torn: whether there was something.
        looks: how often it was found so.
    """

    entries: tuple[Entry, ...]
    torn: bool
    looks: int = 1

    def is_settled(self, waiting: _Waiting) -> bool:
        """Whether nothing better will come: a node begins with a delta when the one before lies in the store whole."""
        return self.looks >= DOUBTFUL_LOOKS or (self.torn and not waiting.is_last)


class _Past(NamedTuple):
    """What a master remembers of a version."""

    rounds: float
    blobs: tuple[str, ...]


@dataclass
class _Gathering:
    """A round as it comes together: one running sum, whatever the number of deltas.

    Attributes:
        head: the version on which it builds.
        sum: of w·Δ, and of w·(b - B) for averaged buffers.
        shares: by node, the w of each of its deltas, in units of `unit`.
        newest: the buffers that are taken from the newest delta, and in `newest_base` the version it is based on.
        unit: n of the first delta. While all are equal, every weight is exactly 1.
        steps: n by node.
        marks: of the sessions that moved; their `rounds` are known when the round is complete.
        applied, rejected: what entered, and what did not.
    """

    head: Manifest
    sum: Tensors = field(default_factory=dict)
    newest: Tensors = field(default_factory=dict)
    newest_base: int = -1
    shares: dict[str, list[float]] = field(default_factory=dict)
    unit: float | None = None
    steps: dict[str, float] = field(default_factory=dict)
    marks: dict[str, Mark] = field(default_factory=dict)
    applied: list[DeltaId] = field(default_factory=list)
    rejected: list[Rejection] = field(default_factory=list)

    def mark(self, delta: DeltaId) -> Mark:
        """The mark of a delta's session, as this round has it so far."""
        return self.marks.get(delta.lineage) or self.head.mark(delta) or _UNMARKED

    def add(self, delta: Delta, age: float, schema: Schema, weights: Tensors) -> None:
        """Add up a delta of an age in rounds. `weights` are those of the head."""
        header = delta.header
        n = per_step(header)
        self.unit = self.unit or n
        self.steps[header.node] = n
        weight = n / self.unit * staleness_weight(age)
        self.shares.setdefault(header.node, []).append(weight)
        for name in schema.names("trained"):
            self._add(name, delta.tensors[name], weight)
        for name in schema.names("average"):
            self._add(name, _moved(delta.buffers[name], weights[name]), weight)
        if header.base_version >= self.newest_base:
            self.newest_base = header.base_version
            self.newest = {name: delta.buffers[name].clone() for name in schema.names("newest")}

    def _add(self, name: str, value: Tensor, weight: float) -> None:
        if name not in self.sum:
            self.sum[name] = torch.zeros_like(value)
        self.sum[name].add_(value, alpha=weight)

    def settle(self, delta: DeltaId, header: DeltaHeader | None, size: int, time: str, reason: str | None) -> None:
        """Note that a delta is dealt with: it was added up, or refused for a reason."""
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
        self.marks[delta.lineage] = mark.model_copy(update=moved)

    def next_marks(self, rounds: float) -> dict[str, Mark]:
        """The marks of the version that this round makes."""
        moved = {lineage: mark.model_copy(update={"rounds": rounds}) for lineage, mark in self.marks.items()}
        return self.head.marks | moved

    @property
    def weight(self) -> float:
        """The sum of w over nodes. Deltas of one node follow on each other: together they are one larger one."""
        return sum(statistics.fmean(share) for share in self.shares.values())

    def mean(self, schema: Schema) -> Tensors:
        """The weighted means, in the memory of the sums: of deltas over nodes, of buffers over all that was sent."""
        sent = sum(sum(share) for share in self.shares.values())
        averages = set(schema.names("average"))
        return {name: total.div_(sent if name in averages else self.weight) for name, total in self.sum.items()}

    def fraction(self, settings: MasterSettings) -> float:
        """f: the weight that came, of that of a whole round, where each node's n is the median and its r is 0."""
        if self.unit is None:
            return 0.0
        known = {node: mark.tokens_per_step for node, mark in recent_marks(self.head).items()} | self.steps
        weight = self.weight * (self.unit / statistics.median(known.values()))
        return min(1.0, weight / expected_nodes(self.head, self.steps, settings))


def _moved(local: Tensor, buffer: Tensor) -> Tensor:
    """What an averaged buffer changed by; zero where it is the same, an infinite value of a mask included."""
    return (local - buffer).masked_fill_(local == buffer, 0.0)


_UNMARKED = Mark(
    seq=0,
    step=0,
    samples=0,
    tokens=0,
    tokens_per_step=0.0,
    seconds=0.0,
    version=0,
    rounds=0.0,
    time="",
    bytes=0,
    rejected=0,
    reason=None,
)


class Master:
    """Applies deltas to the global weights and publishes them, as procedures over the store.

    Of a model of size S it holds 2 S, 4 S at most while a round runs (with an outer optimizer that keeps one tensor for
    each of the model's), whatever the number of nodes.

    Args:
        schema: of the model.
        initial: its values, for version 0 if there is none yet; every entry of the schema, as `snapshot` gives them.
            They become the master's own, and are written in place.
        settings: see `MasterSettings`.
        nonce: gives another text (letters, digits, '-') at each call, in any process.
        clock: monotonic, in seconds; grace is counted by it.
        now: the time of day, UTC, ISO 8601, for people to read.
        say: told of events, and of words for the log.
    """

    def __init__(
        self,
        schema: Schema,
        initial: Tensors,
        settings: MasterSettings,
        *,
        nonce: Callable[[], str],
        clock: Callable[[], float],
        now: Callable[[], str],
        say: Say,
    ) -> None:
        self.weights = initial
        self._schema = schema
        self._settings = settings
        self.outer = self._new_outer()
        self._codec: Codec = make_codec(settings.codec)
        self._limit = max_delta_bytes(schema, self._codec)
        self._nonce = nonce
        self._clock = clock
        self._now = now
        self._say = say
        self._head: Manifest | None = None
        self._past: dict[int, _Past] = {}
        self._doubts: dict[DeltaId, _Doubt] = {}
        self._waiting_since: float | None = None
        self._said_waiting_at: int | None = None
        self._untidy: set[type[StoreError]] = set()  # what deletions failed with, and was said

    @property
    def head(self) -> Manifest | None:
        """The version that `weights` and `outer` are of; None while they are of none."""
        return self._head

    # --- Taking over what is in the store

    def adopt(self) -> Procedure[None]:
        """Take over the newest version; where there is none, make the initial weights version 0.

        Raises:
            StoreContentError: the store holds another model, or a version that cannot be read.
        """
        head = yield from find_head(None)
        if head is None:
            yield from self._found()
        else:
            loaded = yield from self._load(head)
            self._log("INFO", f"goes on from version {loaded.version} of the store")

    def _found(self) -> Procedure[None]:
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
            outer=self._outer_state(),
            marks={},
            applied=(),
            rejected=(),
            fraction=0.0,
            rounds=0.0,
        )
        if (yield from commit(first)):
            self._take(first)
            self._log("INFO", "published the initial weights as version 0")
        else:
            yield from self.adopt()

    def _load(self, head: Manifest) -> Procedure[Manifest]:
        self._check(head)
        self._head = None  # weights and momentum are of no version until both are whole
        while not (yield from self._read_version(head)):
            head = yield from self._instead_of(head)
        self._take(head)
        return head

    def _read_version(self, head: Manifest) -> Procedure[bool]:
        """Read weights and momentum of a version; false when they are not there."""
        weights = yield from _fetch_blob(head.weights)
        if weights is None:
            return False
        for name, value in _unpacked(head.weights, weights, self._schema.forms()).items():
            self.weights[name].copy_(value)
        del weights
        self.outer = self._new_outer()
        if head.outer.name != self.outer.name:
            self._log("WARNING", f"{self.outer.name} begins without the state of {head.outer.name}, used until now")
            return True
        if head.momentum is None:
            return True
        momentum = yield from _fetch_blob(head.momentum)
        if momentum is None:
            return False
        forms = {name: Form(value.dtype, tuple(value.shape)) for name, value in self.outer.tensors().items()}
        try:
            self.outer.load(_unpacked(head.momentum, momentum, forms), head.outer.scalars)
        except ValueError as error:
            raise StoreContentError(f"{head_name(head.version)}: {error}") from error
        return True

    def _instead_of(self, head: Manifest) -> Procedure[Manifest]:
        """The head after one whose weights or momentum are not there: another master may have pruned them."""
        newer = yield from find_head(head)
        if newer is None:
            raise StoreContentError(
                f"weights or momentum of version {head.version} ({head.weights.path}) are missing or damaged: restore "
                "them from a backup, or go on with another distributed.repo_id and run.init_from"
            )
        self._check(newer)
        return newer

    def _new_outer(self) -> OuterOptimizer:
        trained = {name: self.weights[name] for name in self._schema.names("trained")}
        settings = self._settings
        return make_outer(settings.outer, trained, settings.learning_rate, settings.outer_momentum)

    def _outer_state(self) -> Outer:
        return Outer(name=self.outer.name, scalars=dict(self.outer.scalars()))

    def _check(self, head: Manifest) -> None:
        if head.schema_id != self._schema.fingerprint:
            raise StoreContentError(
                "the store holds another model: names, shapes or dtypes of its weights are not those of this one; "
                "configure the model with which the store was begun, or another distributed.repo_id"
            )

    def _take(self, head: Manifest) -> None:
        self._head = head
        self._remember(head)
        self._waiting_since = None

    # --- Rounds

    def poll(self) -> Procedure[int]:
        """Look once for deltas, and make a version of them when a round is due.

        Without anything new this is two requests, whatever the history.

        Returns:
            How many deltas entered.
        """
        head = yield from self._newest()
        entries = yield from list_all(DELTAS)
        yield from self._tidy(sweep(entries, head))
        waiting = self._in_turn(entries, head)
        if not self._is_due(waiting, head):
            return 0
        gathering = _Gathering(head)
        for one in waiting[:_MOST_IN_A_VERSION]:
            yield from self._process(one, gathering)
        if not gathering.marks:
            return 0
        version = yield from self._publish(gathering)
        if version is None:
            return 0
        yield from self._tidy(sweep(entries, version))
        yield from self._tidy(self._prune(version))
        return len(gathering.applied)

    def _newest(self) -> Procedure[Manifest]:
        if self._head is None:
            yield from self.adopt()
        elif (newer := (yield from find_head(self._head))) is not None:
            yield from self._load(newer)
        assert self._head is not None, "adopted"
        return self._head

    def _in_turn(self, entries: Iterable[Entry], head: Manifest) -> list[_Waiting]:
        """The deltas that come next in their sessions, in sorted order.

        What a listing leaves out is in it, for the store to be asked by name; what comes after that waits.
        """
        listed: defaultdict[tuple[str, str], defaultdict[int, list[Entry]]] = defaultdict(lambda: defaultdict(list))
        for entry in entries:
            delta = parse_delta_name(entry.name)
            if delta is not None and not is_processed(head, delta):
                listed[delta.node, delta.session][delta.seq].append(entry)
        self._doubts = {delta: doubt for delta, doubt in self._doubts.items() if (delta.node, delta.session) in listed}
        waiting: list[_Waiting] = []
        for (node, session), copies in sorted(listed.items()):
            waiting += self._next(DeltaId(node, session, 0), copies, head)
        return waiting

    def _next(self, session: DeltaId, copies: Mapping[int, list[Entry]], head: Manifest) -> Iterator[_Waiting]:
        mark = head.mark(session)
        last = max(copies)
        for seq in range(1 if mark is None else mark.seq + 1, last + 1):
            listed = seq if seq in copies else min(number for number in copies if number > seq)
            waiting = _Waiting(session._replace(seq=seq), tuple(copies.get(seq, ())), seq == last, listed)
            if self._passed_over(waiting):
                return
            yield waiting
            if not waiting.entries:
                return

    def _passed_over(self, waiting: _Waiting) -> bool:
        """Whether a delta was torn or missing at the last look, and there is nothing new of it."""
        doubt = self._doubts.get(waiting.delta)
        if doubt is None or doubt.entries != waiting.entries:
            return False
        doubt.looks += 1
        return not doubt.is_settled(waiting)

    def _is_due(self, waiting: list[_Waiting], head: Manifest) -> bool:
        present = {one.delta.node for one in waiting}
        if not present:
            self._waiting_since = None
            return False
        if self._waiting_since is None:
            self._waiting_since = self._clock()
        if len(present) >= quorum(head, present, self._settings):
            return True
        patience = grace(head, self._settings)
        waited = self._clock() - self._waiting_since
        if patience is None and waited >= LONG_WAIT * self._settings.poll_interval:
            self._say_that_it_waits(head, present)
        return patience is not None and waited >= patience

    def _say_that_it_waits(self, head: Manifest, present: set[str]) -> None:
        if self._said_waiting_at == head.version:
            return
        self._said_waiting_at = head.version
        needed = quorum(head, present, self._settings)
        self._log(
            "WARNING",
            f"version {head.version + 1} waits for deltas of {needed} nodes and has those of "
            f"{', '.join(sorted(present))}; distributed.grace limits how long",
        )

    def _process(self, waiting: _Waiting, gathering: _Gathering) -> Procedure[None]:
        """Let a delta enter the round, or refuse it, when all before it in its session are dealt with."""
        if gathering.mark(waiting.delta).seq + 1 != waiting.delta.seq:
            return
        fetched = yield from self._fetch(waiting, gathering.head)
        if fetched is None:
            return
        outcome, size = fetched
        header, reason = None, None
        if isinstance(outcome, Refusal):
            reason = outcome.reason
        else:
            header = outcome.header
            age = yield from self._age(header.base_version, gathering.head)
            reason = self._refused_for_age(age)
            if age is not None and reason is None:
                gathering.add(outcome, age, self._schema, self.weights)
        gathering.settle(self._given_up_to(waiting, outcome), header, size, self._now(), reason)
        if reason is not None:
            self._log("WARNING", f"refused {waiting.delta.name}: {reason}")

    def _given_up_to(self, waiting: _Waiting, outcome: Delta | Refusal) -> DeltaId:
        """The last delta that is dealt with: with one that is missing for good, the whole gap that it begins, since
        each number of a gap that somebody's name for an object makes would else be a version of its own."""
        missing = isinstance(outcome, Refusal) and outcome.damaged and not self._doubts[waiting.delta].torn
        return waiting.delta._replace(seq=max(waiting.delta.seq, waiting.listed - 1)) if missing else waiting.delta

    def _fetch(self, waiting: _Waiting, head: Manifest) -> Procedure[tuple[Delta | Refusal, int] | None]:
        """Read a delta: the first of its copies that is not torn. None when there is none, for now."""
        if waiting.entries and min(entry.size for entry in waiting.entries) > self._limit:
            size = waiting.entries[0].size
            return Refusal(f"{size} bytes, where a delta of this model has at most {self._limit}", damaged=False), 0
        torn: str | None = None
        for copy in range(MOST_COPIES):
            data = yield from get(copy_name(waiting.delta.name, copy), limit=self._limit)
            if data is None:
                break
            outcome = self._admit(data, waiting.delta, head)
            if not (isinstance(outcome, Refusal) and outcome.damaged):
                return outcome, len(data)
            torn = outcome.reason
            del data, outcome
        return self._doubt(waiting, torn)

    def _admit(self, data: bytes, delta: DeltaId, head: Manifest) -> Delta | Refusal:
        averages = {name: self.weights[name] for name in self._schema.names("average")}
        return admit(data, delta, self._schema, self._codec, max_base_version=head.version, averages=averages)

    def _doubt(self, waiting: _Waiting, torn: str | None) -> tuple[Refusal, int] | None:
        """Give a torn or missing delta time, until it is certain or likely that there will be nothing else."""
        doubt = self._doubts.get(waiting.delta)
        if doubt is None or doubt.entries != waiting.entries:
            doubt = self._doubts[waiting.delta] = _Doubt(waiting.entries, torn is not None)
        if not doubt.is_settled(waiting):
            return None
        return Refusal(torn or "missing, although a later one of its session is there", damaged=True), 0

    def _age(self, base_version: int, head: Manifest) -> Procedure[float | None]:
        """In rounds; None when the base is no version of this store."""
        base = yield from self._recall(base_version)
        return None if base is None else head.rounds - base.rounds

    def _refused_for_age(self, age: float | None) -> str | None:
        if age is None:
            return "its base is no version of this store"
        limit = self._settings.max_staleness
        if limit is not None and age > limit:
            return f"stale: {age:.3g} rounds old, and distributed.max_staleness is {limit:g}"
        return None

    def _publish(self, gathering: _Gathering) -> Procedure[Manifest | None]:
        """Make a version of a round; None when another master made that version."""
        head = gathering.head
        fraction = gathering.fraction(self._settings)
        version, nonce = head.version + 1, self._nonce()
        weights, momentum, outer = head.weights, head.momentum, head.outer
        self._head = None  # until the commit is known, weights and momentum are of no version
        if gathering.applied:
            self._step(gathering, fraction)
            weights = yield from publish_tensors(weights_name(version, nonce), self.weights)
            state = self.outer.tensors()
            momentum = (yield from publish_tensors(momentum_name(version, nonce), state)) if state else None
            outer = self._outer_state()
        rounds = head.rounds + fraction
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
            marks=gathering.next_marks(rounds),
            applied=tuple(delta.name for delta in gathering.applied),
            rejected=tuple(gathering.rejected),
            fraction=fraction,
            rounds=rounds,
        )
        if not (yield from commit(manifest)):
            self._log("INFO", f"another master published version {version} first: its work stands, this is dropped")
            yield from self.adopt()
            return None
        self._take(manifest)
        self._say(
            "outer_step",
            {
                "version": version,
                "deltas": len(gathering.applied),
                "nodes": len(gathering.steps),
                "fraction": fraction,
                "rounds": rounds,
                "rejected": len(gathering.rejected),
            },
        )
        return manifest

    def _step(self, gathering: _Gathering, fraction: float) -> None:
        """The outer step, in place. The sums are used up."""
        mean = gathering.mean(self._schema)
        trained = self._schema.names("trained")
        self.outer.step(
            {name: self.weights[name] for name in trained}, {name: mean[name] for name in trained}, fraction
        )
        for name in self._schema.names("average"):
            self.weights[name].add_(mean[name], alpha=fraction)  # (1 - f)·B + f·mean; without momentum
        for name, value in gathering.newest.items():
            self.weights[name].copy_(value)
        gathering.sum.clear()

    # --- What is no longer needed

    def _tidy(self, deletions: Procedure[None]) -> Procedure[None]:
        """Delete what can be deleted. What is left over harms nothing, and is tried again with the next version."""
        try:
            yield from deletions
        except StoreError as error:
            if type(error) not in self._untidy:
                self._untidy.add(type(error))
                self._log("WARNING", f"what is no longer needed is not deleted: {error}")

    def _prune(self, head: Manifest) -> Procedure[None]:
        kept: set[str] = set()
        for version in range(max(0, head.version - self._settings.keep_versions + 1), head.version + 1):
            past = yield from self._recall(version)
            if past is not None:
                kept.update(past.blobs)
        yield from prune(head, kept)

    def _recall(self, version: int) -> Procedure[_Past | None]:
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
        self._past[manifest.version] = _Past(manifest.rounds, tuple(blob.path for blob in blobs if blob is not None))

    def _log(self, level: str, message: str) -> None:
        self._say("log", {"level": level, "message": message})


def _fetch_blob(blob: Blob) -> Procedure[bytes | None]:
    return (yield from get(blob.path, limit=blob.size, size=blob.size, sha256=blob.sha256))


def _unpacked(blob: Blob, data: bytes, forms: Mapping[str, Form]) -> PackedTensors:
    try:
        return PackedTensors(data, forms)
    except TensorFormatError as error:
        raise StoreContentError(f"{blob.path}: {error}") from error
