"""The processes that train one model together, and the few operations they share numbers and values with."""

from __future__ import annotations

from typing import Literal, Protocol, TypeVar

from torch import Tensor

Number = TypeVar("Number", int, float, Tensor)
Value = TypeVar("Value")

Reduction = Literal["sum", "mean", "max"]


class Group(Protocol):
    """All processes of a run, ranks 0 to size - 1.

    Every rank makes the same calls in the same order: each call waits for the other ranks. Tensors have the same shape
    and dtype on every rank. Values are JSON-like: None, bool, int, float, str, and lists and dicts of these.
    """

    @property
    def rank(self) -> int:
        """The number of this process, from 0."""

    @property
    def size(self) -> int:
        """The number of processes, also called the world size."""

    def reduce(self, number: Number, how: Reduction = "sum") -> Number:
        """Combine the numbers of all ranks; every rank gets the result. A tensor stays on its device."""

    def gather(self, value: Value) -> list[Value]:
        """The values of all ranks in rank order; every rank gets the list."""

    def broadcast(self, value: Value) -> Value:
        """The value of rank 0, which every rank gets. A tensor is copied to the device of this rank's own."""


class SingleProcess:
    """The group of a run in one process. Every operation returns what it was given, without a copy."""

    rank = 0
    size = 1

    def reduce(self, number: Number, how: Reduction = "sum") -> Number:
        return number

    def gather(self, value: Value) -> list[Value]:
        return [value]

    def broadcast(self, value: Value) -> Value:
        return value
