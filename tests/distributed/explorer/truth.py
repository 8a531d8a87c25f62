"""What must hold in every schedule, seen from outside: from the objects that ever were in the store and the spools.

Nothing here uses the code that it judges. Objects are read with `json` and the safetensors library, and the weights of
every head are computed again, in float64, from the deltas that the history says were applied.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import numpy as np
import torch
from safetensors.torch import load as load_tensors

from tests.distributed.explorer.bucket import Bucket, Copy

SLOTS, MEAN, LATEST = "slots", "mean", "latest"  # one slot for each unit of data; an averaged and an integer buffer
NO_NODE: dict[str, Any] = {"closed_below": 0, "sessions": {}}
_HEAD = re.compile(r"head/(\d{8})(?:\.([1-9]))?\.json")
_HINTED_VERSIONS = 5  # for so many versions, `expected_nodes` is believed
_HALF = 0.5  # a slot moves by 1 when its unit is trained; what rounding leaves is far below this
_NEAR = 2e-3
STEP = 1.003  # by which a unit moves its slot; bfloat16 has 1
_OWED = 1e-3  # less than what bfloat16 loses of a unit, more than what it then loses of that

Arrays = dict[str, np.ndarray]


class ScheduleError(AssertionError):
    """A schedule in which the protocol did not keep its word."""


@dataclass(frozen=True, slots=True)
class Rule:
    """The settings of the update, as far as the reference needs them.

    Attributes:
        even: all nodes have the same n.
        quorum: as configured.
        patient: no round starts without a quorum.
        recent_rounds: in one of which a node must have been to take part.
        turns: times k are the versions in one of which the k-th node must have been to take part.
    """

    outer: str
    lr: float
    momentum: float
    expected: int | None
    even: bool
    keep_versions: int
    max_staleness: float | None
    quorum: int | None
    patient: bool
    recent_rounds: float
    turns: int

    @property
    def synchronous(self) -> bool:
        return self.quorum is not None and self.quorum == self.expected


@dataclass(slots=True)
class Committed:
    """A delta that reached a spool.

    Attributes:
        units: which it carries.
        reachable: false when its disk was lost before the store had it.
    """

    machine: str
    header: dict[str, Any]
    values: Arrays
    units: frozenset[int]
    reachable: bool = True


@dataclass(slots=True)
class Span:
    """The units of a machine that it has trained or passed over: `count` of them from `first` on."""

    machine: str
    first: int
    count: int


@dataclass(slots=True)
class Truth:
    """What has happened, and whether it may.

    Attributes:
        heads: every manifest that was ever created, in order.
        blobs: weights and momentum that ever were in the store.
        committed: by name, every delta that ever was in a spool.
        forged: by name, deltas that others sent in a node's name; they carry no units.
        lost_disks: machines that got a new disk.
        strays: names of what others put into the store, and that is neither a version nor a delta.
        forgotten: nodes of which a head had no mark any more.
        identity: of the store.
        calm: from this version on, rounds may start without a quorum.
        dropped: units that a node gave up with a word, as it may when it takes over weights that are not its own.
        marks_in_heads, forbids: false for mutants, of which not the forbidden act but its consequence is to be seen.
    """

    rule: Rule
    heads: list[dict[str, Any]] = field(default_factory=list)
    head_bytes: list[bytes] = field(default_factory=list)
    blobs: dict[str, bytes] = field(default_factory=dict)
    read: dict[str, Arrays] = field(default_factory=dict)
    committed: dict[str, Committed] = field(default_factory=dict)
    forged: dict[str, Committed] = field(default_factory=dict)
    strays: set[str] = field(default_factory=set)
    lost_disks: set[str] = field(default_factory=set)
    forgotten: set[str] = field(default_factory=set)
    identity: str | None = None
    calm: int | None = None
    dropped: set[int] = field(default_factory=set)
    marks_in_heads: bool = True
    forbids: bool = True
    bucket: Bucket = field(init=False)

    # --- While the schedule runs

    def spooled(self, machine: str, data: bytes) -> str:
        header, values = _delta(data)
        name = _name_of(header)
        units = frozenset(int(unit) for unit in np.flatnonzero(values[SLOTS] > _HALF))
        if np.any(values[SLOTS] < -_HALF) or np.any(values[SLOTS] > 1 + _HALF):
            raise ScheduleError(f"{name} moves a slot by {values[SLOTS].min():.3g} or {values[SLOTS].max():.3g}")
        if not np.isfinite(values[SLOTS]).all():
            raise ScheduleError(f"{name} has values that are not finite")
        if name in self.committed:
            raise ScheduleError(f"{name} was committed a second time, with other contents")
        self.committed[name] = Committed(machine, header, values, units)
        return name

    def forge(self, data: bytes) -> str:
        """Note what somebody sends in the name of a node."""
        header, values = _delta(data)
        self.forged[_name_of(header)] = Committed(header["node"], header, values, frozenset())
        return _name_of(header)

    def disk_lost(self, machine: str) -> set[str]:
        """The deltas that nobody has any more."""
        self.lost_disks.add(machine)
        gone = {
            name
            for name, delta in self.committed.items()
            if delta.machine == machine and not any(copy.whole for copy in self._copies(name))
        }
        for name in gone:
            self.committed[name].reachable = False
        return gone

    def units_of(self, machine: str) -> set[int]:
        """What its deltas carry, except those that are lost."""
        return {unit for delta in self._deltas_of(machine) for unit in delta.units}

    def furthest(self, machine: str) -> int:
        """The step up to which its deltas cover its data, except those that are lost."""
        return max((int(delta.header["position"][0]) for delta in self._deltas_of(machine)), default=0)

    def _deltas_of(self, machine: str) -> list[Committed]:
        return [delta for delta in self.committed.values() if delta.machine == machine and delta.reachable]

    def _copies(self, name: str) -> list[Copy]:
        stem = name.removesuffix(".safetensors")
        return [copy for other, copies in self.bucket.history.items() if other.startswith(stem) for copy in copies]

    def created(self, copy: Copy) -> None:
        if copy.name in self.strays:
            return
        if copy.name.startswith("head/"):
            self._head(copy)
        elif copy.name == "store.json":
            self.identity = json.loads(copy.data)["id"]
        elif copy.name.startswith(("w/", "opt/")) and copy.whole:
            self.blobs[copy.name] = copy.data

    def deleted(self, copy: Copy) -> None:
        if not self.forbids or copy.name in self.strays:
            return
        if copy.name == "store.json":
            raise ScheduleError("the identity of the store was deleted")
        if copy.name.startswith("head/"):
            raise ScheduleError(f"{copy.name} was deleted: a master that slept could create it again")
        if copy.name.startswith("in/"):
            self._delta_deleted(copy.name)
        elif copy.name.startswith(("w/", "opt/")):
            self._blob_deleted(copy.name)

    def _head(self, copy: Copy) -> None:
        place = _HEAD.fullmatch(copy.name)
        if place is None:
            raise ScheduleError(f"{copy.name} is no place for a head")
        version = int(place[1])
        if version != len(self.heads):
            raise ScheduleError(f"{copy.name} was created when the chain had {len(self.heads)} heads")
        for number in range(int(place[2] or 0)):
            before = f"head/{version:08d}{f'.{number}' if number else ''}.json"
            if before not in self.strays:
                raise ScheduleError(f"{copy.name} was created, and {before} was free")
        head = json.loads(copy.data)
        if self.identity is None or head["store"] != self.identity:
            raise ScheduleError(f"{copy.name} is of store {head['store']}, in store {self.identity}")
        if head["version"] != version:
            raise ScheduleError(f"{copy.name} says that it is version {head['version']}")
        parent = sha256(self.head_bytes[-1]).hexdigest() if self.head_bytes else None
        if head["parent"] != parent:
            raise ScheduleError(f"{copy.name} does not follow the head before it")
        for blob in _blobs(head):
            there = self.bucket.there(blob["path"])
            if there is None or sha256(there.data).hexdigest() != blob["sha256"] or len(there.data) != blob["size"]:
                raise ScheduleError(f"{copy.name} names {blob['path']}, which is not there, or not what it says")
        if self.marks_in_heads:
            self._marks_follow(self.heads[-1] if self.heads else {"nodes": {}, "horizon": 0}, head, copy.name)
        self.heads.append(head)
        self.head_bytes.append(copy.data)

    def _marks_follow(self, before: Mapping[str, Any], head: Mapping[str, Any], name: str) -> None:
        """Each session's mark moves over exactly the deltas that this head processed, without a gap; a closed session
        never opens again, and a session is closed when all that it has sent is processed."""
        processed: dict[str, dict[str, list[int]]] = defaultdict(dict)
        for done, outcome in sorted(_processed(head).items()):
            node, session, seq = _session_of(done)
            numbers = processed[node].setdefault(session, [])
            if outcome.startswith("missing"):  # it stands for all that are missing before it
                was = before["nodes"].get(node, NO_NODE)["sessions"].get(session, {"seq": 0})["seq"]
                numbers += range(max([was, *numbers]) + 1, seq)
            numbers.append(seq)
        for node in {*before["nodes"], *head["nodes"], *processed}:
            was, now = before["nodes"].get(node, NO_NODE), head["nodes"].get(node)
            if now is None:
                if head["horizon"] != head["version"] or node in processed:
                    raise ScheduleError(f"{name}: the marks of {node} are gone")
                self.forgotten.add(node)
                continue
            if now["closed_below"] < was["closed_below"]:
                raise ScheduleError(f"{name}: of {node}, closed sessions are open again")
            for session in {*was["sessions"], *now["sessions"], *processed[node]}:
                self._mark_follows(node, session, was, now, processed[node].get(session, []), name)
            if not self.is_forged(node):
                self._none_left_out(node, before, head, name)
            self._opened_by_admitted(node, was, processed[node], before["horizon"], head, name)

    def _mark_follows(
        self,
        node: str,
        session: str,
        was: Mapping[str, Any],
        now: Mapping[str, Any],
        processed: list[int],
        name: str,
    ) -> None:
        start = was["sessions"][session]["seq"] if session in was["sessions"] else 0
        end = now["sessions"][session]["seq"] if session in now["sessions"] else start + len(processed)
        if processed != list(range(start + 1, end + 1)):
            raise ScheduleError(f"{name}: {node}/{session} goes from {start} to {end} over {processed}")
        if session not in now["sessions"] and _number(session) >= now["closed_below"]:
            raise ScheduleError(f"{name}: the mark of {node}/{session} is gone")

    def _none_left_out(self, node: str, before: Mapping[str, Any], head: Mapping[str, Any], name: str) -> None:
        """A session is closed when all that it has sent is processed, and that somebody still has."""
        for one in self._deltas_of(node):
            done = _name_of(one.header)
            of = _session_of(done)
            if _has_processed(head, *of) and not _has_processed(before, *of) and done not in _processed(head):
                gap = max(
                    (seq for *session, seq in map(_session_of, _processed(head)) if session == [*of[:2]]), default=0
                )
                if gap < of[2]:
                    raise ScheduleError(f"{name}: {of[0]}/{of[1]} was closed before {done} was processed")

    def _opened_by_admitted(
        self,
        node: str,
        was: Mapping[str, Any],
        processed: Mapping[str, list[int]],
        horizon: int,
        head: Mapping[str, Any],
        name: str,
    ) -> None:
        """A session begins with a delta that is admitted, and that does not come from before the horizon."""
        for session in processed.keys() - was["sessions"].keys():
            if _number(session) < was["closed_below"]:
                raise ScheduleError(f"{name}: {node}/{session} was closed, and is open again")
            admitted = sorted(done for done in head["applied"] if done.startswith(f"in/{node}/{session}/"))
            bases = [self.sent[done].header["base_version"] for done in admitted if done in self.sent]
            if not bases or bases[0] < horizon:
                raise ScheduleError(f"{name}: {node}/{session} is opened by {admitted}, the horizon is {horizon}")

    def is_forged(self, node: str) -> bool:
        """Whether somebody else has sent deltas in a node's name."""
        return any(delta.machine == node for delta in self.forged.values())

    @property
    def sent(self) -> dict[str, Committed]:
        return self.committed | self.forged

    def _delta_deleted(self, name: str) -> None:
        node, session, seq = _session_of(name)
        if delta_of(name) in self.committed and not (self.heads and _has_processed(self.heads[-1], node, session, seq)):
            raise ScheduleError(f"{name} was deleted before a head had it")

    def _blob_deleted(self, name: str) -> None:
        kept = self.heads[-self.rule.keep_versions :]
        if any(blob["path"] == name for head in kept for blob in _blobs(head)):
            raise ScheduleError(f"{name} was deleted while a recent head needs it")

    # --- After the schedule

    def judge(self, spans: list[Span]) -> None:
        if not self.heads:
            raise ScheduleError("nobody published version 0")
        outcomes = self._outcomes()
        self._each_delta_once(outcomes)
        self._each_unit_once(outcomes, spans)
        self._nothing_owed()
        self._weights_follow()

    def _outcomes(self) -> dict[str, str]:
        """By delta, "applied" or why it was rejected."""
        outcomes: dict[str, str] = {}
        for head in self.heads:
            for name, outcome in _processed(head).items():
                if name in outcomes and not (outcome.startswith("missing") and _session_of(name)[0] in self.forgotten):
                    raise ScheduleError(f"{name} was processed again by version {head['version']}")
                if name not in self.sent and not (outcome != "applied" and self.is_forged(_session_of(name)[0])):
                    raise ScheduleError(f"version {head['version']} processed {name}, which was in no spool: {outcome}")
                outcomes.setdefault(name, outcome)
        return outcomes

    def _each_delta_once(self, outcomes: Mapping[str, str]) -> None:
        for name, delta in self.committed.items():
            if delta.reachable and name not in outcomes and not self.may_be_passed_over(name):
                raise ScheduleError(f"{name} was committed, and no head has dealt with it")
        for name, outcome in outcomes.items():
            if outcome != "applied" and name in self.committed and not self._may_be_refused(name, outcome):
                raise ScheduleError(f"{name} was rejected: {outcome}")

    def may_be_passed_over(self, name: str) -> bool:
        """Whether a delta may stay without an outcome: it is too old to open its session, or its node was forgotten, or
        somebody else has closed its session in the name of its node."""
        head, delta = self.heads[-1], self.committed[name]
        node, session, seq = _session_of(name)
        if _has_processed(head, node, session, seq):
            return self.is_forged(node)
        is_open = session in head["nodes"].get(node, NO_NODE)["sessions"]
        return not is_open and (self.is_stale(delta, head) or delta.header["base_version"] < head["horizon"])

    def may_stay(self, name: str) -> bool:
        """Whether an object that nobody needs may stay: a late copy of a node that was forgotten, since no head says
        any more that it has the delta; what a lost disk left torn, since nobody knows of what it is a part."""
        delta = self.committed[delta_of(name)]
        return not delta.reachable or delta.machine in self.forgotten

    def is_stale(self, delta: Committed, head: Mapping[str, Any]) -> bool:
        base = self.heads[delta.header["base_version"]]
        limit = self.rule.max_staleness
        return limit is not None and head["rounds"] - base["rounds"] > limit

    def _may_be_refused(self, name: str, reason: str) -> bool:
        node = _session_of(name)[0]
        if self.is_forged(node) or (reason.startswith("missing") and node in self.forgotten):
            return True  # how many deltas its session has is said by somebody else, or once more
        if reason.startswith("stale"):
            return self.rule.max_staleness is not None
        return any(not copy.whole for copy in self._copies(name))  # given up after many looks at a torn one

    def _each_unit_once(self, outcomes: Mapping[str, str], spans: list[Span]) -> None:
        carriers: dict[int, list[str]] = defaultdict(list)
        for name, delta in self.committed.items():
            if delta.reachable:
                for unit in delta.units:
                    carriers[unit].append(name)
        for unit, names in carriers.items():
            if len(names) > 1:
                raise ScheduleError(f"unit {unit} was sent {len(names)} times: {names}")
        for span in spans:
            for unit in range(span.first, span.first + span.count):
                if not carriers[unit] and unit not in self.dropped:
                    raise ScheduleError(f"unit {unit} of {span.machine} is in no delta")

    def _nothing_owed(self) -> None:
        """What a codec lost of a unit is in the next delta of its machine, unless a disk was lost."""
        for machine in {delta.machine for delta in self.committed.values()} - self.lost_disks:
            deltas = [delta for delta in self.committed.values() if delta.machine == machine]
            for number, delta in enumerate(deltas[:-1]):
                sent = sum(later.values[SLOTS] for later in deltas[number:])
                for unit in delta.units:
                    if abs(sent[unit] - STEP) > _OWED:
                        raise ScheduleError(f"of unit {unit} of {machine}, {STEP - sent[unit]:.3g} is owed")

    def _weights_follow(self) -> None:
        """Every head's weights and momentum, from those before and the deltas that it applied, in float64."""
        state, momentum = self._values(self.heads[0]["weights"]), Momentum(self.rule)
        for before, head in zip(self.heads, self.heads[1:], strict=False):
            if abs(head["rounds"] - before["rounds"] - head["fraction"]) > 1e-9:
                raise ScheduleError(f"version {head['version']}: the sum of f does not grow by f")
            if head["applied"]:
                self._step(before, head, state, momentum)
            _near(self._values(head["weights"]), state, f"the weights of version {head['version']}")
            if head["momentum"] is not None:
                _near(self._values(head["momentum"]), momentum.named(), f"the momentum of version {head['version']}")

    def _step(self, before: dict[str, Any], head: dict[str, Any], state: Arrays, momentum: Momentum) -> None:
        deltas = [self.sent[name] for name in sorted(head["applied"])]
        steps = np.array([delta.header["tokens"] / delta.header["steps"] for delta in deltas])
        ages = np.array([before["rounds"] - self.heads[delta.header["base_version"]]["rounds"] for delta in deltas])
        weights = steps / steps[0] / np.sqrt(1 + ages)
        nodes = np.array([delta.header["node"] for delta in deltas])
        # What a node sent one after the other counts as one larger delta.
        share = sum(float(weights[nodes == node].mean()) for node in np.unique(nodes))
        means = {
            name: sum(w * delta.values[name] for w, delta in zip(weights, deltas, strict=True)) / total
            for name, total in ((SLOTS, share), (MEAN, weights.sum()))
            if name in state
        }
        fraction = head["fraction"]
        expected = self._expected(before, set(nodes))
        if self.rule.patient and (self.calm is None or head["version"] < self.calm):
            quorum = self.rule.quorum or -(-expected // 2)
            if len(set(nodes)) < (quorum if before["version"] < _HINTED_VERSIONS else min(quorum, expected)):
                raise ScheduleError(f"version {head['version']} was made without a quorum, of {set(nodes.tolist())}")
        if self.rule.even:
            wanted = min(1.0, share / expected)
            if abs(wanted - fraction) > 1e-6:
                raise ScheduleError(f"version {head['version']} is {fraction:.6g} of a round, not {wanted:.6g}")
        momentum.step(state, means[SLOTS], fraction)
        if MEAN in state:
            state[MEAN] = (1 - fraction) * state[MEAN] + fraction * means[MEAN]
            newest = max(enumerate(deltas), key=lambda one: (one[1].header["base_version"], one[0]))[1]
            state[LATEST] = newest.values[LATEST]

    def _expected(self, before: Mapping[str, Any], present: set[str]) -> int:
        """How many nodes make a whole round: as configured at first, then as many as took part lately."""
        past = self.heads[: before["version"] + 1]
        hinted = self.rule.synchronous or before["version"] < _HINTED_VERSIONS
        if self.rule.expected is not None and hinted:
            return self.rule.expected
        last = {
            _session_of(name)[0]: head["version"]
            for head in past
            if before["rounds"] - float(f"{head['rounds']:.7g}") < self.rule.recent_rounds
            for name in head["applied"]
        }
        recent: list[str] = []
        for node in sorted(last, key=lambda node: -last[node]):
            if before["version"] - last[node] < self.rule.turns * (len(recent) + 1):
                recent.append(node)
        return len({*recent} | present)

    def has_dealt_with(self, version: int, name: str) -> bool:
        """Whether a delta was applied or rejected up to a version, or can no longer be."""
        processed = any(name in _processed(head) for head in self.heads[: version + 1])
        return processed or _has_processed(self.heads[version], *_session_of(name))

    def weights(self, version: int) -> Arrays:
        return self._values(self.heads[version]["weights"])

    def _values(self, blob: Mapping[str, Any]) -> Arrays:
        path = blob["path"]
        if path not in self.read:
            self.read[path] = _float64(load_tensors(self.blobs[path]))
        return dict(self.read[path])


@dataclass(slots=True)
class Momentum:
    """The outer optimizers, as diloco.md and arXiv 2401.09135 have them."""

    rule: Rule
    m: Any = 0.0
    buffer: Any = 0.0
    count: float = 0.0

    def step(self, state: Arrays, mean: np.ndarray, f: float) -> None:
        mu, lr = self.rule.momentum, self.rule.lr
        match self.rule.outer:
            case "sgd":
                state[SLOTS] = state[SLOTS] - lr * f * mean
            case "nesterov":
                self.m = mu**f * self.m + f * mean
                state[SLOTS] = state[SLOTS] - lr * (f * mean + mu * (1 - mu**f) / (1 - mu) * self.m)
            case "delayed_nesterov":
                self.buffer = self.buffer + f * mean
                self.count += f
                state[SLOTS] = state[SLOTS] - lr * f * mean
                if self.count >= 1 - 1e-9:
                    self.m = mu * self.m + self.buffer
                    state[SLOTS] = state[SLOTS] - lr * mu * self.m
                    self.buffer, self.count = 0.0 * self.buffer, self.count - 1

    def named(self) -> Arrays:
        buffer = {f"buffer.{SLOTS}": self.buffer} if self.rule.outer == "delayed_nesterov" else {}
        return {f"momentum.{SLOTS}": self.m} | buffer


def _delta(data: bytes) -> tuple[dict[str, Any], Arrays]:
    size = int.from_bytes(data[:8], "little")
    header = json.loads(json.loads(data[8 : 8 + size])["__metadata__"]["speedtronic_delta"])
    return header, _float64(load_tensors(data))


def _float64(tensors: Mapping[str, torch.Tensor]) -> Arrays:
    return {name: tensor.to(torch.float64).numpy() for name, tensor in tensors.items()}


def _name_of(header: Mapping[str, Any]) -> str:
    return f"in/{header['node']}/{header['session']}/{header['seq']:08d}.safetensors"


def _session_of(name: str) -> tuple[str, str, int]:
    """Node, session, and the number in it, of a delta or a copy of one."""
    _, node, session, file = name.split("/")
    return node, session, int(file.partition(".")[0])


def delta_of(copy: str) -> str:
    """The name of the delta of which an object is a copy."""
    node, session, seq = _session_of(copy)
    return f"in/{node}/{session}/{seq:08d}.safetensors"


def _number(session: str) -> int:
    return int(session.partition("-")[0])


def _has_processed(head: Mapping[str, Any], node: str, session: str, seq: int) -> bool:
    """Whether a version has a delta, or has closed its session."""
    mark = head["nodes"].get(node, NO_NODE)
    if session in mark["sessions"]:
        return bool(seq <= mark["sessions"][session]["seq"])
    return _number(session) < int(mark["closed_below"])


def _processed(head: Mapping[str, Any]) -> dict[str, str]:
    """The deltas that a head has dealt with: "applied", or why it rejected them."""
    rejected = {rejection["name"]: rejection["reason"] for rejection in head["rejected"]}
    return rejected | dict.fromkeys(head["applied"], "applied")


def _blobs(head: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [blob for blob in (head["weights"], head["momentum"]) if blob is not None]


def _near(theirs: Arrays, ours: Mapping[str, Any], what: str) -> None:
    for name, values in ours.items():
        worst = float(np.max(np.abs(theirs[name] - values)))
        if not worst <= _NEAR:
            raise ScheduleError(f"{what}: {name} is off by {worst:.3g}")
