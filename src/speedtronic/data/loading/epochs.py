"""Tells datasets and samplers of the user's which epoch begins."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, Protocol, runtime_checkable

from torch.utils.data import ChainDataset, ConcatDataset, StackDataset, Subset


@runtime_checkable
class EpochAware(Protocol):
    """A dataset or sampler whose order or content depends on the epoch."""

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, from 0, before each pass."""


def epoch_aware_parts(dataset: Any) -> list[EpochAware]:
    """The datasets that have `set_epoch`: this one, or those inside torch's own wrappers, which would hide it."""
    if isinstance(dataset, EpochAware):
        return [dataset]
    inner: Iterable[Any] = ()
    if isinstance(dataset, Subset):
        inner = (dataset.dataset,)
    elif isinstance(dataset, ConcatDataset | ChainDataset):
        inner = dataset.datasets
    elif isinstance(dataset, StackDataset):
        inner = dataset.datasets.values() if isinstance(dataset.datasets, dict) else dataset.datasets
    found = [part for member in inner for part in epoch_aware_parts(member)]
    return list({id(part): part for part in found}.values())


def epoch_aware_parts_of_loader(loader: Any) -> list[EpochAware]:
    """The loader of a user's itself, its samplers and its dataset, as far as they have `set_epoch`."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    samplers = (getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None))
    found = [part for part in (loader, *samplers) if isinstance(part, EpochAware)]
    found += epoch_aware_parts(getattr(loader, "dataset", None))
    return list({id(part): part for part in found}.values())


# What was told last, by the identity of the object: two loaders may share a dataset, such as one that is divided into a
# training and a validation part, and each needs its own epoch when it reads.
_told: dict[int, tuple[weakref.ref[Any], int]] = {}


def knows_epoch(part: EpochAware, epoch: int) -> bool:
    """Whether `tell` has told it this epoch last, in this process."""
    told = _told.get(id(part))
    return told is not None and told[0]() is part and told[1] == epoch


def tell(part: EpochAware, epoch: int) -> None:
    """Call `set_epoch`."""
    part.set_epoch(epoch)
    try:
        _told[id(part)] = (weakref.ref(part), epoch)
    except TypeError:  # an object without weak references is told again each time
        _told.pop(id(part), None)
