"""Micro batches of an update that run as one forward pass, with the gradient that they have one by one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from speedtronic.errors import ConfigError
from speedtronic.model.wrappers import innermost
from speedtronic.trainer.loss import LossFunction, count_targets


@dataclass(frozen=True)
class Merged:
    """Some micro batches, one behind the other.

    Attributes:
        batch: each tensor of the mappings, joined along its first dimension.
        samples: of each micro batch.
        even: whether the mean loss of `batch` is the mean of their mean losses: each has as many targets.
    """

    batch: dict[str, Tensor]
    samples: tuple[int, ...]
    even: bool


def refuses_merging(model: nn.Module, loss_fn: LossFunction | None) -> str | None:
    """Why micro batches of this model cannot run as one; None if they can.

    The model declares it: an attribute `supports_merged_microbatches` that is true says that no sample of a batch
    depends on another one or on random numbers, that its loss is `causal_cross_entropy` of its logits, and that
    without labels it returns a mapping with these `logits`, (B, T, V).
    """
    if loss_fn is not None:
        return "a loss function of your own may be no mean over the labels of a batch"
    if not getattr(innermost(model), "supports_merged_microbatches", False):
        name = type(innermost(model)).__name__
        return f"{name} has no supports_merged_microbatches that is true (the built-in model has, without dropout)"
    return None


def check_merging(model: nn.Module, loss_fn: LossFunction | None, micro_batches: int, at_once: int) -> int:
    """Return `at_once`; raise ConfigError unless an update over `micro_batches` can run so many of them as one."""
    if at_once < 1 or micro_batches % at_once:
        raise ConfigError(
            f"merged_micro_batches: {at_once} does not divide the {micro_batches} micro batches of an update"
        )
    if at_once > 1 and (problem := refuses_merging(model, loss_fn)) is not None:
        raise ConfigError(f"merged_micro_batches: {at_once} is not possible: {problem}; use 1")
    return at_once


def merge(batches: Sequence[Any], at_once: int, *, by_tokens: bool) -> list[Merged] | None:
    """Join each `at_once` micro batches; None where any of them do not fit together, such as of different lengths.

    Args:
        batches: the micro batches of an update, a multiple of `at_once`, on the host.
        at_once: how many become one.
        by_tokens: every target of the update counts alike, so that it does not matter which micro batch has it.
    """
    merged = [_join(batches[start : start + at_once], by_tokens) for start in range(0, len(batches), at_once)]
    joined = [part for part in merged if part is not None]
    return joined if len(joined) == len(merged) else None


def _join(batches: Sequence[Any], by_tokens: bool) -> Merged | None:
    first = batches[0]
    if not isinstance(first, Mapping) or not isinstance(first.get("labels"), Tensor):
        return None
    for batch in batches:
        if not isinstance(batch, Mapping) or batch.keys() != first.keys():
            return None
        rows = batch["labels"].shape[0] if batch["labels"].ndim else 0
        for key, tensor in batch.items():
            like = first[key]
            if not isinstance(tensor, Tensor) or not isinstance(like, Tensor) or tensor.ndim == 0:
                return None
            if tensor.shape[0] != rows or tensor.shape[1:] != like.shape[1:] or tensor.dtype != like.dtype:
                return None
    samples = tuple(batch["labels"].shape[0] for batch in batches)
    even = by_tokens
    if not even:
        counts = count_targets(batches)
        even = counts.count(counts[0]) == len(counts)
    return Merged({key: torch.cat([batch[key] for batch in batches]) for key in first}, samples, even)
