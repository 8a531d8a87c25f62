"""What the hardware did: peak memory, and the share of the device's peak arithmetic rate that the model used."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

# Dense bf16/fp16 tensor-core peaks in FLOP/s, from the vendors' data sheets. The first name found in the device's name
# decides, so longer names stand before the shorter ones they contain.
PEAK_FLOPS = {
    "H200": 989.4e12,
    "H100 PCIe": 756e12,
    "H100": 989.4e12,
    "GH200": 989.4e12,
    "B200": 2250e12,
    "A100": 312e12,
    "A10G": 70e12,
    "A10": 125e12,
    "L40S": 362e12,
    "L4": 121e12,
    "V100": 125e12,
    "T4": 65e12,
    "RTX 4090": 165.2e12,
    "RTX 3090": 71e12,
}


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
    model: nn.Module, device: torch.device, dtype: torch.dtype, sequence_length: int | None
) -> Callable[[float], float] | None:
    """From tokens per second to model FLOP utilisation; None where the peak or the length is unknown."""
    peak = device_peak_flops(device, dtype)
    if peak is None or sequence_length is None:
        return None
    share = training_flops_per_token(model, sequence_length) / peak
    return lambda tokens_per_sec: tokens_per_sec * share


def device_peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Peak FLOP/s of a known CUDA device in 16-bit arithmetic; None for any other device or dtype."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAK_FLOPS.items() if part in name), None)


def training_flops_per_token(model: nn.Module, sequence_length: int) -> float:
    """FLOPs of one token's forward and backward pass.

    The model's own `flops_per_token(sequence_length)` where it has one, else 6 times the number of parameters
    (Kaplan et al., arXiv 2001.08361, section 2.1).
    """
    own: Any = getattr(model, "flops_per_token", None)
    if own is not None:
        return float(own(sequence_length))
    return 6.0 * sum(parameter.numel() for parameter in model.parameters())
