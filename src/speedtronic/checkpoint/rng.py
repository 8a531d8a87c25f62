"""The states of the random number generators that training draws from."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from speedtronic.errors import warn


def capture_rng_state() -> dict[str, Any]:
    """The states of the generators of Python, numpy and torch, as a tree that a checkpoint can hold.

    Returns:
        `python`: the tuple of `random.getstate`; `numpy`: the tuple of `np.random.get_state`;
        `torch`: a uint8 tensor;
        `cuda`: one uint8 tensor per device, where CUDA is in use; `mps`: a uint8 tensor, where there is one.
    """
    return {"python": random.getstate(), "numpy": np.random.get_state(), **capture_torch_rng_state()}


def capture_torch_rng_state() -> dict[str, Any]:
    """The part of `capture_rng_state` that is torch's: a tenth of the time, since reading NumPy's takes the most."""
    state: dict[str, Any] = {"torch": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state_all()
    if torch.backends.mps.is_available():
        state["mps"] = torch.mps.get_rng_state()
    return state


def restore_rng_state(state: dict[str, Any], *, warn: Callable[[str], None] = warn) -> None:
    """Restore the states that `capture_rng_state` or `capture_torch_rng_state` found.

    Args:
        state: what one of them returned. What it lacks stays as it is. A device that is absent here is passed over. If
            the number of CUDA devices differs, those that both sides have are restored.
        warn: called with a message when the number of CUDA devices differs.
    """
    if "python" in state:
        random.setstate(state["python"])
    if "numpy" in state:
        np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if "mps" in state and torch.backends.mps.is_available():
        torch.mps.set_rng_state(state["mps"])
    if "cuda" in state:
        saved, here = len(state["cuda"]), torch.cuda.device_count()
        if here != saved:
            warn(
                f"random states of {saved} CUDA devices were saved, {here} are here: "
                "random numbers on the GPU differ from the run before"
            )
        for index, device_state in enumerate(state["cuda"][:here]):
            torch.cuda.set_rng_state(device_state, index)
