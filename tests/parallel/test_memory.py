"""What a rank keeps of a model is reckoned before anything is put on a device."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from speedtronic.config import SpeedtronicConfig
from speedtronic.errors import DeviceError
from speedtronic.parallel.memory import reckon, refuse_what_does_not_fit

CPU = torch.device("cpu")


def test_weights_gradients_and_state_are_reckoned() -> None:
    model = nn.Sequential(nn.Linear(10, 10, bias=False), nn.Linear(10, 10, bias=False).requires_grad_(False))
    found = reckon(model, SpeedtronicConfig())
    assert (found.weights, found.gradients, found.optimizer, found.average) == (800, 400, 800, 0)
    with_average = reckon(model, SpeedtronicConfig.from_dict({"optimizer": {"name": "muon", "ema": 0.9}}))
    assert (with_average.optimizer, with_average.average) == (400, 400)


def test_a_device_that_is_too_small_is_refused_with_the_numbers() -> None:
    with torch.device("meta"):
        model = nn.Linear(2**15, 2**15, bias=False)
    refuse_what_does_not_fit(model, SpeedtronicConfig(), CPU, available=16 * 2**30)
    with pytest.raises(DeviceError, match=r"cpu has 15.0 GiB .* keeps 16.0 GiB in each \(weights 4.0 GiB, gradients"):
        refuse_what_does_not_fit(model, SpeedtronicConfig(), CPU, available=15 * 2**30)
