"""The states of the random number generators that training draws from."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch


def _warn(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=3)


def capture_rng_state() -> dict[str, Any]:
    """The states of Python's, numpy's and torch's generators, as a tree that a checkpoint can hold.

    Returns:
        `python`: the tuple of `random.getstate`; `numpy`: the tuple of `np.random.get_state`;
        `torch`: a uint8 tensor;
        `cuda`: one uint8 tensor per device, where CUDA is in use; `mps`: a uint8 tensor, where there is one.
    """
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state_all()
    if torch.backends.mps.is_available():
        state["mps"] = torch.mps.get_rng_state()
    return state


def restore_rng_state(state: dict[str, Any], *, warn: Callable[[str], None] = _warn) -> None:
    """Put the generators back to where `capture_rng_state` found them.

    Args:
        state: what `capture_rng_state` returned. A device that is absent here is passed over; when the
            number of CUDA devices differs, those that both sides have are restored.
        warn: called with a message when the number of CUDA devices differs.
    """
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if "cuda" in state:
        _restore_cuda(state["cuda"], warn)
    if "mps" in state and torch.backends.mps.is_available():
        torch.mps.set_rng_state(state["mps"])


def _restore_cuda(states: list[torch.Tensor], warn: Callable[[str], None]) -> None:
    here = torch.cuda.device_count()
    if here != len(states):
        warn(
            f"random states of {len(states)} CUDA devices were saved, {here} are here: "
            "what is drawn on the GPU differs from the run before"
        )
    for index, device_state in enumerate(states[:here]):
        torch.cuda.set_rng_state(device_state, index)
