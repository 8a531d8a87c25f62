"""What the hardware did: memory, how busy it was, and the share of its peak arithmetic rate that the model used."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

# Dense peaks in FLOP/s of 16-bit tensor cores that add in fp32, by `card_name`. From the data sheets of the cards; of
# the RTX cards from the tables in NVIDIA's papers on the GA102, Ada and Blackwell RTX architectures; of the MI300X from
# AMD's. A sheet that gives rates with sparsity alone gives twice as much. A card of which we know no sheet is left out.
PEAK_FLOPS = {
    "B200": 2250e12,
    "GB200": 2500e12,
    "GH200": 989.4e12,
    "H200": 989.4e12,
    "H200 NVL": 835.5e12,
    "H100": 989.4e12,
    "H100 NVL": 835.5e12,
    "H100 PCIE": 756e12,
    "A100": 312e12,
    "A40": 149.7e12,
    "A30": 165e12,
    "A10": 125e12,
    "L40S": 362.05e12,
    "L40": 181.05e12,
    "L4": 121e12,
    "V100": 125e12,
    "V100 PCIE": 112e12,
    "V100S PCIE": 130e12,
    "T4": 65e12,
    "RTX 6000 ADA GENERATION": 364.2e12,
    "RTX A6000": 154.8e12,
    "RTX 5090": 209.5e12,
    "RTX 5080": 112.6e12,
    "RTX 4090": 165.2e12,
    "RTX 3090 TI": 80e12,
    "RTX 3090": 71e12,
    "INSTINCT MI300X": 1307.4e12,
}

# What a driver says besides the card's name: the maker, the line, the memory, and sockets that change nothing.
_NOT_IN_A_NAME = re.compile(r"\b(NVIDIA|AMD|TESLA|GEFORCE|SXM\d?|\d+GB?|HBM\d\w?)\b")


def card_name(reported: str) -> str:
    """The name of a card, such as `H100 PCIE`, in what a driver calls it, such as `NVIDIA H100 80GB PCIe`."""
    name = " ".join(_NOT_IN_A_NAME.sub(" ", reported.upper().replace("-", " ")).split())
    # Both forms of the A100 compute equally fast.
    return "A100" if name == "A100 PCIE" else name


class DeviceMeter:
    """Reads what a device says of itself, once a logging window: it costs more than a step may.

    Args:
        device: the one that trains.
        warn: told why the card does not say how busy it is.

    Attributes:
        figures: what was read last. `peak_memory_bytes` is the peak of the run so far: of CUDA memory in tensors, or of
            the process's resident set; None where unknown. On CUDA also `peak_reserved_bytes`, what torch took from the
            card for it, and, with the extra `gpu`, `gpu_busy_percent`, the share of about the last second in which any
            kernel ran.
    """

    def __init__(self, device: torch.device, warn: Callable[[str], None]) -> None:
        self._device = device
        self._reads_busy = device.type == "cuda" and (torch.version.hip is not None or find_spec("pynvml") is not None)
        if self._reads_busy and (problem := self._why_not_busy()) is not None:
            self._reads_busy = False
            warn(f"the card does not say how busy it is, so gpu_busy_percent is not logged: {problem}")
        self.figures: dict[str, int | None] = {}
        self.read()

    def read(self) -> None:
        """Read all figures now."""
        self.figures["peak_memory_bytes"] = peak_memory_bytes(self._device)
        if self._device.type == "cuda":
            self.figures["peak_reserved_bytes"] = int(torch.cuda.max_memory_reserved(self._device))
        if self._reads_busy:
            self.figures["gpu_busy_percent"] = int(torch.cuda.utilization(self._device))

    def _why_not_busy(self) -> str | None:
        try:
            torch.cuda.utilization(self._device)
        except Exception as error:  # noqa: BLE001 - the management library of the driver, which may fail in any way
            return f"{type(error).__name__}: {error}"
        return None


def peak_memory_bytes(device: torch.device) -> int | None:
    """Peak memory of the run so far: CUDA memory in tensors, or the process's resident set; None where unknown."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    if sys.platform == "win32":
        return None
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak) if sys.platform == "darwin" else int(peak) * 1024


def flop_utilisation(
    model: nn.Module, device: torch.device, dtype: torch.dtype, sequence_length: int | None, devices: int = 1
) -> Callable[[float], float] | None:
    """From tokens per second of all devices to model FLOP utilisation; None where peak or length is unknown."""
    peak = device_peak_flops(device, dtype)
    if peak is None or sequence_length is None:
        return None
    share = training_flops_per_token(model, sequence_length) / (peak * devices)
    return lambda tokens_per_sec: tokens_per_sec * share


def device_peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Peak FLOP/s of a known CUDA device in 16-bit arithmetic; None for any other device or dtype."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return None
    return PEAK_FLOPS.get(card_name(torch.cuda.get_device_name(device)))


def training_flops_per_token(model: nn.Module, sequence_length: int) -> float:
    """FLOPs of one token's forward and backward pass.

    The model's own `flops_per_token(sequence_length)` where it has one, else 6 times the number of parameters
    (Kaplan et al., arXiv 2001.08361, section 2.1).
    """
    own: Any = getattr(model, "flops_per_token", None)
    if own is not None:
        return float(own(sequence_length))
    return 6.0 * sum(parameter.numel() for parameter in model.parameters())
