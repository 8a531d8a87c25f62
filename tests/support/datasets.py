"""Datasets that spawned workers can import."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, get_worker_info


def numbers_of_chance() -> list[float]:
    """One number from each of the three generators that augmentation code draws from."""
    return [random.random(), np.random.random(), torch.rand(()).item()]


class Noise(Dataset[Tensor]):
    """Sample i is i and three random numbers, float64."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([index, *numbers_of_chance()], dtype=torch.float64)


class NoiseStream(IterableDataset[Tensor]):
    """The items of `Noise` in their order, in every worker."""

    def __init__(self, size: int) -> None:
        self.size = size

    def shard(self) -> tuple[int, int]:
        return 0, 1

    def __iter__(self) -> Iterator[Tensor]:
        first, step = self.shard()
        for index in range(first, self.size, step):
            yield torch.tensor([index, *numbers_of_chance()], dtype=torch.float64)


class ShardedNoiseStream(NoiseStream):
    """The items of `Noise`, dealt to the workers."""

    def shard(self) -> tuple[int, int]:
        worker = get_worker_info()
        return (worker.id, worker.num_workers) if worker else (0, 1)


class StatefulStream(NoiseStream):
    """Counts the items that it has made since it was constructed, and knows where it is."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.made = 0
        self.position = 0
        self.begin = 0

    def __iter__(self) -> Iterator[Tensor]:
        begin, self.begin = self.begin, 0
        for index in range(begin, self.size):
            self.made += 1
            self.position = index + 1
            yield torch.tensor([index, *numbers_of_chance()], dtype=torch.float64)

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.begin = state["position"]


class Failing(Noise):
    """Sample 3 fails."""

    def __getitem__(self, index: int) -> Tensor:
        if index == 3:
            raise ValueError("boom")
        return super().__getitem__(index)


class FailingStream(NoiseStream):
    """Item 3 fails."""

    def __iter__(self) -> Iterator[Tensor]:
        for index, item in enumerate(super().__iter__()):
            if index == 3:
                raise ValueError("boom")
            yield item


class Killed(Noise):
    """Every process that reads a sample is killed, as by a machine that is out of memory."""

    def __getitem__(self, index: int) -> Tensor:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("still alive")


class Unsendable(Noise):
    """Holds what cannot be pickled."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.transform = lambda sample: sample
