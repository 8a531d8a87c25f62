"""The processes that train one model together, and the few operations they share numbers and values with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol, TypeVar

import torch
from torch import Tensor, nn

from speedtronic.errors import ConfigError

Number = TypeVar("Number", int, float, Tensor)
Value = TypeVar("Value")

Reduction = Literal["sum", "mean", "max"]


class Group(Protocol):
    """All processes of a run, ranks 0 to size - 1.

    Every rank makes the same calls in the same order: each call waits for the other ranks. Tensors have the same shape
    and dtype on every rank. Values are JSON-like: None, bool, int, float, str, and lists and dicts of these.
    """

    @property
    def rank(self) -> int:
        """The number of this process, from 0."""

    @property
    def size(self) -> int:
        """The number of processes, also called the world size."""

    @property
    def lost(self) -> bool:
        """Whether a rank has gone, so that nothing can be shared any more."""

    def reduce(self, number: Number, how: Reduction = "sum") -> Number:
        """Combine the numbers of all ranks; every rank gets the result. A tensor stays on its device."""

    def reduce_later(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Start to sum a tensor in place, and return what waits for the sum and returns it.

        Several sums may be on their way at once. Nobody may touch the tensor until then.
        """

    def stack(self, tensor: Tensor) -> Tensor:
        """The tensors of all ranks (size, …), in rank order; every rank gets them."""

    def gather(self, value: Value) -> list[Value]:
        """The values of all ranks in rank order; every rank gets the list."""

    def broadcast(self, value: Value) -> Value:
        """The value of rank 0, which every rank gets. A tensor is copied into this rank's own, and returned."""

    def note(self, place: str) -> None:
        """Say where in its work this rank is. Other ranks read it if they wait for this one for too long."""


class SingleProcess:
    """The group of a run in one process. Every operation returns what it was given, without a copy."""

    rank = 0
    size = 1
    lost = False

    def reduce(self, number: Number, how: Reduction = "sum") -> Number:
        return number

    def reduce_later(self, tensor: Tensor) -> Callable[[], Tensor]:
        return lambda: tensor

    def stack(self, tensor: Tensor) -> Tensor:
        return tensor.unsqueeze(0)

    def gather(self, value: Value) -> list[Value]:
        return [value]

    def broadcast(self, value: Value) -> Value:
        return value

    def note(self, place: str) -> None:
        pass


def micro_batches_per_rank(target: int, micro_batch: int, ranks: int) -> int:
    """How many micro batches of an update each rank computes.

    Raises:
        ConfigError: they do not divide the samples of an update.
    """
    micro_batches, rest = divmod(target, micro_batch * ranks)
    if rest:
        fitting = micro_batch * ranks * max(1, round(target / (micro_batch * ranks)))
        smaller = max((size for size in range(1, micro_batch) if target % (size * ranks) == 0), default=None)
        raise ConfigError(
            f"data.target_batch_size {target} is the update of all ranks together, and must be a multiple of "
            f"data.micro_batch_size ({micro_batch}) × ranks ({ranks}), such as {fitting}"
            + ("" if smaller is None else f"; or set data.micro_batch_size to {smaller}")
        )
    return micro_batches


@torch.no_grad()
def share_weights(model: nn.Module, group: Group) -> None:
    """Give all ranks the weights and buffers of rank 0."""
    if group.size == 1:
        return
    for tensor in {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}.values():
        group.broadcast(tensor)
