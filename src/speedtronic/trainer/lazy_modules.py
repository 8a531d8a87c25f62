"""Lazy modules (`nn.LazyLinear`, …), whose weights get their shapes from the first batch."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from speedtronic.errors import ConfigError
from speedtronic.model import evaluation_mode


def uninitialized(model: nn.Module) -> list[str]:
    """The names of the weights and buffers that have no shape yet."""
    return [name for name, tensor in chain(model.named_parameters(), model.named_buffers()) if is_lazy(tensor)]


def initialize(model: nn.Module, call: Callable[[], Any]) -> None:
    """Give every weight its shape and its first values, by one forward pass without gradients in evaluation mode.

    The parameters stay the same objects, so an optimizer that was made before keeps them.

    Args:
        model: on the device where it will be trained.
        call: calls the model on a batch.

    Raises:
        ConfigError: the forward pass does not reach all lazy modules.
    """
    with evaluation_mode(model), torch.no_grad():
        call()
    if left := uninitialized(model):
        raise ConfigError(
            f"the forward pass of the model leaves lazy modules without a shape: {', '.join(left[:8])}; remove "
            "them, or give them their sizes"
        )
