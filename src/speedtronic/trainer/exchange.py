"""What the ranks tell each other of an update before its backward pass, in one small sum on the host."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from speedtronic.ranks import Group
from speedtronic.trainer.signals import WATCHED


@dataclass(frozen=True)
class Totals:
    """An update, as all ranks together see it.

    Attributes:
        step: the global step after the update.
        weight: the sum of the weights of all micro batches: of their targets, or of as many as there are.
        samples, tokens: of all ranks. The tokens of one process may still be a 0-dim tensor on the device.
        signal: one that a rank had received before the update; None if no rank had.
        save_due: whether rank 0's clock asks for a checkpoint after the update.
    """

    step: int
    weight: int
    samples: int
    tokens: int | Tensor
    signal: signal.Signals | None
    save_due: bool


def exchange(group: Group, own: Totals) -> Callable[[], Totals]:
    """Start to sum what the ranks have; return what waits for the totals.

    The sum is on its way while the first forward pass runs. So a signal to one rank is known to all before the update
    ends, and all end after the same one.
    """
    if group.size == 1:
        return lambda: own
    received = [int(own.signal == number) for number in WATCHED]
    save_due = int(own.save_due and group.rank == 0)
    numbers = torch.tensor([own.weight, own.samples, int(own.tokens), save_due, *received])
    wait = group.reduce_later(numbers)

    def totals() -> Totals:
        weight, samples, tokens, save_due, *signals = wait().tolist()
        found = next((number for number, count in zip(WATCHED, signals, strict=True) if count), None)
        return Totals(own.step, weight, samples, tokens, found, bool(save_due))

    return totals
