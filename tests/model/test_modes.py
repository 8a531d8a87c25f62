from __future__ import annotations

import warnings
from functools import partial
from io import BytesIO
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from speedtronic.model import evaluation_mode
from speedtronic.model.modes import PartsSetApart


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


class Said:
    """Keeps what is told, apart by how it is told."""

    def __init__(self) -> None:
        self.informed: list[str] = []
        self.warned: list[str] = []

    def parts_of(self, model: nn.Module) -> PartsSetApart:
        return PartsSetApart(model, inform=self.informed.append, warn=self.warned.append)


def backbone_and_head() -> nn.Module:
    model = nn.ModuleDict({"backbone": nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), "head": nn.Linear(2, 1)})
    model["backbone"].requires_grad_(False).eval()
    return model


def trained_parts(model: nn.Module) -> set[str]:
    return {name for name, module in model.named_modules() if module.training}


def test_a_part_set_apart_stays_in_evaluation_mode_and_that_is_told_once() -> None:
    said, model = Said(), backbone_and_head()
    parts = said.parts_of(model)
    for _ in range(2):
        parts.train()
        assert trained_parts(model) == {"", "head"}
    assert said.informed == ["in evaluation mode while the rest is trained: backbone"]
    assert said.warned == []


def test_what_was_set_apart_is_still_apart_after_the_whole_model_was_evaluated() -> None:
    said, model = Said(), backbone_and_head()
    parts = said.parts_of(model)
    for _ in range(2):
        model.eval()
        parts.train()
        assert trained_parts(model) == {"", "head"}


def test_the_user_may_change_which_parts_are_apart() -> None:
    said, model = Said(), backbone_and_head()
    parts = said.parts_of(model)
    parts.train()
    model.train()
    model["head"].eval()
    parts.train()
    assert trained_parts(model) == {"", "backbone", "backbone.0", "backbone.1"}


def test_a_model_in_evaluation_mode_as_a_whole_is_trained_as_a_whole() -> None:
    said, model = Said(), backbone_and_head().eval()
    said.parts_of(model).train()
    assert all(module.training for module in model.modules())
    assert said.informed == said.warned == []


def test_a_part_with_weights_that_are_trained_is_warned_about_since_a_library_may_have_set_it_apart() -> None:
    said, model = Said(), backbone_and_head().requires_grad_(True)
    said.parts_of(model).train()
    assert "backbone" not in trained_parts(model)
    assert len(said.warned) == 1
    assert "call train()" in said.warned[0]


def test_a_trained_part_of_a_model_in_evaluation_mode_is_warned_about() -> None:
    said, model = Said(), backbone_and_head().eval()
    model["head"].train()
    said.parts_of(model).train()
    assert all(module.training for module in model.modules())
    assert len(said.warned) == 1
    assert "except for head" in said.warned[0]


def test_a_model_may_set_parts_apart_in_its_own_train() -> None:
    class Frozen(nn.Sequential):
        def train(self, mode: bool = True) -> Any:
            super().train(mode)
            self[1].eval()
            return self

    model = Frozen(nn.Linear(2, 2), nn.BatchNorm1d(2))
    Said().parts_of(model).train()
    assert trained_parts(model) == {"", "0"}


def test_the_parts_of_a_wrapped_model_are_those_of_the_module_inside() -> None:
    inner = backbone_and_head()
    for model in (nn.DataParallel(inner), torch.compile(inner, backend="eager")):
        Said().parts_of(model).train()
        assert trained_parts(inner) == {"", "head"}


def test_only_the_outermost_of_many_parts_are_named() -> None:
    said = Said()
    model = nn.Sequential(*(nn.Sequential(nn.Linear(1, 1)) for _ in range(12)), nn.Linear(1, 1))
    for part in list(model)[:12]:
        part.eval().requires_grad_(False)
    said.parts_of(model).train()
    assert said.informed[0].endswith(": 0, 1, 10, 11 and 8 more parts")


