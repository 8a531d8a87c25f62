"""The device of a run, and the number formats it computes in there."""

from __future__ import annotations

import contextlib
import platform
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

import torch

from speedtronic.config import PrecisionConfig, SpeedtronicConfig
from speedtronic.errors import ConfigError, DeviceError, NotBuiltError, warn

Mode = Literal["bf16", "fp16", "fp32"]

_DTYPES: dict[Mode, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_MODE_OF_DTYPE: dict[str, Mode] = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


@dataclass(frozen=True)
class PrecisionPlan:
    """How a run computes. Parameters and optimizer state stay float32 in every mode.

    Attributes:
        mode: "bf16", "fp16" or "fp32": the requested mode, or the one that the device can run instead.
        dtype: dtype of the matrix products.
        use_scaler: whether gradients need loss scaling, because float16 underflows.
        autocast_enabled: whether the forward pass runs under `torch.autocast`.
        device_type: "cuda", "mps" or "cpu".
    """

    mode: Mode
    dtype: torch.dtype
    use_scaler: bool
    autocast_enabled: bool
    device_type: str


def resolve_device(requested: str | torch.device | None = "auto") -> torch.device:
    """The device to train on. "auto" and `None` choose CUDA, then MPS, then the CPU.

    Raises:
        DeviceError: the requested device does not exist on this machine; the message names those that do.
    """
    if requested is None or requested == "auto":
        return torch.device(available_devices()[0])
    try:
        device = torch.device(requested)
    except RuntimeError as error:
        raise DeviceError(f"unknown device {requested!r}; use auto, cpu, cuda, cuda:<index> or mps") from error
    if not _is_available(device):
        choices = ", ".join(available_devices())
        without_cuda = device.type == "cuda" and torch.version.cuda is None and torch.version.hip is None
        reason = "; this PyTorch was built without CUDA: install a build that has it, or" if without_cuda else ";"
        raise DeviceError(
            f"device {str(device)!r} is not available on this machine{reason} set run.device to auto or to one of: "
            f"{choices}"
        )
    return device


def use_device(device: torch.device, tf32: bool | None = None) -> None:
    """Make `device` the current CUDA device of this thread, if it is one with a number, and set what `tf32` says.

    What names no device, such as a new event or page-locked memory, then belongs to it. Otherwise torch would use the
    first card for that: read numbers before they have arrived, and keep some hundred MiB of a card that trains nothing.

    Args:
        device: where to train.
        tf32: whether float32 products and convolutions on CUDA are computed in TF32; None leaves torch's settings.
    """
    if device.type != "cuda":
        return
    if device.index is not None:
        torch.cuda.set_device(device)
    if tf32 is not None:
        with warnings.catch_warnings():
            # torch recommends a setting for each kind of operation instead. With these alone, torch's own compiler
            # fails where it asks for the one of all products (torch 2.13).
            warnings.simplefilter("ignore")
            torch.set_float32_matmul_precision("high" if tf32 else "highest")
            torch.backends.cudnn.allow_tf32 = tf32


def copies_in_background(tensor: torch.Tensor, device: torch.device) -> bool:
    """What `non_blocking` should be when `tensor` is copied to `device`: true from the host, but to MPS.

    CUDA keeps the memory of the host until the copy is done, or copies it aside before the call returns. MPS may read
    it after it was freed (pytorch issues 139550 and 189690), and what is copied to the host may be read too early.
    """
    return tensor.device.type == "cpu" and device.type != "mps"


def resolve_precision(
    config: SpeedtronicConfig | PrecisionConfig | str,
    device: str | torch.device,
    *,
    warn: Callable[[str], None] = warn,
) -> PrecisionPlan:
    """Turn a configuration, its precision section, or a mode into the plan for a device.

    "auto" is bf16 on CUDA devices that compute in bfloat16, fp16 with loss scaling on other CUDA devices, and fp32 on
    CPU and MPS. With `precision.dtype` given, "auto" is the mode of that dtype. A mode that the device cannot run
    becomes fp32, and `warn` is told. fp16 needs CUDA. bf16 needs a CUDA device that computes in it, a CPU, or MPS on
    macOS 14.

    Raises:
        ConfigError: the mode or the dtype is unknown.
        NotBuiltError: the mode is fp8.
    """
    device = torch.device(device)
    mode = _requested_mode(config.precision if isinstance(config, SpeedtronicConfig) else config)
    if mode == "auto":
        mode = _preferred_mode(device)
    elif not _can_run(mode, device):
        warn(f"precision {mode} cannot run on {device}; training in fp32")
        mode = "fp32"
    return PrecisionPlan(
        mode=mode,
        dtype=_DTYPES[mode],
        use_scaler=mode == "fp16",
        autocast_enabled=mode != "fp32",
        device_type=device.type,
    )


def autocast_context(plan: PrecisionPlan) -> contextlib.AbstractContextManager[None]:
    """A new context for one forward pass. In fp32 it does nothing."""
    if not plan.autocast_enabled:
        return contextlib.nullcontext()
    return torch.autocast(plan.device_type, dtype=plan.dtype)


def make_grad_scaler(plan: PrecisionPlan) -> torch.amp.GradScaler:
    """A gradient scaler that scales in fp16 and changes nothing in other modes."""
    return torch.amp.GradScaler(plan.device_type, enabled=plan.use_scaler)


def supports_fused_adamw(device: str | torch.device) -> bool:
    """Whether torch builds its fused AdamW for this CUDA device. False on any other kind of device."""
    device = torch.device(device)
    if device.type != "cuda":
        return False
    try:
        parameter = torch.nn.Parameter(torch.zeros(1, device=device))
        torch.optim.AdamW([parameter], fused=True)
    except (TypeError, RuntimeError, ValueError):
        return False
    return True


def available_devices() -> list[str]:
    """The devices of this machine, best first."""
    found = []
    if torch.cuda.is_available():
        count = torch.cuda.device_count()
        found += ["cuda"] if count == 1 else [f"cuda:{index}" for index in range(count)]
    if torch.backends.mps.is_available():
        found.append("mps")
    return [*found, "cpu"]


def _is_available(device: torch.device) -> bool:
    if device.type == "cuda":
        return torch.cuda.is_available() and (device.index or 0) < torch.cuda.device_count()
    if device.type == "mps":
        return torch.backends.mps.is_available()
    return device.type == "cpu"


def _requested_mode(config: PrecisionConfig | str) -> Mode | Literal["auto"]:
    mode, dtype = (config, None) if isinstance(config, str) else (config.mode, config.dtype)
    if mode == "fp8":
        raise NotBuiltError("precision.mode: fp8 is not built yet; use bf16, fp16, fp32 or auto")
    if mode == "auto" and dtype is not None:
        if dtype not in _MODE_OF_DTYPE:
            raise ConfigError(f"precision.dtype: {dtype!r} is not one of {', '.join(_MODE_OF_DTYPE)}")
        return _MODE_OF_DTYPE[dtype]
    if mode != "auto" and mode not in _DTYPES:
        raise ConfigError(f"precision.mode: {mode!r} is not one of auto, {', '.join(_DTYPES)}")
    return cast(Mode, mode)


def _preferred_mode(device: torch.device) -> Mode:
    if device.type != "cuda":
        return "fp32"
    return "bf16" if computes_bf16(device) else "fp16"


def _can_run(mode: Mode, device: torch.device) -> bool:
    if mode == "fp32":
        return True
    if device.type == "cuda":
        return mode == "fp16" or computes_bf16(device)
    if device.type == "mps":
        return mode == "bf16" and torch.backends.mps.is_macos_or_newer(14, 0)
    return mode == "bf16"


def computes_bf16(device: torch.device) -> bool:
    """Whether a CUDA device computes in bfloat16. Older ones emulate it, which is slower than float32."""
    # torch asks the current device.
    with torch.cuda.device(device):
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))


def processor_name() -> str:
    """The model of the processor, as far as the system says it."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    except OSError:  # other systems have no such file
        pass
    return platform.processor() or platform.machine()
