"""Models inside other modules, and what their `forward` takes."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn


def unwrapped(model: nn.Module) -> nn.Module:
    """The module inside one that `torch.compile` returned, whose names have no `_orig_mod.`; others as they are."""
    # By iteration: the children of a scripted module are in no dict.
    return next((child for name, child in model.named_children() if name == "_orig_mod"), model)


def innermost(model: nn.Module) -> nn.Module:
    """The module whose `forward` a call reaches, inside what torch wraps around modules.

    `torch.compile`, `DataParallel`, `DistributedDataParallel` and `AveragedModel` take any arguments and pass them on.
    """
    inner = unwrapped(model)
    parallel = (nn.DataParallel, nn.parallel.DistributedDataParallel, torch.optim.swa_utils.AveragedModel)
    if isinstance(inner, parallel):
        inner = inner.module
    return inner if inner is model else innermost(inner)


def forward_signature(model: nn.Module) -> inspect.Signature | None:
    """What a model's `forward` takes, of a scripted or traced module too; None where nobody can tell."""
    inner = innermost(model)
    if isinstance(inner, torch.jit.ScriptModule):
        # The first argument of the schema is the module itself.
        forward: Any = inner.forward
        _, *arguments = forward.schema.arguments
        return inspect.Signature(
            [
                inspect.Parameter(
                    argument.name,
                    inspect.Parameter.POSITIONAL_OR_KEYWORD,
                    default=argument.default_value if argument.has_default_value() else inspect.Parameter.empty,
                )
                for argument in arguments
            ]
        )
    try:
        return inspect.signature(inner.forward)
    except (TypeError, ValueError):  # a forward that is not written in Python
        return None
