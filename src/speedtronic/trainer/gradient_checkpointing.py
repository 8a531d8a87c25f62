"""Turns gradient checkpointing on: activations are computed again in the backward pass, which saves memory."""

from __future__ import annotations

from typing import Any

from torch import nn

from speedtronic.metrics import MetricLogger

# The hooks of Hugging Face's models, the newer name first.
_HUGGING_FACE_HOOKS = ("activation_checkpointing_enable", "gradient_checkpointing_enable")


def enable_gradient_checkpointing(model: nn.Module, logger: MetricLogger) -> None:
    """Call the hook of the model; without one, or where it fails, log a warning."""
    hooked: Any = model
    foreign = [name for name in _HUGGING_FACE_HOOKS if hasattr(model, name)]
    try:
        if foreign and not hasattr(model, "set_gradient_checkpointing"):
            getattr(hooked, foreign[0])()
        else:
            hooked.set_gradient_checkpointing(True)
    except Exception as error:  # noqa: BLE001 - the hook is the user's code, and the feature only saves memory
        logger.warning(f"gradient checkpointing is not available for this model: {error}")
