"""What nodes and a master will ask of a store, counted before anything runs: requests, bytes, objects, commits."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from speedtronic.distributed.codec import make_codec
from speedtronic.distributed.delta import max_delta_bytes
from speedtronic.distributed.node import LOOKS_PER_CHECK
from speedtronic.distributed.packed_tensors import METADATA_LIMIT, packed_size
from speedtronic.distributed.schema import Schema

_HEADER = 1024  # bytes that a delta says of itself
_MARK = 400  # bytes of a node in a manifest, with what entered and what was refused; less than 512 are promised
_MANIFEST = 1500  # bytes of the rest of it


class Requests(NamedTuple):
    """How many requests of each kind. Services charge the four kinds differently."""

    put: float = 0.0
    get: float = 0.0
    list: float = 0.0
    delete: float = 0.0

    def plus(self, other: Requests) -> Requests:
        return Requests(*(one + another for one, another in zip(self, other, strict=True)))

    def times(self, count: float) -> Requests:
        return Requests(*(count * one for one in self))

    @property
    def total(self) -> float:
        return sum(self)


# What one step of the protocol asks, without retries. Proven by counting in `tests/distributed/test_cost.py`.
SEND = Requests(put=1, get=1)  # the delta, then the identity of the store
TAKE = Requests(get=4, list=1)  # two names of versions, the identity, the weights; what lies beside the next version
LOOK = Requests(get=1)  # of a node, where nothing is new
CLOSER_LOOK = Requests(get=2, list=1)  # every eighth one: what lies beside the next version, and the identity
MASTER_LOOK = Requests(get=1, list=1)
# Weights, momentum, manifest; each followed by what proves that the store is still there; then the old versions.
PUBLISH = Requests(put=3, get=7, list=4, delete=2)
ADMIT = Requests(get=1, delete=1)  # a delta


@dataclass(frozen=True)
class Sizes:
    """Bytes of one object of each kind."""

    delta: int
    weights: int
    momentum: int

    @staticmethod
    def of(schema: Schema, codec: str) -> Sizes:
        """The sizes for a model; the momentum is that of an outer optimizer with one tensor for each of the model's."""
        largest = (
            max_delta_bytes(schema, make_codec(codec)) + _HEADER,
            packed_size(schema.types()),
            packed_size({f"momentum.{name}": kind for name, kind in schema.types("trained").items()}),
        )
        return Sizes(*(size - METADATA_LIMIT for size in largest))


@dataclass(frozen=True)
class Load:
    """What a store sees.

    Attributes:
        versions: published in an hour.
        deltas: sent in an hour, by all nodes.
        requests: in an hour.
        sent: bytes that are put in an hour.
        received: bytes that are read in an hour.
        stored: bytes in the store at the end.
        objects: in the store at the end.
        commits: in an hour in the busiest repository, if the store is a Git repository where the master makes one
            commit a version, and each node has a repository of its own.
        commits_in_one: the same, if all use one repository.
    """

    versions: float
    deltas: float
    requests: Requests
    sent: float
    received: float
    stored: float
    objects: float
    commits: float
    commits_in_one: float


def expected_load(
    sizes: Sizes,
    *,
    nodes: int,
    hours: float,
    steps: int,
    inner_steps: int,
    poll_interval: float,
    quorum: int,
    keep: int,
) -> Load:
    """The load of nodes that are equally fast, from their start to their end.

    Args:
        nodes: how many train.
        hours: that each of them needs for its steps.
        steps: optimizer updates of each node.
        inner_steps: of them between two deltas.
        poll_interval: seconds between two looks at the store.
        quorum: deltas of a version.
        keep: versions whose weights and momentum stay.
    """
    rounds = math.ceil(steps / inner_steps) / hours  # in an hour
    looks = 3600 / poll_interval
    deltas = nodes * rounds
    versions = deltas / min(quorum, nodes)
    taken = min(versions, looks)  # by one node: it takes the newest at each look
    idle = max(0.0, looks - taken)
    node = SEND.times(rounds).plus(TAKE.times(taken)).plus(LOOK.times(idle))
    node = node.plus(CLOSER_LOOK.times(idle / LOOKS_PER_CHECK))
    idle_master = max(0.0, looks - versions)
    master = PUBLISH.times(versions).plus(ADMIT.times(deltas)).plus(MASTER_LOOK.times(idle_master))

    manifest = _MANIFEST + _MARK * nodes
    kept = min(keep, versions * hours + 1)
    return Load(
        versions=versions,
        deltas=deltas,
        requests=node.times(nodes).plus(master),
        sent=deltas * sizes.delta + versions * (sizes.weights + sizes.momentum + manifest),
        received=deltas * sizes.delta + nodes * taken * sizes.weights,
        stored=kept * (sizes.weights + sizes.momentum) + nodes * sizes.delta + (versions * hours + 1) * manifest,
        objects=2 * kept + nodes + versions * hours + 2,
        commits=max(versions, rounds),
        commits_in_one=versions + deltas,
    )
