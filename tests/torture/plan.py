"""What is to happen to one life of a training process. All of it follows from a seed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tests.torture.board import Phase

Moment = Literal["before", "middle", "after"]


@dataclass(frozen=True)
class Kill:
    """A process kills itself at the `count`-th operation of a phase."""

    phase: Phase
    count: int
    moment: Moment


@dataclass(frozen=True)
class Faults:
    """How the file layer misbehaves.

    Attributes:
        rate: share of the operations that change something and fail, with ENOSPC or EIO.
        read_rate: share of the files that cannot be opened for reading.
        full: the disk is full from the first to the second of these numbers of operations.
        short_writes: the system takes less of each write than it is given.
        slow_fsync: longest delay of an fsync, in seconds.
    """

    rate: float = 0.0
    read_rate: float = 0.0
    full: tuple[int, int] = (0, 0)
    short_writes: bool = False
    slow_fsync: float = 0.0


@dataclass(frozen=True)
class Plan:
    """One life.

    Attributes:
        seed: of everything random in the file layer of this life.
        kill: where the process kills itself; None where it is killed from outside, or not at all.
        after: seconds until it is killed from outside.
        workers: processes that read its data.
    """

    seed: int = 0
    kill: Kill | None = None
    after: float | None = None
    faults: Faults = Faults()
    workers: int = 0
