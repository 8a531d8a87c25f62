"""Ranks that are threads of one process, so that what they compute together is tested in milliseconds."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

from speedtronic import runtime
from speedtronic.ranks import Group
from speedtronic.trainer import Trainer

T = TypeVar("T")

_PATIENCE = 30.0  # seconds that a rank waits for the others; only a fault takes so long


class _Table:
    """Where each rank lays what it brings, and takes what all have brought."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=_PATIENCE)
        self.places: list[Any] = [None] * size

    def swap(self, rank: int, brought: Any) -> list[Any]:
        self.places[rank] = brought
        self.barrier.wait()
        found = list(self.places)
        self.barrier.wait()
        return found


class ThreadGroup:
    """One rank of them. It counts its calls by name in `calls`."""

    def __init__(self, table: _Table, rank: int) -> None:
        self._table = table
        self.rank = rank
        self.size = table.size
        self.lost = False
        self.calls: list[str] = []

    def _swap(self, call: str, brought: Any) -> list[Any]:
        self.calls.append(call)
        found = self._table.swap(self.rank, (call, brought))
        assert len({other for other, _ in found}) == 1, f"ranks made different calls: {[other for other, _ in found]}"
        return [value for _, value in found]

    def reduce(self, number: Any, how: str = "sum") -> Any:
        numbers = self._swap(f"reduce {how}", number)
        if how == "max":
            return torch.stack(numbers).amax(0) if isinstance(number, Tensor) else max(numbers)
        total = sum(numbers[1:], numbers[0])
        return total / self.size if how == "mean" else total

    def reduce_later(self, tensor: Tensor) -> Callable[[], Tensor]:
        others = self._swap("reduce_later", tensor.clone())
        tensor.copy_(sum(others[1:], others[0]))
        return lambda: tensor

    def stack(self, tensor: Tensor) -> Tensor:
        return torch.stack(self._swap("stack", tensor.clone()))

    def gather(self, value: Any) -> list[Any]:
        return [json.loads(text) for text in self._swap("gather", json.dumps(value))]

    def broadcast(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            first = self._swap("broadcast", value.detach().clone())[0]
            with torch.no_grad():
                return value.copy_(first)
        first = json.loads(self._swap("broadcast", json.dumps(value) if self.rank == 0 else "null")[0])
        return value if self.rank == 0 else first

    def note(self, place: str) -> None:
        pass


def on_ranks(size: int, work: Callable[[ThreadGroup], T]) -> list[T]:
    """What `work` returns on each rank. An error of one ends all, and is raised."""
    table = _Table(size)

    def run(rank: int) -> T:
        try:
            return work(ThreadGroup(table, rank))
        except BaseException:
            table.barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(run, rank) for rank in range(size)]
    errors = [error for future in futures if (error := future.exception()) is not None]
    # The others only say that a rank did not come.
    for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
        raise error
    return [future.result() for future in futures]


_own = threading.local()
_building = threading.Lock()


def train_on_ranks(
    monkeypatch: pytest.MonkeyPatch,
    size: int,
    config: dict[str, Any],
    *,
    resume: bool = False,
    max_steps: int | None = None,
) -> list[Trainer]:
    """Train by a configuration on ranks that are threads; return their trainers.

    All threads share the global generators. So a model whose first weights are random is made by one after the other,
    unless they share something while they build: a checkpoint, or the store of a node.
    """

    def join(section: object, device: object) -> tuple[Group, torch.device]:
        return _own.group, torch.device("cpu")

    monkeypatch.setattr(runtime, "join_group", join)
    monkeypatch.setattr("speedtronic.trainer.trainer.join_group", join)

    def train(group: ThreadGroup) -> Trainer:
        _own.group = group
        with nullcontext() if resume or "distributed" in config else _building:
            trainer, _ = runtime.build_runtime(config, resume=resume)
        with trainer.logger:
            trainer.fit(max_steps)
        return trainer

    return on_ranks(size, train)
