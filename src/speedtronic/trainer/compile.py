"""`torch.compile` around a model, as the trainer uses it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn


class CompiledModel:
    """A compiled module that leaves batches smaller than the first one to the eager module.

    A short last batch would otherwise be compiled for on its own, which costs more than it can win back.

    Args:
        model: the module to compile; its parameters and their names stay its own.
        mode: the mode of `torch.compile`.
        dynamic: true compiles for any shape, and then every batch runs compiled.
    """

    def __init__(self, model: nn.Module, *, mode: str | None, dynamic: bool | None) -> None:
        self._eager = model
        options: dict[str, Any] = {"mode": mode, "dynamic": dynamic}
        self._compiled: Callable[..., Any] = torch.compile(
            model, **{name: option for name, option in options.items() if option is not None}
        )
        self._any_shape = dynamic is True
        self._batch_size: int | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        size = next(_leading_sizes([*args, *kwargs.values()]), 0)
        if self._batch_size is None:
            self._batch_size = size
        short = size < self._batch_size and not self._any_shape
        return self._eager(*args, **kwargs) if short else self._compiled(*args, **kwargs)


def _leading_sizes(values: list[Any]) -> Iterator[int]:
    return (value.shape[0] for value in values if isinstance(value, Tensor) and value.ndim)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error`, or what it was raised from, says that memory ran out on the device or the host."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    if isinstance(error, RuntimeError) and "can't allocate memory" in str(error):
        return True
    return error.__cause__ is not None and is_out_of_memory(error.__cause__)
