from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from speedtronic.checkpoint import CheckpointManager, capture_rng_state, restore_rng_state


def draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_restored_generators_draw_the_same_numbers_again() -> None:
    state = capture_rng_state()
    first = [draw() for _ in range(3)]
    restore_rng_state(state)
    assert [draw() for _ in range(3)] == first


def test_a_pending_gaussian_is_kept() -> None:
    random.gauss(0, 1)
    np.random.randn()
    state = capture_rng_state()
    first = random.gauss(0, 1), np.random.randn()
    restore_rng_state(state)
    assert (random.gauss(0, 1), np.random.randn()) == first


def test_states_survive_a_checkpoint(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    manager.save(1, {"rng": capture_rng_state()})
    first = draw()
    state = manager.load_latest()
    assert state is not None
    restore_rng_state(state["rng"])
    assert draw() == first


def test_another_number_of_cuda_devices_is_a_warning() -> None:
    state = {
        **capture_rng_state(),
        "cuda": [torch.zeros(16, dtype=torch.uint8)] * (torch.cuda.device_count() + 1),
    }
    warnings: list[str] = []
    if torch.cuda.is_available():
        state["cuda"][:-1] = torch.cuda.get_rng_state_all()
    restore_rng_state(state, warn=warnings.append)
    assert len(warnings) == 1
    assert "CUDA devices were saved" in warnings[0]


def test_by_default_the_warning_is_a_python_warning() -> None:
    state = {
        **capture_rng_state(),
        "cuda": [torch.zeros(16, dtype=torch.uint8)] * (torch.cuda.device_count() + 1),
    }
    if torch.cuda.is_available():
        state["cuda"][:-1] = torch.cuda.get_rng_state_all()
    with pytest.warns(RuntimeWarning, match="CUDA devices were saved"):
        restore_rng_state(state)
