"""What a plan depends on, and the folder in which plans are found again."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import nn

from speedtronic.config import SpeedtronicConfig
from speedtronic.data.prepare.text_cache import cache_folder
from speedtronic.durable.files import FileSystem, replace_file
from speedtronic.model.wrappers import innermost
from speedtronic.precision import processor_name
from speedtronic.tuning.plan import Plan

# What torch takes by itself. A run may change the number, and the next one in this process is on the same machine.
DEFAULT_THREADS = torch.get_num_threads()

_DATA = (
    *("micro_batch_size", "target_batch_size", "block_size", "num_workers", "prefetch_factor", "pin_memory"),
    *("dataset", "shards", "text_path", "mixture", "chat", "synthetic"),
    *("labels", "loss_normalization", "document_mask", "packing"),
)
_OPTIMIZER = ("name", "fused", "cautious", "cautious_rescale", "muon_plus", "muon_ns_steps", "muon_coefficients")


def cores() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory_bytes() -> int:
    """Memory of this machine; 8 GiB where it does not say."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # Windows has no sysconf
        return 8 * 2**30


def machine_of(device: torch.device) -> dict[str, str]:
    """What tells machines apart on which other choices may be faster."""
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "processor": processor_name(),
        "cores": str(cores()),
        "threads": str(DEFAULT_THREADS),
    }


def key_of(config: SpeedtronicConfig, model: nn.Module, machine: dict[str, str]) -> str:
    """A hash of all that measurements depend on, but for versions. Learning rates, seeds and folders are not in it."""
    data, optimizer = config.data.plain(), config.optimizer.plain()
    about: dict[str, Any] = {
        "version": 1,
        "machine": machine,
        "model": config.model.plain(),
        "class": type(innermost(model)).__qualname__,
        "weights": [(name, list(p.shape), str(p.dtype), p.requires_grad) for name, p in model.named_parameters()],
        "data": {key: data[key] for key in _DATA},
        "optimizer": {key: optimizer[key] for key in _OPTIMIZER},
        "ema": config.optimizer.ema is not None,
        "clip": config.optimizer.grad_clip is not None,
        "precision": config.precision.plain(),
        "compile": [config.compile, config.compile_options.plain()],
        "checkpointing": config.gradient_checkpointing,
        "loss": config.loss,
        "nonfinite": config.run.on_nonfinite,
        "threads": config.run.threads,
        "deterministic": config.run.deterministic,
    }
    return hashlib.sha256(json.dumps(about, sort_keys=True, default=str).encode()).hexdigest()[:32]


def _path(key: str) -> Path:
    # Another version of torch is measured anew, while a run that it resumes keeps its plan.
    return cache_folder() / "plans" / f"{key}-torch{torch.__version__}.json"


def load(key: str) -> Plan | None:
    """The plan that was kept under a key; None where there is none that can be read."""
    try:
        plan = Plan.model_validate_json(_path(key).read_bytes())
    except (OSError, ValidationError):
        return None
    return plan if plan.key == key and plan.measured else None


def keep(plan: Plan) -> None:
    """Keep a plan under its key.

    Raises:
        OSError: the cache cannot be written.
    """
    path = _path(plan.key)
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(FileSystem(), path, plan.to_json().encode())
