"""The training loader: batches whose order and content are functions of (seed, epoch, position)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
from torch.utils.data import Dataset, Subset

from speedtronic.data.loading.collate import collate_batch
from speedtronic.data.loading.datasets import TokenDataset
from speedtronic.data.loading.sampler import Deal, SampleOrder, derive_seed
from speedtronic.data.loading.workers import Fetcher, blame, generators_kept, seed_generators, type_name
from speedtronic.errors import DataError

_log = logging.getLogger(__name__)

_ORDERED_AT_ONCE = 1024  # positions whose samples are looked up together; a trade of latency for array speed
_SHOWN = 8  # indices in a message

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

    Ranks that read one dataset together are dealt its order in rounds of world_size · B samples, B to each, and
    share the last, shorter round as evenly as can be, so that each sample comes once. The position counts the
    samples of all ranks: every rank can be restored from that of rank 0, with another `world_size` too.

    Args:
        dataset: anything with a length and samples at 0 … len − 1; must pickle unless workers are forked.
        batch_size: B, samples per batch (the micro batch).
        shuffle: a new order every epoch; otherwise that of the dataset.
        seed: of the order and of the samples' randomness.
        drop_last: leave out a batch at the end of an epoch that is not full; with ranks, a round.
        num_workers: processes that fetch; they live as long as the loader. 0 fetches in this process.
        prefetch_factor: batches that each worker fetches ahead; None is torch's default. Without
            workers it has no effect.
        pin_memory: copy batches to page-locked memory, for quick transfers to an accelerator.
        collate: samples to batch.
        multiprocessing_context: how workers start ("fork", "spawn", "forkserver"); None is the platform's
            default.
        rank, world_size: which of how many readers this is, such as the processes of a data-parallel run.

    Raises:
        DataError: an empty dataset, or one too small to give this rank a batch; while iterating, a sample or batch
            that cannot be made, with its index, or a dataset that cannot be sent to a worker.
        SpeedtronicError: while iterating, a worker process has ended.
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
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        if not isinstance(dataset, Sized):
            raise DataError(
                f"{type_name(dataset)} has no length, so it cannot be read in a seekable order; what can only be "
                f"iterated must be a torch.utils.data.IterableDataset"
            )
        self.dataset = dataset
        self.fingerprint = _fingerprint(dataset, len(dataset))
        order = SampleOrder(len(dataset), shuffle=shuffle, seed=seed)
        self._schedule = _Schedule(order, Deal(batch_size, rank, world_size, drop_last))
        self._fetcher = Fetcher(
            _Batches(dataset, collate, seed),
            self._schedule,
            name=type_name(dataset),
            seed=derive_seed(seed),
            num_workers=num_workers,
            prefetch_factor=prefetch_factor,
            pin_memory=pin_memory,
            multiprocessing_context=multiprocessing_context,
        )

    def __len__(self) -> int:
        """Batches in a whole epoch."""
        return self._schedule.batches_per_epoch

    @property
    def batch_size(self) -> int:
        """Samples per batch."""
        return self._schedule.deal.batch_size

    @property
    def epoch(self) -> int:
        """The epoch of the next batch, from 0."""
        return self._schedule.epoch

    def __iter__(self) -> Iterator[Any]:
        epoch = self.epoch
        while self.epoch == epoch:
            batch = self._fetcher.next()
            self._schedule.advance()
            yield batch

    def restart(self) -> None:
        """Go back to the first batch of the first epoch, so that every evaluation sees the same batches."""
        self._seek(0, 0)

    def skip_batches(self, batches: int) -> None:
        """Move the position on by `batches` batches; costs the same for any number."""
        self._seek(*self._schedule.after(batches))

    def _seek(self, epoch: int, samples: int) -> None:
        if (epoch, samples) != (self._schedule.epoch, self._schedule.samples):
            self._fetcher.restart()
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
        self._fetcher.close()


def _describe(state: Mapping[str, Any]) -> str:
    return f"{state['size']} samples with checksum {state['fingerprint'][:12]}"


def _fingerprint(dataset: Any, size: int) -> str:
    if isinstance(dataset, Fingerprinted):
        return dataset.fingerprint
    if isinstance(dataset, Subset):
        return f"{_fingerprint(dataset.dataset, size)}:part"
    return f"{type_name(dataset)}:{size}"


class _Schedule:
    """Which samples come next; each `iter`, by the library, begins at the position of that moment."""

    def __init__(self, order: SampleOrder, deal: Deal) -> None:
        if order.size == 0:
            raise DataError("the dataset is empty")
        self.order = order
        self.deal = deal
        self.epoch = 0
        self.samples = 0
        if self.batches_per_epoch == 0:
            raise DataError(_too_few(order.size, deal))

    @property
    def batches_per_epoch(self) -> int:
        return self._batches_in(self.order.size)

    def _batches_in(self, samples: int) -> int:
        rounds, rest = divmod(samples, self.deal.round_size)
        return rounds + (len(self.deal.share(rest)) > 0)

    def after(self, batches: int) -> tuple[int, int]:
        """The position, epoch and samples, that lies `batches` batches ahead."""
        left = self._batches_in(self.order.size - self.samples)
        if batches < left:
            return self.epoch, self.samples + batches * self.deal.round_size
        epochs, rest = divmod(batches - left, self.batches_per_epoch)
        return self.epoch + 1 + epochs, rest * self.deal.round_size

    def advance(self) -> None:
        """Count one batch as delivered."""
        self.move_to(self.epoch, min(self.samples + self.deal.round_size, self.order.size))

    def move_to(self, epoch: int, samples: int) -> None:
        """Go to a position, or to the next epoch's start when no batch is left in this one."""
        over = not self.deal.share(self.order.size - samples)
        self.epoch, self.samples = (epoch + 1, 0) if over else (epoch, samples)

    def __iter__(self) -> Iterator[_BatchKey]:
        epoch, start = self.epoch, self.samples
        while True:
            yield from self._rest_of_epoch(epoch, start)
            epoch, start = epoch + 1, 0

    def _rest_of_epoch(self, epoch: int, start: int) -> Iterator[_BatchKey]:
        stride = self.deal.round_size * max(1, _ORDERED_AT_ONCE // self.deal.batch_size)
        for begin in range(start, self.order.size, stride):
            shares = self._shares(begin, min(begin + stride, self.order.size))
            indices = self.order.at(epoch, np.concatenate(shares))
            for share in shares:
                batch, indices = indices[: len(share)], indices[len(share) :]
                if len(batch):
                    yield _BatchKey(epoch, batch)

    def _shares(self, start: int, stop: int) -> list[npt.NDArray[np.int64]]:
        """The positions of this rank's batch in each round that begins in [start, stop)."""
        shares = []
        for begin in range(start, stop, self.deal.round_size):
            share = self.deal.share(stop - begin)
            shares.append(np.arange(begin + share.start, begin + share.stop, dtype=np.int64))
        return shares


def _too_few(size: int, deal: Deal) -> str:
    if not deal.drop_last:
        return f"the dataset has {size} samples, too few for {deal.world_size} ranks to have one each"
    each = f" for each of {deal.world_size} ranks" if deal.world_size > 1 else ""
    return (
        f"the dataset has {size} samples, fewer than one batch of {deal.batch_size}{each}, and drop_last leaves out "
        f"batches that are not full; use a smaller micro_batch_size, a smaller block_size or more data"
    )


class _Batches(Dataset[Any]):
    """A dataset whose items are whole batches: the library moves them, and we decide what is in them."""

    def __init__(self, dataset: Dataset[Any], collate: Collate, seed: int) -> None:
        self._dataset = dataset
        self._collate = collate
        self._seed = seed

    def __getitem__(self, key: _BatchKey) -> Any:
        if isinstance(self._dataset, TokenDataset):
            return self._dataset.batch(key.indices)
        samples = self._samples(key)
        try:
            return self._collate(samples)
        except Exception as error:  # noqa: BLE001 - a collate function of the user's may raise anything
            raise blame(f"{_named(key.indices)} of {type_name(self._dataset)}", error) from error

    def _samples(self, key: _BatchKey) -> list[Any]:
        samples = []
        with generators_kept():
            for index in key.indices.tolist():
                seed_generators(derive_seed(self._seed, key.epoch, index))
                try:
                    samples.append(self._dataset[index])
                except DataError:
                    raise
                except Exception as error:  # noqa: BLE001 - a dataset of the user's may raise anything
                    raise blame(f"sample {index} of {type_name(self._dataset)}", error) from error
        return samples


def _named(indices: npt.NDArray[np.int64]) -> str:
    shown = ", ".join(map(str, indices[:_SHOWN].tolist()))
    return f"samples {shown}" + (f", … ({len(indices)} samples)" if len(indices) > _SHOWN else "")
