"""How the deltas of a round become one step: what each weighs, and their running sum."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field

import torch
from torch import Tensor

from speedtronic.distributed.delta import Delta, DeltaHeader
from speedtronic.distributed.marks import Marks, Settled, rounded
from speedtronic.distributed.protocol import DeltaId, Manifest
from speedtronic.distributed.records import NodeMark
from speedtronic.distributed.schema import Schema, Tensors

_LARGEST_STEP = 2.0**40  # tokens of one inner step


def per_step(header: DeltaHeader) -> float:
    """n of a delta: the tokens, of data without them the samples, of one inner step.

    The number of inner steps is not part of the weight: a delta grows with it by itself. A header's claim is bounded,
    so that a weighted sum cannot leave float32.
    """
    return rounded(min(max(1.0, (header.tokens or header.samples) / header.steps), _LARGEST_STEP))


def staleness_weight(rounds: float) -> float:
    """What is left of a delta's weight at this age: (1 + r)^(-1/2)."""
    return float((1.0 + rounds) ** -0.5)


@dataclass
class Round:
    """A round as it is put together: one running sum, whatever the number of deltas.

    Attributes:
        head: the version on which it builds.
        marks: of the nodes, as far as they have moved.
        most_tokens: the most tokens of an inner step that count.
        recent: marks of the nodes in the last rounds.
        sum: of w·Δ, and of w·(b - B) for averaged buffers.
        weights_of: by node, the w of each of its deltas, in units of `unit`.
        newest: the buffers that are taken from the newest delta, and in `newest_base` the version it is based on.
        unit: n of the first delta. While all are equal, every weight is exactly 1.
        per_step: n by node.
        settled: what was processed, in this order.
        garbage: by delta, names of objects that nobody needs.
    """

    head: Manifest
    marks: Marks
    most_tokens: float = math.inf
    recent: dict[str, NodeMark] = field(default_factory=dict)
    sum: Tensors = field(default_factory=dict)
    newest: Tensors = field(default_factory=dict)
    newest_base: int = -1
    weights_of: dict[str, list[float]] = field(default_factory=dict)
    unit: float | None = None
    per_step: dict[str, float] = field(default_factory=dict)
    settled: list[Settled] = field(default_factory=list)
    garbage: dict[DeltaId, tuple[str, ...]] = field(default_factory=dict)

    @property
    def applied(self) -> list[DeltaId]:
        """The deltas that entered."""
        return [one.delta for one in self.settled if one.reason is None]

    def settle(self, one: Settled) -> None:
        self.settled.append(one)
        self.marks.settle(one)

    def tokens(self, header: DeltaHeader) -> float:
        """n of a delta, as far as it is believed."""
        return min(per_step(header), self.most_tokens)

    def add(self, delta: Delta, age: float, scale: float, schema: Schema, weights: Tensors) -> None:
        """Add up a delta of an age in rounds, scaled. `weights` are those of the head."""
        header = delta.header
        # w = n · (1 + r)^(-1/2), with n in units of the first delta's n, so that equal nodes weigh exactly 1.
        n = self.tokens(header)
        self.unit = self.unit or n
        self.per_step[header.node] = n
        weight = n / self.unit * staleness_weight(age)
        self.weights_of.setdefault(header.node, []).append(weight)

        for name in schema.names("trained"):
            self._add(name, delta.tensors[name], weight * scale)
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

    def fraction(self, expected: int) -> float:
        """f: the weight of this round, as a fraction of a whole one's: all nodes, each with the median n, at r = 0.

        Args:
            expected: how many nodes a whole round has.
        """
        if self.unit is None:
            return 0.0
        # The nodes of this round tell their n themselves; of absent ones the last mark tells it.
        known = {node: mark.tokens_per_step for node, mark in self.recent.items()} | self.per_step
        weight = self.weight * (self.unit / statistics.median(known.values()))
        return min(1.0, weight / expected)
