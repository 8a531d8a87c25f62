"""A mixture of datasets by weights."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from speedtronic.data.loading.datasets import Indices, TokenDataset, checksum
from speedtronic.errors import DataError

SLOTS = 10_000


class MixtureDataset(TokenDataset):
    """Samples of several datasets, as often as their weights say. Sample i is a function of the seed and i.

    The samples come in cycles of 10,000 slots. Each dataset has its share of the slots, spread evenly over the cycle
    with chance in the small, and fills them with its samples in their order, again and again. The mixture ends where
    each dataset has given each of its samples at least once.

    Args:
        datasets: by name.
        weights: of the same names, in any unit.
        seed: of the pattern.

    Raises:
        DataError: a weight that is not positive, or too small a share to have a slot.
    """

    def __init__(self, datasets: Mapping[str, TokenDataset], weights: Mapping[str, float], seed: int) -> None:
        self.datasets = dict(datasets)
        self.block_size = next(iter(datasets.values())).block_size
        for name in datasets:
            if not weights[name] > 0:
                raise DataError(f"mixture: the weight of {name} must be more than 0, not {weights[name]}")
        total = sum(weights[name] for name in datasets)
        self.weights = {name: weights[name] / total for name in datasets}
        shares = np.array([*self.weights.values()]) * SLOTS
        for name, share in zip(datasets, shares, strict=True):
            if share < 1:
                raise DataError(f"mixture: the weight of {name} is {share / SLOTS:g} of all, less than 1 in {SLOTS:,}")
        # Whole slots; the largest remainders get those that are left.
        slots = np.floor(shares).astype(np.int64)
        slots[np.argsort(np.floor(shares) - shares, kind="stable")[: SLOTS - slots.sum()]] += 1

        # Slot j of n of a dataset lies somewhere in the j-th of n equal parts of the cycle.
        generator = np.random.Philox(key=np.array([seed % 2**64, 0], np.uint64))
        chance = generator.random_raw(SLOTS) / 2.0**64
        number = np.concatenate([np.arange(each) for each in slots])
        order = np.argsort((number + chance) / np.repeat(slots, slots), kind="stable")
        self._slots = slots
        self._dataset_of_slot = np.repeat(np.arange(len(slots)), slots)[order]
        self._number_of_slot = number[order]

        # How many samples there are until a dataset has given its last one for the first time.
        self._size = 0
        for at, dataset in enumerate(datasets.values()):
            cycles, last = divmod(len(dataset) - 1, int(slots[at]))
            mine = np.flatnonzero(self._dataset_of_slot == at)
            self._size = max(self._size, cycles * SLOTS + int(mine[last]) + 1)

    def __len__(self) -> int:
        return self._size

    def batch(self, indices: Indices) -> dict[str, Tensor]:
        """The tensors of the datasets' own batches, for the samples of the mixture."""
        cycles, slots = np.divmod(np.asarray(indices, np.int64), SLOTS)
        owners = self._dataset_of_slot[slots]
        numbers = cycles * self._slots[owners] + self._number_of_slot[slots]
        rows: dict[str, Tensor] = {}
        for at, dataset in enumerate(self.datasets.values()):
            mine = np.flatnonzero(owners == at)
            if not len(mine):
                continue
            for name, values in dataset.batch(numbers[mine] % len(dataset)).items():
                if name not in rows:
                    rows[name] = values.new_empty((len(owners), *values.shape[1:]))
                rows[name][torch.from_numpy(mine)] = values
        return rows

    @property
    def fingerprint(self) -> str:
        """A checksum of the datasets, whatever their weights are: these may change on the way."""
        return checksum("mixture-1", *(dataset.fingerprint for dataset in self.datasets.values()))


class JoinedDataset(TokenDataset):
    """The samples of several datasets, one dataset behind the other."""

    def __init__(self, datasets: list[TokenDataset]) -> None:
        self.block_size = datasets[0].block_size
        self._datasets = datasets
        self._ends = np.cumsum([len(dataset) for dataset in datasets])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def batch(self, indices: Indices) -> dict[str, Tensor]:
        owners = np.searchsorted(self._ends, indices, side="right")
        samples = [
            self._datasets[owner][int(index) - int(self._ends[owner]) + len(self._datasets[owner])]
            for owner, index in zip(owners, indices, strict=True)
        ]
        return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}

    @property
    def fingerprint(self) -> str:
        return checksum("joined-1", *(dataset.fingerprint for dataset in self._datasets))
