"""The training loader: batches whose order and content are functions of (seed, epoch, position)."""

from __future__ import annotations

import logging
import os
import random
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, Dataset, Subset

from speedtronic.data.collate import collate_batch
from speedtronic.data.datasets import TokenDataset
from speedtronic.data.sampler import SampleOrder, derive_seed
from speedtronic.errors import DataError

_log = logging.getLogger(__name__)

_ORDERED_AT_ONCE = 1024  # positions whose samples are looked up together; a trade of latency for array speed

Collate = Callable[[Sequence[Any]], Any]


@runtime_checkable
class Fingerprinted(Protocol):
    """A dataset that can be recognised by what it contains; without this, type and length must do."""

    @property
    def fingerprint(self) -> str:
        """A checksum of the samples."""


@dataclass(frozen=True)
class _BatchKey:
    epoch: int
    indices: npt.NDArray[np.int64]


@dataclass(frozen=True)
class _Failure:
    """A DataError on its way out of a worker: the exception itself would arrive wrapped in a traceback."""

    message: str


class TokenLoader:
    """Batches of a map-style dataset, with a position that can be saved and sought.

    `iter(loader)` continues at the loader's position and ends with the epoch; the position counts samples
    that were delivered, never those that workers have fetched ahead, so it can be saved between any two
    batches and restored with another batch size or number of workers. Seeking costs the same for every
    position. The global random number generators are neither drawn from nor changed.

    Samples of a dataset that is not ours are computed with Python's, NumPy's and torch's CPU generators
    seeded from (seed, epoch, index): random augmentation differs between samples and epochs, and repeats with
    the seed whatever the number of workers. Such a dataset is recognised on resume by its `fingerprint` if it
    has one, otherwise by type and length.

    Args:
        dataset: anything with a length and samples at 0 … len − 1; must pickle if there are workers.
        batch_size: samples per batch (the micro batch).
        shuffle: a new order every epoch; otherwise that of the dataset.
        seed: of the order and of the samples' randomness.
        drop_last: leave out a batch at the end of an epoch that is not full.
        num_workers: processes that fetch; they live as long as the loader. 0 fetches in this process.
        prefetch_factor: batches that each worker fetches ahead; None is torch's default. Without
            workers it has no effect.
        pin_memory: copy batches to page-locked memory, for quick transfers to an accelerator.
        collate: samples to batch.
        multiprocessing_context: how workers start ("fork", "spawn", "forkserver"); None is the platform's
            default.

    Raises:
        DataError: an empty dataset, or with `drop_last` one that is smaller than a batch.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        *,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = True,
        num_workers: int = 0,
        prefetch_factor: int | None = None,
        pin_memory: bool = False,
        collate: Collate = collate_batch,
        multiprocessing_context: str | None = None,
    ) -> None:
        if not isinstance(dataset, Sized):
            raise DataError(f"{type(dataset).__name__} has no length, so it cannot be read in a seekable order")
        self.dataset = dataset
        self.fingerprint = _fingerprint(dataset, len(dataset))
        self._schedule = _Schedule(SampleOrder(len(dataset), shuffle=shuffle, seed=seed), batch_size, drop_last)
        self._batches: Iterator[Any] | None = None
        self._dataloader: DataLoader[Any] | None = None
        self._make_dataloader = partial(
            DataLoader,
            _Batches(dataset, collate, seed),
            batch_size=None,
            sampler=self._schedule,
            num_workers=num_workers,
            collate_fn=_unchanged,
            pin_memory=pin_memory,
            prefetch_factor=prefetch_factor if num_workers else None,
            persistent_workers=num_workers > 0,
            multiprocessing_context=multiprocessing_context if num_workers else None,
            worker_init_fn=_leave_signals_to_the_trainer,
            # With its own generator the library leaves the global one alone.
            generator=torch.Generator().manual_seed(derive_seed(seed) % 2**63),
        )

    def __len__(self) -> int:
        """Batches in a whole epoch."""
        return self._schedule.batches_per_epoch

    @property
    def batch_size(self) -> int:
        """Samples per batch."""
        return self._schedule.batch_size

    @property
    def epoch(self) -> int:
        """The epoch of the next batch, from 0."""
        return self._schedule.epoch

    def __iter__(self) -> Iterator[Any]:
        epoch = self.epoch
        while self.epoch == epoch:
            yield self._next_batch()

    def _next_batch(self) -> Any:
        if self._batches is None:
            if self._dataloader is None:
                self._dataloader = self._make_dataloader()
            self._batches = iter(self._dataloader)
        batch = next(self._batches)
        if isinstance(batch, _Failure):
            self._batches = None
            raise DataError(batch.message)
        self._schedule.advance()
        return batch

    def restart(self) -> None:
        """Go back to the first batch of the first epoch, so that every evaluation sees the same batches."""
        self._seek(0, 0)

    def _seek(self, epoch: int, samples: int) -> None:
        if (epoch, samples) != (self._schedule.epoch, self._schedule.samples):
            self._batches = None
        self._schedule.move_to(epoch, samples)

    def state_dict(self) -> dict[str, Any]:
        """The position after the last delivered batch, and what the data and their order are."""
        order = self._schedule.order
        return {
            "epoch": self._schedule.epoch,
            "samples": self._schedule.samples,
            "size": order.size,
            "seed": order.seed,
            "shuffle": order.shuffle,
            "fingerprint": self.fingerprint,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at a saved position.

        A changed `seed` or `shuffle` stays as this loader has it, with a warning, since the order of the
        epoch is then another one.

        Raises:
            DataError: the state comes from other data, recognised by checksum.
        """
        if state["fingerprint"] != self.fingerprint:
            raise DataError(
                f"the data is not that of the checkpoint: {_describe(self.state_dict())} now, "
                f"{_describe(state)} then; give back the same text or shards, tokenizer, data.block_size, "
                f"data.validation_fraction and, for synthetic data, data.seed (which follows run.seed) and "
                f"data.num_tokens, or start a new run"
            )
        changed = [name for name in ("seed", "shuffle") if state[name] != self.state_dict()[name]]
        if changed:
            _log.warning(
                "the order of the data has changed (%s): until the epoch ends some samples may come twice and "
                "others not at all",
                ", ".join(f"data.{name}" for name in changed),
            )
        self._seek(int(state["epoch"]), int(state["samples"]))

    def close(self) -> None:
        """End the worker processes. Iterating again starts new ones."""
        self._batches = None
        self._dataloader = None


