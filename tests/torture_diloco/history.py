"""What a store tells of a run that is over: whether its history is one line, whether everything that was trained is in
it once, and whether its weights are what its deltas make of the first ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import torch
from torch import Tensor

from speedtronic.distributed.delta import DeltaHeader, read_header
from speedtronic.distributed.protocol import Manifest, Position, head_name, parse_delta_name
from speedtronic.distributed.tensors import load_safetensors

START = Position(0, 0, 0)


class History(NamedTuple):
    """All versions of a store, the deltas that any of them took in or refused, and the weights at both ends.

    Attributes:
        manifests: from version 0 on.
        headers, deltas: by the name of the delta.
        first, last: weights.
    """

    manifests: Sequence[Manifest]
    headers: Mapping[str, DeltaHeader]
    deltas: Mapping[str, Mapping[str, Tensor]]
    first: Mapping[str, Tensor]
    last: Mapping[str, Tensor]


def read(store: Path, kept: Path) -> History:
    """The history in a folder store, and in the folder where what was deleted from it is kept."""
    manifests: list[Manifest] = []
    while (file := store / head_name(len(manifests))).exists():
        manifests.append(Manifest.from_bytes(file.read_bytes()))
    files = [file for root in (kept, store) for file in root.glob("in/*/*/*.safetensors")]
    named = {id.name: file for file in files if (id := parse_delta_name("/".join(file.parts[-4:]))) is not None}
    return History(
        manifests,
        {name: read_header(file.read_bytes()) for name, file in named.items()},
        {name: load_safetensors(file) for name, file in named.items()},
        _weights(manifests[0], store, kept),
        _weights(manifests[-1], store, kept),
    )


def _weights(manifest: Manifest, store: Path, kept: Path) -> dict[str, Tensor]:
    file = store / manifest.weights.path
    return load_safetensors(file if file.exists() else kept / manifest.weights.path)


def faults(history: History, nodes: Sequence[str], whole: Position) -> Iterator[str]:
    """What must not be.

    Args:
        nodes: that took part.
        whole: how far each of them was to train.
    """
    yield from _forks(history.manifests)
    yield from _wrong_marks(history.manifests)
    for name in (rejection.name for manifest in history.manifests for rejection in manifest.rejected):
        yield f"{name} was refused"
    applied = Counter(name for manifest in history.manifests for name in manifest.applied)
    for name, times in applied.items():
        if times > 1:
            yield f"{name} was taken in {times} times"
    for node in nodes:
        own = [history.headers[name] for name in applied if history.headers[name].node == node]
        yield from _gaps(node, own, whole)
        marks = [mark for key, mark in history.manifests[-1].marks.items() if key.startswith(f"{node}/")]
        reached = max((mark.position for mark in marks), default=START)
        if reached != whole:
            yield f"the marks of {node} end at {tuple(reached)}, and not at {tuple(whole)}"


def _forks(manifests: Sequence[Manifest]) -> Iterator[str]:
    for version, manifest in enumerate(manifests):
        parent = manifests[version - 1].sha256 if version else None
        if manifest.version != version or manifest.parent != parent:
            yield f"version {version} is not the child of the one before"


def _wrong_marks(manifests: Sequence[Manifest]) -> Iterator[str]:
    """The numbers of a session that a version deals with follow on those that the version before had dealt with."""
    for before, manifest in zip(manifests, manifests[1:], strict=False):
        named = [*manifest.applied, *(rejection.name for rejection in manifest.rejected)]
        ids = sorted(id for id in map(parse_delta_name, named) if id is not None)
        reached = {key: mark.seq for key, mark in before.marks.items()}
        for id in ids:
            if id.seq != reached.get(id.session_key, 0) + 1:
                yield f"version {manifest.version} deals with {id.name} out of turn"
            reached[id.session_key] = id.seq
        if reached != {key: mark.seq for key, mark in manifest.marks.items()}:
            yield f"the marks of version {manifest.version} are not those of the deltas that it deals with"


def _gaps(node: str, headers: Sequence[DeltaHeader], whole: Position) -> Iterator[str]:
    """What the deltas of a node hold must lie end to end, from nothing to the whole."""
    reached = START
    for header in sorted(headers, key=lambda header: header.position):
        began = Position(
            header.position.step - header.steps,
            header.position.samples - header.samples,
            header.position.tokens - header.tokens,
        )
        if began != reached:
            what = "twice" if began < reached else "not at all"
            yield f"{node}: {what} is in the weights what lies between {tuple(began)} and {tuple(reached)}"
        reached = header.position
    if reached != whole:
        yield f"{node}: the deltas end at {tuple(reached)}, and not at {tuple(whole)}"


def distance(history: History, *, nodes: int) -> float:
    """How far the last weights are, in any number, from what the deltas make of the first ones."""
    expected = replayed(history, nodes=nodes)
    return max(float((history.last[name].double() - tensor).abs().max()) for name, tensor in expected.items())


def replayed(history: History, *, nodes: int, lr: float = 1.0, momentum: float = 0.5) -> dict[str, Tensor]:
    """The weights that the deltas, each taken in once and in the order of the versions, make of the first ones.

    The rule is that of docs/diloco.md, in float64: a delta r rounds old weighs w = (1 + r)^(-1/2); those of one node
    follow on each other, and have the weight of one of them together. D is the sum of w times the deltas over the
    weight, f the weight over that which all nodes would have: m <- mu^f m + f D, and
    theta <- theta - lr (f D + mu (1 - mu^f) / (1 - mu) m).
    """
    weights = {name: tensor.double() for name, tensor in history.first.items()}
    moments = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    for before, manifest in zip(history.manifests, history.manifests[1:], strict=False):
        headers = {name: history.headers[name] for name in manifest.applied}
        if not headers:
            continue
        shares = {
            name: (1.0 + before.rounds - history.manifests[header.base_version].rounds) ** -0.5
            for name, header in headers.items()
        }
        weight = 0.0
        for node in {header.node for header in headers.values()}:
            weight += fmean(share for name, share in shares.items() if headers[name].node == node)
        f = min(1.0, weight / nodes)
        for name in weights:
            mean = torch.zeros_like(weights[name])
            for delta, share in shares.items():
                mean += share / weight * history.deltas[delta][name]
            moments[name] = momentum**f * moments[name] + f * mean
            weights[name] -= lr * (f * mean + momentum * (1 - momentum**f) / (1 - momentum) * moments[name])
    return weights
