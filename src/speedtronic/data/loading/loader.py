"""The training loader: batches whose order and content are functions of (seed, epoch, position)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from typing import Any, Protocol, runtime_checkable

from torch.utils.data import Dataset, Subset

from speedtronic.data.loading.collate import collate_batch
from speedtronic.data.loading.datasets import TokenDataset
from speedtronic.data.loading.epochs import epoch_aware_parts, knows_epoch, tell
from speedtronic.data.loading.mixture import MixtureDataset
from speedtronic.data.loading.sampler import BatchIndices, BatchSampler, GlobalBatch, SampleOrder, derive_seed
from speedtronic.data.loading.workers import BatchMaker, Fetcher, blame, generators_kept, seed_generators, type_name
from speedtronic.errors import DataError, warn

_SHOWN = 8  # indices in a message

Collate = Callable[[Sequence[Any]], Any]


@runtime_checkable
class Fingerprinted(Protocol):
    """A dataset that can be recognised by its content; others are recognised by type and length."""

    @property
    def fingerprint(self) -> str:
        """A checksum of the samples."""


class TokenLoader:
    """Batches of a map-style dataset, with a position that can be saved and sought.

    `iter(loader)` continues at the loader's position and ends with the epoch. The position counts the samples that
    were delivered, not those that workers have fetched ahead. So it can be saved between any two batches, and
    restored with another batch size or number of workers. Seeking costs the same for every position. The global
    random number generators are neither used nor changed.

    Samples of a user's dataset are computed with Python's, NumPy's and torch's CPU generators seeded from (seed,
    epoch, index): random augmentation differs between samples and epochs, and repeats with the seed for any number
    of workers. A dataset with `set_epoch` is told each epoch before its first sample, in each worker, and alone or in
    torch's `Subset` and the like. On resume such a dataset is recognised by its `fingerprint` if it has one, otherwise
    by type and length.

    Ranks that read one dataset together divide its order into global batches of world_size · B samples, B for each
    rank. They divide the last, shorter one as evenly as possible, so that each sample comes once. The position counts
    the samples of all ranks: every rank can be restored from the position of rank 0, also with another `world_size`.
    Ranks that train one model are `in_step`: where the last one has fewer samples than ranks, those without get None
    for a batch, and so all have as many batches.

    Attributes:
        warn: told where a saved position is continued in another order. A run sets it.

    Args:
        dataset: anything with a length and samples at 0 … len − 1; must pickle unless workers are forked.
        batch_size: B, samples per batch (the micro batch).
        shuffle: a new order every epoch; otherwise the order of the dataset.
        seed: the seed of the order and of the samples' randomness.
        drop_last: leave out a batch at the end of an epoch that is not full; with ranks, a global batch.
        num_workers: processes that fetch; they live as long as the loader. 0 fetches in this process.
        prefetch_factor: batches that each worker fetches ahead; None is torch's default. Without
            workers it has no effect.
        pin_memory: copy batches to page-locked memory, for quick transfers to an accelerator.
        collate: samples to batch.
        multiprocessing_context: how workers start ("fork", "spawn", "forkserver"); None is the platform's
            default.
        rank, world_size: this reader's number, and how many readers share the data.
        in_step: how many ranks train one model together.

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
        in_step: int = 1,
    ) -> None:
        if not isinstance(dataset, Sized):
            raise DataError(
                f"{type_name(dataset)} has no length, so it has no seekable order; a dataset that can only be iterated "
                f"must be a torch.utils.data.IterableDataset"
            )
        self.warn: Callable[[str], None] = warn
        self.dataset: Dataset[Any] = dataset
        self.fingerprint = _fingerprint(dataset, len(dataset))
        # The sampler is an object of its own, since torch's loader keeps it: a reference back to this object would
        # keep the workers alive after the last reference to it.
        self._sampler = BatchSampler(
            SampleOrder(len(dataset), shuffle=shuffle, seed=seed),
            GlobalBatch(batch_size, rank=rank, world_size=world_size, drop_last=drop_last, in_step=in_step),
        )
        self._fetcher = Fetcher(
            _SampleBatches(dataset, collate, seed),
            self._sampler,
            name=type_name(dataset),
            seed=derive_seed(seed),
            num_workers=num_workers,
            prefetch_factor=prefetch_factor,
            pin_memory=pin_memory,
            multiprocessing_context=multiprocessing_context,
        )

    def __len__(self) -> int:
        """Batches in a whole epoch."""
        return self._sampler.batches_per_epoch

    @property
    def batch_size(self) -> int:
        """Samples per batch."""
        return self._sampler.global_batch.batch_size

    @property
    def division(self) -> tuple[int, int]:
        """Which part of the data this loader reads, and of how many."""
        return self._sampler.global_batch.rank, self._sampler.global_batch.world_size

    @property
    def epoch(self) -> int:
        """The epoch of the next batch, from 0."""
        return self._sampler.epoch

    def __iter__(self) -> Iterator[Any]:
        epoch = self.epoch
        while self.epoch == epoch:
            batch = self._fetcher.next()
            self._sampler.advance()
            yield batch

    def restart(self) -> None:
        """Go back to the first batch of the first epoch, so that every evaluation sees the same batches."""
        self._seek(0, 0)

    def skip_batches(self, batches: int) -> None:
        """Move the position on by `batches` batches; costs the same for any number."""
        self._seek(*self._sampler.after(batches))

    def _seek(self, epoch: int, samples: int) -> None:
        if (epoch, samples) != (self._sampler.epoch, self._sampler.samples):
            self._fetcher.restart()
        self._sampler.move_to(epoch, samples)

    def state_dict(self) -> dict[str, Any]:
        """The position after the last delivered batch, and what the data and their order are."""
        order = self._sampler.order
        return {
            "epoch": self._sampler.epoch,
            "samples": self._sampler.samples,
            "size": order.size,
            "seed": order.seed,
            "shuffle": order.shuffle,
            "fingerprint": self.fingerprint,
            **({"weights": [*self.dataset.weights.values()]} if isinstance(self.dataset, MixtureDataset) else {}),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at a saved position.

        With another `seed` or `shuffle`, or other weights of a mixture, this loader keeps its own, with a warning,
        since the order of the epoch is then a different one.

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
            keys = ", ".join(f"data.{name}" for name in changed)
            self.warn(
                f"the order of the data has changed ({keys}): until the epoch ends some samples may come twice and "
                "others not at all"
            )
        if isinstance(self.dataset, MixtureDataset):
            now, then = self.dataset.weights, state["weights"]
            if [*now.values()] != then:
                changes = ", ".join(
                    f"{name} {before:.4g} → {weight:.4g}"
                    for (name, weight), before in zip(now.items(), then, strict=True)
                )
                self.warn(
                    f"the weights of the mixture have changed: {changes}; the new ones hold from here on, and until "
                    "the epoch ends some samples may come twice and others not at all"
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


class _SampleBatches(BatchMaker):
    """Makes the batch of the samples at given indices."""

    def __init__(self, dataset: Dataset[Any], collate: Collate, seed: int) -> None:
        self._dataset = dataset
        self._collate = collate
        self._seed = seed
        self._epoch_aware = epoch_aware_parts(dataset)

    def make(self, key: BatchIndices) -> Any:
        if not len(key.indices):
            return None  # other ranks in step have the last samples of the epoch
        if isinstance(self._dataset, TokenDataset):
            return self._dataset.batch(key.indices)
        samples = []
        with generators_kept():
            for part in self._epoch_aware:
                if not knows_epoch(part, key.epoch):
                    seed_generators(derive_seed(self._seed, key.epoch, "set_epoch"))
                    try:
                        tell(part, key.epoch)
                    except Exception as error:  # noqa: BLE001 - a dataset of the user's may raise anything
                        raise blame(f"set_epoch({key.epoch}) of {type_name(part)}", error) from error
            for index in key.indices.tolist():
                seed_generators(derive_seed(self._seed, key.epoch, index))
                try:
                    samples.append(self._dataset[index])
                except DataError:
                    raise
                except Exception as error:  # noqa: BLE001 - a dataset of the user's may raise anything
                    raise blame(f"sample {index} of {type_name(self._dataset)}", error) from error
        try:
            return self._collate(samples)
        except Exception as error:  # noqa: BLE001 - a collate function of the user's may raise anything
            count = len(samples)
            shown = ", ".join(map(str, key.indices[:_SHOWN].tolist()))
            more = f", … ({count} samples)" if count > _SHOWN else ""
            raise blame(f"samples {shown}{more} of {type_name(self._dataset)}", error) from error