def traced(model: nn.Module, *, training: bool) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.trace(model.train(training), (torch.randn(4, 3),), check_trace=False)


class Sequence(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.cells = nn.GRU(3, 4, num_layers=2, dropout=dropout)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.cells(x)[0]
        return out


def test_a_module_that_was_traced_in_training_mode_is_said_to_keep_it() -> None:
    for model, operations in (
        (nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(), nn.Linear(3, 1)), "batch_norm, dropout"),
        (Sequence(0.5), "gru"),
    ):
        trace = traced(model, training=True)
        for whole, name in ((trace, "the model"), (nn.Sequential(nn.Linear(3, 3), trace), "1")):
            said = Said()
            said.parts_of(whole).train()
            assert said.informed == []
            assert len(said.warned) == 1
            assert said.warned[0].startswith(f"{name} was traced in training mode and keeps it ({operations})")


def test_a_module_that_was_traced_in_evaluation_mode_is_said_to_keep_it_while_the_rest_is_trained() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1))
    for frozen in (False, True):
        said = Said()
        model.requires_grad_(not frozen)
        said.parts_of(nn.Sequential(traced(model, training=False), nn.Linear(1, 1)))
        (message,) = said.informed if frozen else said.warned
        assert "0 was traced in evaluation mode and keeps it (batch_norm)" in message
        assert ("torch.jit.script" in message) is not frozen


def test_a_module_that_is_alike_in_both_modes_or_has_both_is_not_spoken_of() -> None:
    alike = nn.Sequential(nn.BatchNorm1d(3, track_running_stats=False), nn.Dropout(0.0), nn.LayerNorm(3))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = torch.jit.script(nn.Sequential(nn.BatchNorm1d(3), nn.Dropout()))
    for model in (traced(alike, training=True), traced(Sequence(0.0), training=True), scripted):
        said = Said()
        said.parts_of(model).train()
        assert said.informed == said.warned == []


def test_a_trace_that_was_loaded_from_a_file_is_one_too() -> None:
    file = BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(traced(nn.Sequential(nn.Dropout()), training=True), file)
        loaded = torch.jit.load(BytesIO(file.getvalue()))
    said = Said()
    said.parts_of(loaded)
    assert len(said.warned) == 1


@pytest.mark.parametrize("wrap", [lambda model: model, partial(torch.compile, backend="eager")])
def test_a_model_that_is_left_in_evaluation_mode_is_trained_again_without_the_parts_set_apart(wrap: Any) -> None:
    said, model = Said(), backbone_and_head()
    wrapped = wrap(model)
    parts = said.parts_of(wrapped)
    parts.train()
    for _ in range(2):
        wrapped.eval()
        parts.stay_in_training()
        assert trained_parts(model) == {"", "head"}
    assert len(said.warned) == 1
    assert "call train() on it after eval()" in said.warned[0]
    # Parts that a callback freezes between two steps are its own affair.
    model["head"].eval()
    parts.stay_in_training()
    assert trained_parts(model) == {""}


def test_frozen_parts_that_train_reached_are_set_apart_again_and_unfrozen_ones_are_not() -> None:
    said, model = Said(), backbone_and_head()
    parts = said.parts_of(model)
    parts.train()
    for _ in range(2):
        model.eval()
        model.train()
        parts.stay_in_training()
        assert trained_parts(model) == {"", "head"}
    assert len(said.warned) == 1
    assert "they stay in evaluation mode: backbone; train()" in said.warned[0]
    # A callback that unfreezes it means it, also its layers without weights.
    model["backbone"].append(nn.Dropout())
    parts = said.parts_of(model.train())
    model["backbone"].eval()
    parts.train()
    model.train().requires_grad_(True)
    for _ in range(2):
        parts.stay_in_training()
        assert all(module.training for module in model.modules())
    assert said.informed[-1] == "in training mode from here on: backbone"
