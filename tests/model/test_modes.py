from __future__ import annotations

import pytest
from torch import nn

from speedtronic.model import evaluation_mode


def test_every_module_gets_its_own_mode_back() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout()).train()
    model[1].eval()
    with evaluation_mode(model):
        assert not any(module.training for module in model.modules())
    assert [module.training for module in model.modules()] == [True, True, False, True]


def test_modes_come_back_after_an_error() -> None:
    model = nn.Dropout().train()
    with pytest.raises(KeyError), evaluation_mode(model):
        raise KeyError
    assert model.training