def _describe(state: Mapping[str, Any]) -> str:
    return f"{state['size']} samples with checksum {state['fingerprint'][:12]}"


def _fingerprint(dataset: Any, size: int) -> str:
    if isinstance(dataset, Fingerprinted):
        return dataset.fingerprint
    if isinstance(dataset, Subset):
        return f"{_fingerprint(dataset.dataset, size)}:part"
    return f"{type(dataset).__module__}.{type(dataset).__qualname__}:{size}"


def _leave_signals_to_the_trainer(worker: int) -> None:
    # Ctrl-C, and a SIGTERM to the whole process group, reach every process in it, but the training process
    # finishes its step first, and needs data for that.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform != "win32":
        os.setpgrp()


def _unchanged(batch: Any) -> Any:
    return batch


class _Schedule:
    """Which samples come next; each `iter`, by the library, begins at the position of that moment."""

    def __init__(self, order: SampleOrder, batch_size: int, drop_last: bool) -> None:
        if batch_size < 1:
            raise DataError(f"batch_size must be at least 1, not {batch_size}")
        if order.size == 0:
            raise DataError("the dataset is empty")
        if drop_last and order.size < batch_size:
            raise DataError(
                f"the dataset has {order.size} samples, fewer than one batch of {batch_size}, and drop_last "
                "leaves out batches that are not full; use a smaller micro_batch_size, a smaller block_size "
                "or more data"
            )
        self.order = order
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.epoch = 0
        self.samples = 0

    @property
    def batches_per_epoch(self) -> int:
        full, rest = divmod(self.order.size, self.batch_size)
        return full + (rest > 0 and not self.drop_last)

    def advance(self) -> None:
        """Count one batch as delivered."""
        self.move_to(self.epoch, min(self.samples + self.batch_size, self.order.size))

    def move_to(self, epoch: int, samples: int) -> None:
        """Go to a position, or to the next epoch's start when no batch is left in this one."""
        left = self.order.size - samples
        over = left < self.batch_size if self.drop_last else left == 0
        self.epoch, self.samples = (epoch + 1, 0) if over else (epoch, samples)

    def __iter__(self) -> Iterator[_BatchKey]:
        epoch, start = self.epoch, self.samples
        while True:
            yield from self._rest_of_epoch(epoch, start)
            epoch, start = epoch + 1, 0

    def _rest_of_epoch(self, epoch: int, start: int) -> Iterator[_BatchKey]:
        stride = self.batch_size * max(1, _ORDERED_AT_ONCE // self.batch_size)
        for begin in range(start, self.order.size, stride):
            indices = self.order.indices(epoch, begin, min(begin + stride, self.order.size))
            for at in range(0, len(indices), self.batch_size):
                batch = indices[at : at + self.batch_size]
                if len(batch) == self.batch_size or not self.drop_last:
                    yield _BatchKey(epoch, batch)


class _Batches(Dataset[Any]):
    """A dataset whose items are whole batches: the library moves them, and we decide what is in them."""

    def __init__(self, dataset: Dataset[Any], collate: Collate, seed: int) -> None:
        self._dataset = dataset
        self._collate = collate
        self._seed = seed

    def __getitem__(self, key: _BatchKey) -> Any:
        try:
            if isinstance(self._dataset, TokenDataset):
                return self._dataset.batch(key.indices)
            return self._collate(self._samples(key))
        except DataError as error:
            return _Failure(str(error))

    def _samples(self, key: _BatchKey) -> list[Any]:
        samples = []
        with _generators_kept():
            for index in key.indices.tolist():
                _seed_generators(derive_seed(self._seed, key.epoch, index))
                samples.append(self._dataset[index])
        return samples


@contextmanager
def _generators_kept() -> Iterator[None]:
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(cpu)


def _seed_generators(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    # Not torch.manual_seed, which would also reseed the accelerators.
    torch.default_generator.manual_seed(seed % 2**63)
