"""Evaluate a model without changing its modes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put every module of the model in evaluation mode, and afterwards each back in its former mode.

    `model.train()` alone would also switch modules to training that were in evaluation mode on purpose, such as a
    frozen batch norm.
    """
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
