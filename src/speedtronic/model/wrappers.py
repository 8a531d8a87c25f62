"""Models inside other modules."""

from __future__ import annotations

from torch import nn


def unwrapped(model: nn.Module) -> nn.Module:
    """The module inside one that `torch.compile` returned, whose names have no `_orig_mod.`; others as they are."""
    inner = model._modules.get("_orig_mod")
    return model if inner is None else inner
