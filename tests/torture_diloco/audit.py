"""Recompute a whole history bit for bit, from all objects that ever were in a store.

    python -m tests.torture_diloco.audit FOLDER [FOLDER ...] [--expected-nodes N] [--outer NAME] ...

The folders hold the objects under their names, also the deleted ones, each in one of them at least. Nothing here is of
the code that it audits: the rules are written anew from docs/diloco.md, in the order in which sums are made there, with
the arithmetic of torch, so that not a bit may differ. Exit code 0 when nothing is wrong, else 1.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from statistics import fmean, median, median_low
from typing import Any, NamedTuple

import torch
from safetensors.torch import load as load_tensors
from torch import Tensor

Json = dict[str, Any]
Tensors = dict[str, Tensor]

RECENT_ROUNDS = 5
TURNS = 10  # of k nodes, each must be in one of 10·k versions to be expected
HINTED_VERSIONS = 5  # for which `expected_nodes` is believed
MOST_OPEN = 16  # sessions of a node
CLIPPED = 3.0  # times the usual norm
LONGEST_ROUND = 3600.0  # seconds
LARGEST_CLAIM = 4.0  # times the median of tokens
_DELTA = re.compile(r"in/([^/]+)/([^/]+)/(\d{8})(?:\.[1-9])?\.safetensors")


class Id(NamedTuple):
    node: str
    session: str
    seq: int

    @property
    def name(self) -> str:
        return f"in/{self.node}/{self.session}/{self.seq:08d}.safetensors"

    @property
    def number(self) -> int:
        head = self.session.partition("-")[0]
        return int(head) if len(head) == 8 and head.isdigit() else 0


class Position(NamedTuple):
    step: int
    samples: int
    tokens: int


START = Position(0, 0, 0)


@dataclass(frozen=True)
class Rules:
    """The settings of the run. `expected`: as configured; None if it was not.

    Attributes:
        trained: names of the trained tensors, in the order of the model; None: all, in the order of the file.
        average, newest: names of its buffers.
    """

    outer: str = "nesterov"
    lr: float = 1.0
    momentum: float = 0.5
    expected: int | None = None
    synchronous: bool = False
    average: frozenset[str] = frozenset()
    newest: frozenset[str] = frozenset()
    frozen: frozenset[str] = frozenset()
    turns: int = TURNS


@dataclass
class Objects(Mapping[str, bytes]):
    """Objects by name, from several folders that may hold the same ones."""

    folders: Sequence[Path]

    def __post_init__(self) -> None:
        self._files: dict[str, list[Path]] = defaultdict(list)
        for folder in self.folders:
            for file in sorted(folder.rglob("*")):
                if file.is_file() and not any(part.startswith(".") for part in file.relative_to(folder).parts):
                    self._files[file.relative_to(folder).as_posix()].append(file)

    def __getitem__(self, name: str) -> bytes:
        return self._files[name][0].read_bytes() if name in self._files else _absent(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    def changed(self) -> Iterator[str]:
        """Names under which two folders hold different bytes."""
        for name, files in self._files.items():
            if len({file.read_bytes() for file in files}) > 1:
                yield name


def _absent(name: str) -> bytes:
    raise KeyError(name)


@dataclass
class Delta:
    header: Json
    tensors: Tensors
    size: int


@dataclass
class Audit:
    """What was found.

    Attributes:
        versions, deltas: how many were recomputed, after version 0.
        weights: of the last version.
    """

    rules: Rules
    objects: Mapping[str, bytes]
    faults: list[str] = field(default_factory=list)
    heads: list[Json] = field(default_factory=list)
    deltas: dict[Id, Delta] = field(default_factory=dict)
    weights: Tensors = field(default_factory=dict)
    versions: int = 0

    # --- All of it

    def run(self, nodes: Mapping[str, Position] | None = None) -> Audit:
        """Everything that a history must be.

        Args:
            nodes: how far each node trained, if that is known.
        """
        self.recompute()
        self._nothing_left()
        for node in sorted({id.node for id in self._applied()} | set(nodes or ())):
            self._covered_once(node, None if nodes is None else nodes.get(node))
        return self

    def recompute(self) -> Audit:
        """The line of manifests, and of each version the weights, the momentum and the marks."""
        self._chain()
        if not self.heads:
            self._fault("there is no version 0")
            return self
        self.weights = load_tensors(self.objects[self.heads[0]["weights"]["path"]])
        outer = Outer(self.rules, self._only_trained(self.weights))
        for before, head in zip(self.heads, self.heads[1:], strict=False):
            self._version(before, head, outer)
        return self

    def _fault(self, text: str) -> None:
        self.faults.append(text)

    # --- The line of manifests

    def _chain(self) -> None:
        identity = json.loads(self.objects["store.json"])
        if set(identity) != {"id", "protocol"} or not re.fullmatch("[0-9a-f]{32}", identity["id"]):
            self._fault(f"store.json is {identity}")
        seen: set[str] = set()
        parent: str | None = None
        while (found := self._next(parent)) is not None:
            name, head = found
            seen.add(name)
            self.heads.append(head)
            parent = hashlib.sha256(self.objects[name]).hexdigest()
            if head["store"] != identity["id"] or head["protocol"] != 2:
                self._fault(f"{name} is of store {head['store']}, of protocol {head['protocol']}")
        for name in set(self.objects) - seen:
            if name.startswith("head/"):
                self._fault(f"{name} is in no line of versions")

    def _next(self, parent: str | None) -> tuple[str, Json] | None:
        version = len(self.heads)
        for copy in range(9):
            name = f"head/{version:08d}{f'.{copy}' if copy else ''}.json"
            if name not in self.objects:
                continue  # junk that the version was put beside may have been removed
            try:
                head = json.loads(self.objects[name])
            except ValueError:
                continue
            canonical = json.dumps(head, sort_keys=True, separators=(",", ":")).encode()
            if head["version"] == version and head["parent"] == parent and canonical == self.objects[name]:
                return name, head
        return None

    # --- One version

    def _version(self, before: Json, head: Json, outer: Outer) -> None:
        self.versions += 1
        where = f"version {head['version']}"
        applied, rejected = _ids(head["applied"]), _ids(entry["name"] for entry in head["rejected"])
        for id in [*applied, *rejected]:
            if id not in self.deltas and (delta := self._read(id)) is not None:
                self.deltas[id] = delta
        missing = [id.name for id in applied if id not in self.deltas]
        if missing:
            self._fault(f"{where} has taken in {missing}, which are not whole in the store")
            return
        round_ = Round(self.rules, self.heads[: head["version"]], self.weights)
        round_.claims(applied, self.deltas)
        for id in sorted(applied):
            round_.add(id, self.deltas[id])
        fraction = round_.fraction()
        if head["fraction"] != fraction or head["rounds"] != before["rounds"] + fraction:
            self._fault(f"{where}: f is {head['fraction']!r}, the sum {head['rounds']!r}; computed {fraction!r}")
        if applied:
            mean = round_.mean()
            gradient = {name: mean[name] for name in self._only_trained(self.weights)}
            outer.step(self.weights, gradient, fraction)
            for name in self.rules.average:
                self.weights[name].add_(mean[name], alpha=fraction)
            for name, value in round_.newest.items():
                self.weights[name] = value.clone()
            self._same(where, head["weights"], self.weights)
            if head["momentum"] is not None:
                self._same(where, head["momentum"], outer.tensors())
            if head["outer"] != {"name": self.rules.outer, "scalars": outer.scalars()}:
                self._fault(f"{where}: the outer optimizer is {head['outer']}")
        elif head["weights"] != before["weights"] or head["momentum"] != before["momentum"]:
            self._fault(f"{where} has other weights, and took in nothing")
        marks = Marks(before, head, self.deltas, round_.norms, round_.counts).moved(applied, rejected)
        for node in {*marks, *head["nodes"]}:
            if marks.get(node) != head["nodes"].get(node):
                self._fault(f"{where}: the mark of {node} is {head['nodes'].get(node)}, computed {marks.get(node)}")

    def _read(self, id: Id) -> Delta | None:
        """The first copy of a delta that is whole."""
        stem = id.name.removesuffix(".safetensors")
        for copy in range(9):
            data = self.objects.get(f"{stem}{f'.{copy}' if copy else ''}.safetensors")
            if data is None:
                return None
            delta = read_delta(data)
            if delta is not None:
                if (delta.header["node"], delta.header["session"], delta.header["seq"]) != id:
                    self._fault(f"{id.name} says that it is {delta.header['session']}/{delta.header['seq']}")
                return delta
        return None

    def _same(self, where: str, blob: Json, computed: Tensors) -> None:
        """Whether an object holds exactly these tensors."""
        data = self.objects.get(blob["path"])
        if data is None or len(data) != blob["size"] or hashlib.sha256(data).hexdigest() != blob["sha256"]:
            self._fault(f"{where}: {blob['path']} is missing, or not what the manifest says")
            return
        stored = load_tensors(data)
        if stored.keys() != computed.keys():
            self._fault(f"{where}: {blob['path']} holds {sorted(stored)}")
            return
        for name, tensor in computed.items():
            if stored[name].dtype != tensor.dtype or stored[name].numpy().tobytes() != tensor.numpy().tobytes():
                off = float((stored[name].double() - tensor.double()).abs().max())
                self._fault(f"{where}: {name} in {blob['path']} is off by {off:.3g}")

    def _only_trained(self, tensors: Tensors) -> Tensors:
        rules = self.rules
        others = rules.average | rules.newest | rules.frozen
        return {name: tensor for name, tensor in tensors.items() if name not in others}

    # --- All versions together

    def _applied(self) -> list[Id]:
        return [id for head in self.heads for id in _ids(head["applied"])]

    def _nothing_left(self) -> None:
        """Each delta that ever was in the store was dealt with, once."""
        processed: dict[Id, int] = defaultdict(int)
        for head in self.heads:
            for id in [*_ids(head["applied"]), *_ids(entry["name"] for entry in head["rejected"])]:
                processed[id] += 1
            for entry in head["rejected"]:
                self._fault(f"{entry['name']} was refused: {entry['reason']}")
        for id, times in processed.items():
            if times > 1:
                self._fault(f"{id.name} was dealt with {times} times")
        there = {Id(m[1], m[2], int(m[3])) for m in map(_DELTA.fullmatch, self.objects) if m is not None}
        for id in sorted(there - processed.keys()):
            self._fault(f"{id.name} was sent, and no version deals with it")

    def _covered_once(self, node: str, whole: Position | None) -> None:
        """What the deltas of a node hold lies end to end, from nothing to the end of its training."""
        reached = START
        headers = [self.deltas[id].header for id in self._applied() if id.node == node and id in self.deltas]
        for header in sorted(headers, key=lambda header: tuple(header["position"])):
            position = Position(*header["position"])
            parts = zip(position, (header["steps"], header["samples"], header["tokens"]), strict=True)
            began = Position(*(end - part for end, part in parts))
            if began != reached:
                what = "twice" if began < reached else "not at all"
                self._fault(f"{node}: {what} is in the weights what lies between {tuple(began)} and {tuple(reached)}")
            reached = position
        if whole is not None and reached != whole:
            self._fault(f"{node}: the deltas end at {tuple(reached)}, and not at {tuple(whole)}")


def read_delta(data: bytes) -> Delta | None:
    """A delta, from the bytes of a safetensors object; None if they are torn."""
    try:
        length = int.from_bytes(data[:8], "little")
        header = json.loads(json.loads(data[8 : 8 + length])["__metadata__"]["speedtronic_delta"])
        tensors = load_tensors(data)
    except Exception:  # noqa: BLE001 - torn bytes make the library raise whatever it likes
        return None
    if hashlib.sha256(data[8 + length :]).hexdigest() != header["sha256"]:
        return None
    return Delta(header, {name: _widened(tensor) for name, tensor in tensors.items()}, len(data))


def _widened(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.is_floating_point() else tensor


def _ids(names: Any) -> list[Id]:
    return [Id(m[1], m[2], int(m[3])) for m in map(_DELTA.fullmatch, names) if m is not None]


# --- A round


@dataclass
class Round:
    """The sum of w·Δ over the deltas that a version takes in, one after the other in the order of their names."""

    rules: Rules
    past: Sequence[Json]  # versions before this one
    weights: Tensors  # of the last of them
    sum: Tensors = field(default_factory=dict)
    newest: Tensors = field(default_factory=dict)
    newest_base: int = -1
    unit: float | None = None
    most: float = math.inf
    shares: dict[str, list[float]] = field(default_factory=dict)
    counts: dict[str, float] = field(default_factory=dict)  # n by node
    norms: dict[Id, float] = field(default_factory=dict)

    @property
    def head(self) -> Json:
        return self.past[-1]

    def recent(self) -> dict[str, Json]:
        """The marks of the nodes that took part in the last rounds."""
        rounds = self.head["rounds"]
        return {node: mark for node, mark in self.head["nodes"].items() if rounds - mark["rounds"] < RECENT_ROUNDS}

    def claims(self, ids: Sequence[Id], deltas: Mapping[Id, Delta]) -> None:
        """The most tokens of an inner step that count: four times the median. Before any node is known, the first
        deltas of the nodes tell it."""
        known = [mark["tokens_per_step"] for mark in self.recent().values() if mark["tokens_per_step"] > 0]
        if not known:
            first = {id.node: _claim(deltas[id].header) for id in sorted(ids, reverse=True)}
            known = [*first.values()] if len(first) > 1 else []
        self.most = LARGEST_CLAIM * median_low(known) if known else math.inf

    def add(self, id: Id, delta: Delta) -> None:
        header = delta.header
        n = min(_claim(header), self.most)
        self.unit = self.unit or n
        self.counts[header["node"]] = n
        age = self.head["rounds"] - self.past[header["base_version"]]["rounds"]
        weight = n / self.unit * (1.0 + age) ** -0.5
        self.shares.setdefault(header["node"], []).append(weight)
        scale, self.norms[id] = self._clipped(delta)
        for name in self._trained(delta):
            self._add(name, delta.tensors[name], weight * scale)
        for name in self.rules.average:
            local, value = delta.tensors[name], self.weights[name]
            self._add(name, (local - value).masked_fill(local == value, 0.0), weight)
        if header["base_version"] >= self.newest_base:
            self.newest_base = header["base_version"]
            self.newest = {name: delta.tensors[name].clone() for name in self.rules.newest}

    def _clipped(self, delta: Delta) -> tuple[float, float]:
        """By what a delta is scaled, and its norm afterwards. The usual norm grows with the steps, or with their square
        root, whichever is more."""
        norm = math.sqrt(sum(float(delta.tensors[name].double().square().sum()) for name in self._trained(delta)))
        known = [(m["norm"], m["steps"]) for m in self.recent().values() if m["norm"] and m["steps"]]
        if not known:
            return 1.0, norm
        steps = delta.header["steps"]
        usual = max(
            median_low(norm / count for norm, count in known) * steps,
            median_low(norm / math.sqrt(count) for norm, count in known) * math.sqrt(steps),
        )
        scale = CLIPPED * usual / norm if norm > CLIPPED * usual else 1.0
        return scale, norm * scale

    def _trained(self, delta: Delta) -> list[str]:
        return [name for name in delta.tensors if name not in self.rules.average | self.rules.newest]

    def _add(self, name: str, value: Tensor, weight: float) -> None:
        if name not in self.sum:
            self.sum[name] = torch.zeros_like(value)
        self.sum[name].add_(value, alpha=weight)

    @property
    def share(self) -> float:
        """The deltas of a node follow each other, and count as one larger delta."""
        return sum(fmean(shares) for shares in self.shares.values())

    def mean(self) -> Tensors:
        sent = sum(sum(shares) for shares in self.shares.values())
        return {name: total / (sent if name in self.rules.average else self.share) for name, total in self.sum.items()}

    def fraction(self) -> float:
        if self.unit is None:
            return 0.0
        recent = self.recent()
        counts = {node: mark["tokens_per_step"] for node, mark in recent.items()} | self.counts
        expected = len(self._expected(recent) | self.counts.keys())
        if self.rules.expected is not None and (self.rules.synchronous or self.head["version"] < HINTED_VERSIONS):
            expected = self.rules.expected
        return min(1.0, self.share * (self.unit / median(counts.values())) / expected)

    def _expected(self, recent: Json) -> set[str]:
        """Those that had a turn lately: the k-th node of the last rounds in one of the last TURNS·k versions."""
        ages = sorted((self.head["version"] - mark["version"], node) for node, mark in recent.items())
        expected: set[str] = set()
        for age, node in ages:
            if age < self.rules.turns * (1 + len(expected)):
                expected.add(node)
        return expected


# --- The outer step


class Outer:
    """The outer optimizers of docs/diloco.md: `nesterov`, `sgd` and `delayed_nesterov` (arXiv 2401.09135)."""

    def __init__(self, rules: Rules, weights: Tensors) -> None:
        self.rules = rules
        self.count = 0.0
        self.moments = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
        self.buffers = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}

    def step(self, weights: Tensors, mean: Tensors, f: float) -> None:
        mu, lr = self.rules.momentum, self.rules.lr
        decay = mu**f
        factor = mu if f == 1.0 else mu * (1.0 - decay) / (1.0 - mu)
        self.count += f
        whole = self.count >= 1.0 - 1e-9
        for name, delta in mean.items():
            part = delta * f
            if self.rules.outer == "nesterov":
                self.moments[name] = self.moments[name] * decay + part
                part = torch.add(part, self.moments[name], alpha=factor)
            elif self.rules.outer == "delayed_nesterov":
                self.buffers[name] = self.buffers[name] + part
                if whole:
                    self.moments[name] = self.moments[name] * mu + self.buffers[name]
                    self.buffers[name] = torch.zeros_like(part)
                    part = torch.add(part, self.moments[name], alpha=mu)
            weights[name] = torch.add(weights[name], part, alpha=-lr)
        self.count -= whole

    def tensors(self) -> Tensors:
        if self.rules.outer == "sgd":
            return {}
        held = {f"momentum.{name}": tensor for name, tensor in self.moments.items()}
        if self.rules.outer == "delayed_nesterov":
            held |= {f"buffer.{name}": tensor for name, tensor in self.buffers.items()}
        return held

    def scalars(self) -> dict[str, float]:
        return {"count": self.count} if self.rules.outer == "delayed_nesterov" else {}


# --- Marks


@dataclass
class Marks:
    """What a version says of each node, from what the version before said and the deltas that it dealt with.

    Args:
        norms: of the deltas that entered, as they entered.
        counts: n of each node's last delta, as it counted.
    """

    before: Json
    head: Json
    deltas: Mapping[Id, Delta]
    norms: Mapping[Id, float]
    counts: Mapping[str, float]

    def moved(self, applied: Sequence[Id], rejected: Sequence[Id]) -> Json:
        nodes: Json = json.loads(json.dumps(self.before["nodes"]))
        reasons = {entry["name"]: entry["reason"] for entry in self.head["rejected"]}
        for id in sorted([*applied, *rejected]):
            mark = nodes.setdefault(id.node, _new_mark())
            delta = self.deltas.get(id)
            mark["time"] = self._time(id.node)
            mark["bytes"] += 0 if delta is None else delta.size
            session = mark["sessions"].get(id.session)
            if session is None or session["position"] == list(START):
                self._follow(mark, delta)
            session = mark["sessions"].setdefault(id.session, _new_session())
            session["seq"] = id.seq
            if delta is not None:
                session["position"] = delta.header["position"]
            if id.name in reasons:
                mark |= {"rejected": mark["rejected"] + 1, "reason": reasons[id.name]}
            else:
                self._count(mark, id, self.deltas[id].header)
            _close(mark)
        return nodes

    def _time(self, node: str) -> int:
        """When a mark moved: shortly before the manifest was made. What it says, if that is so."""
        made = datetime.fromisoformat(self.head["time"]).timestamp()
        said = int(self.head["nodes"].get(node, {"time": 0})["time"])
        return said if 0 <= made - said < LONGEST_ROUND else int(made)

    def _count(self, mark: Json, id: Id, header: Json) -> None:
        mark |= {
            "tokens_per_step": _seven_digits(self.counts[id.node]),
            "steps": header["steps"],
            "seconds": _seven_digits(header["seconds"]),
            "norm": _seven_digits(self.norms[id]),
            "version": self.head["version"],
            "rounds": _seven_digits(self.head["rounds"]),
        }

    def _follow(self, mark: Json, delta: Delta | None) -> None:
        """A new session tells how many deltas the one before it has sent."""
        before = None if delta is None else delta.header["predecessor"]
        if before is None:
            return
        name, last = before["session"], before["last"]
        if name in mark["sessions"]:
            session = mark["sessions"][name]
            session["last"] = max(last, session["last"] or 0)
        elif last > 0 and Id("", name, 0).number >= mark["closed_below"]:
            mark["sessions"][name] = _new_session() | {"last": last}


def _close(mark: Json) -> None:
    """Close the sessions of which everything is there, and the lowest of too many."""
    sessions = mark["sessions"]
    done = [name for name, one in sessions.items() if one["last"] is not None and one["seq"] >= one["last"]]
    left = sorted((Id("", name, 0).number, name) for name in sessions if name not in done)
    for name in [*done, *(name for _, name in left[: max(0, len(left) - MOST_OPEN)])]:
        del sessions[name]
        mark["closed_below"] = max(mark["closed_below"], Id("", name, 0).number + 1)


def _new_mark() -> Json:
    numbers = dict.fromkeys(("closed_below", "steps", "version", "time", "bytes", "rejected"), 0)
    return {
        "sessions": {},
        "tokens_per_step": 0.0,
        "seconds": 0.0,
        "norm": None,
        "rounds": 0.0,
        "reason": None,
    } | numbers


def _new_session() -> Json:
    return {"seq": 0, "last": None, "position": list(START)}


def _claim(header: Json) -> float:
    """Tokens of an inner step, as a delta says; samples where the data has no tokens."""
    return _seven_digits(min(max(1.0, (header["tokens"] or header["samples"]) / header["steps"]), 2.0**40))


def _seven_digits(number: float) -> float:
    return float(f"{number:.7g}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.torture_diloco.audit", description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs="+", type=Path, help="with all objects that ever were in the store")
    parser.add_argument("--expected-nodes", type=int, help="as configured")
    parser.add_argument("--outer", choices=("nesterov", "sgd", "delayed_nesterov"), default="nesterov")
    parser.add_argument("--outer-lr", type=float, default=1.0)
    parser.add_argument("--outer-momentum", type=float, default=0.5)
    parser.add_argument("--average", nargs="*", default=[], help="names of the model's averaged buffers")
    parser.add_argument("--newest", nargs="*", default=[], help="names of its integer buffers")
    parser.add_argument("--frozen", nargs="*", default=[], help="names of parameters that are not trained")
    given = parser.parse_args()
    rules = Rules(
        outer=given.outer,
        lr=given.outer_lr,
        momentum=given.outer_momentum,
        expected=given.expected_nodes,
        average=frozenset(given.average),
        newest=frozenset(given.newest),
        frozen=frozenset(given.frozen),
    )
    objects = Objects(given.folders)
    audit = Audit(rules, objects)
    audit.faults += [f"{name} was changed" for name in objects.changed()]
    audit.run()
    for fault in audit.faults:
        print(fault, file=sys.stderr)
    print(f"{audit.versions} versions and {len(audit.deltas)} deltas recomputed, {len(audit.faults)} faults")
    return 1 if audit.faults else 0


if __name__ == "__main__":
    sys.exit(main())
