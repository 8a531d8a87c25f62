"""Whether a device will hold a model with all that training keeps of it, reckoned before anything is put there."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from speedtronic.config import SpeedtronicConfig
from speedtronic.errors import DeviceError
from speedtronic.parallel.launch import launched


@dataclass(frozen=True)
class Reckoning:
    """Bytes that each rank keeps from one update to the next. Activations come on top."""

    weights: int
    gradients: int
    optimizer: int
    average: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.average


def reckon(model: nn.Module, config: SpeedtronicConfig) -> Reckoning:
    """What training keeps of a model: at least so much, since Muon's share of the weights is not known yet."""
    parameters = [p for p in model.parameters() if not is_lazy(p)]
    trained = [p for p in parameters if p.requires_grad]
    sizes = [p.numel() * p.element_size() for p in trained]
    # AdamW has two moments of each weight; Muon one, of the matrices between embedding and head.
    moments = 1 if config.optimizer.name == "muon" else 2
    return Reckoning(
        weights=sum(p.numel() * p.element_size() for p in parameters),
        gradients=sum(sizes),
        optimizer=moments * sum(sizes),
        average=4 * sum(p.numel() for p in trained) if config.optimizer.ema is not None else 0,
    )


def refuse_what_does_not_fit(
    model: nn.Module, config: SpeedtronicConfig, device: torch.device, available: int | None = None
) -> None:
    """Raise DeviceError, with the numbers, where a device cannot hold the whole model for training.

    Args:
        model: not on the device yet.
        config: of the run.
        device: of this rank.
        available: bytes of memory for this rank; what the device or the machine has without it.
    """
    needed = reckon(model, config)
    memory = _memory_of(device) if available is None else available
    if memory is None or needed.total <= memory:
        return
    parts = {"weights": needed.weights, "gradients": needed.gradients, "optimizer state": needed.optimizer}
    if needed.average:
        parts["average of the weights"] = needed.average
    listed = ", ".join(f"{name} {_gigabytes(size)}" for name, size in parts.items())
    raise DeviceError(
        f"{device} has {_gigabytes(memory)} for this process, and data parallel training keeps "
        f"{_gigabytes(needed.total)} in each ({listed}), besides activations: use a smaller model, or devices with "
        "more memory; to share one model between devices (parallel: fsdp) is not part of this version yet"
    )


def _memory_of(device: torch.device) -> int | None:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    launch = launched()
    try:
        whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):  # Windows has no such numbers
        return None
    return whole // (launch.local_size if launch is not None else 1)


def _gigabytes(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
