"""Optimizers from a configuration: which parameter belongs to which group, and AdamW with its fallback."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from speedtronic.config import OptimizerConfig
from speedtronic.errors import ConfigError
from speedtronic.precision import supports_fused_adamw

_log = logging.getLogger(__name__)


def parameter_groups(model: nn.Module, *, weight_decay: float, decay_1d: bool) -> list[dict[str, Any]]:
    """Split the trainable parameters of `model` into matrices and the rest.

    Matrices (two dimensions and more) decay; norms, biases and other vectors do not, unless `decay_1d`. They are two
    groups in either case, so that a run which is resumed may change its mind. Frozen parameters belong to no group,
    tied ones to one. Empty groups are left out.

    Raises:
        ConfigError: nothing in the model is trainable.
    """
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [parameter for parameter in trainable if parameter.ndim >= 2], "weight_decay": weight_decay},
        {
            "params": [parameter for parameter in trainable if parameter.ndim < 2],
            "weight_decay": weight_decay if decay_1d else 0.0,
        },
    ]
    groups = [group for group in groups if group["params"]]
    if not groups:
        raise ConfigError("the model has no trainable parameter: set requires_grad on what should be trained")
    return groups


def check_ownership(model: nn.Module, groups: Iterable[dict[str, Any]]) -> None:
    """Raise ConfigError, naming the parameters, unless each trainable one belongs to exactly one group."""
    owners = Counter(parameter for group in groups for parameter in group["params"])
    trainable = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    problems = {
        "owned by no group": [name for name, parameter in trainable.items() if owners[parameter] == 0],
        "owned more than once": [name for name, parameter in trainable.items() if owners[parameter] > 1],
    }
    for problem, offenders in problems.items():
        if offenders:
            raise ConfigError(f"trainable parameters {problem}: {', '.join(offenders)}")


def build_adamw(model: nn.Module, config: OptimizerConfig, device: torch.device) -> torch.optim.AdamW:
    """Build AdamW (arXiv 1711.05101) over all trainable parameters of `model`.

    `config.fused` null asks `supports_fused_adamw(device)`; a fused construction that torch refuses falls back to
    the ordinary one, and says so in the log.
    """
    fused = supports_fused_adamw(device) if config.fused is None else config.fused
    if fused:
        try:
            return _adamw(model, config, fused=True)
        except (TypeError, RuntimeError, ValueError) as error:
            _log.warning("fused AdamW is not available on %s (%s): using the ordinary one", device, error)
    return _adamw(model, config)


def _adamw(model: nn.Module, config: OptimizerConfig, **options: Any) -> torch.optim.AdamW:
    groups = parameter_groups(model, weight_decay=config.weight_decay, decay_1d=config.decay_1d)
    check_ownership(model, groups)
    return torch.optim.AdamW(
        groups,
        lr=config.lr,
        betas=(config.betas[0], config.betas[1]),
        eps=config.eps,
        weight_decay=config.weight_decay,
        **options,
    )
