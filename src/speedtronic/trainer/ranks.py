"""What the ranks of a run must have in common before its first update."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from speedtronic.config import SpeedtronicConfig
from speedtronic.data.loading.iterable_loader import StreamLoader
from speedtronic.data.loading.loader import TokenLoader
from speedtronic.errors import ConfigError
from speedtronic.metrics import MetricLogger
from speedtronic.optimizers import HybridOptimizer, Muon
from speedtronic.ranks import Group, micro_batches_per_rank


def logger_of_rank(group: Group, given: MetricLogger | None, config: SpeedtronicConfig) -> MetricLogger:
    """Only rank 0 logs, by the logger that was given, if one was. Of the others only errors are heard."""
    if given is not None and group.rank == 0:
        return given
    level = config.logging.level if group.rank == 0 else "ERROR"
    return MetricLogger(level=level, every_steps=config.logging.every_steps or 1)


def micro_batches_of(config: SpeedtronicConfig, group: Group) -> int:
    """How many micro batches of an update each rank computes: one, where the configuration gives neither size.

    Raises:
        ConfigError: micro batches and ranks do not divide the target.
    """
    data = config.data
    if group.size > 1 and not {"target_batch_size", "micro_batch_size"} & data.model_fields_set:
        return 1
    return micro_batches_per_rank(data.target_batch_size, int(data.micro_batch_size), group.size)


def check_division(loader: Any, group: Group) -> None:
    """Raise ConfigError unless the loader of each rank reads a part of its own.

    Those of `speedtronic.data` know their part. Any other one says it as torch's `DistributedSampler` does: by
    `num_replicas` and `rank`, on itself, its sampler or its dataset.
    """
    found = list(_divisions(loader))
    if any(parts % group.size == 0 and part % group.size == group.rank for part, parts in found):
        return
    said = f"says that it reads part {found[0][0]} of {found[0][1]}" if found else "does not say which part it reads"
    raise ConfigError(
        f"the data loader of rank {group.rank} of {group.size} {said}, so ranks would train on the same samples: build "
        "it with rank, world_size and in_step (speedtronic.data), or give a DataLoader of torch's a "
        "torch.utils.data.DistributedSampler; a loader or dataset of your own that reads the part of its rank has the "
        "attributes num_replicas and rank"
    )


def _divisions(loader: Any) -> Iterator[tuple[int, int]]:
    """The parts that a loader, its samplers or its dataset say that they read, and of how many."""
    if isinstance(loader, TokenLoader | StreamLoader):
        yield loader.division
        return
    batch_sampler = getattr(loader, "batch_sampler", None)
    for part in (
        loader,
        getattr(loader, "sampler", None),
        batch_sampler,
        getattr(batch_sampler, "sampler", None),
        getattr(loader, "dataset", None),
    ):
        rank, parts = getattr(part, "rank", None), getattr(part, "num_replicas", None)
        if isinstance(rank, int) and isinstance(parts, int):
            yield rank, parts


def share_updates(
    config: SpeedtronicConfig, group: Group, model: nn.Module, loader: Any, optimizer: torch.optim.Optimizer
) -> int:
    """Let the ranks share each update, and return how many micro batches of it this one computes.

    Raises:
        ConfigError: they cannot, as these parts are.
    """
    micro_batches = micro_batches_of(config, group)
    if group.size > 1:
        check_division(loader, group)
        if isinstance(model, DistributedDataParallel):
            raise ConfigError(
                "the model is a DistributedDataParallel, and the trainer sums gradients over the ranks itself: give it "
                "the module inside"
            )
    if isinstance(optimizer, Muon | HybridOptimizer):
        optimizer.ranks = group
    return micro_batches


def check_alike(group: Group, saves: bool, evaluator: object) -> bool:
    """Whether any rank writes checkpoints, in which all take part.

    Raises:
        ConfigError: only some ranks have an evaluator.
    """
    if group.size == 1:
        return saves
    ranks = group.gather([saves, evaluator is not None])
    if len({evaluates for _, evaluates in ranks}) > 1:
        raise ConfigError("some ranks have an evaluator and some have none: give one to the Trainer of every rank")
    return any(saves for saves, _ in ranks)
