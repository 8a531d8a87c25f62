"""Models inside other modules."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor, nn

from speedtronic.model.wrappers import forward_signature, innermost, unwrapped


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, pixels: Tensor, scale: float = 2.0) -> Tensor:
        scores: Tensor = self.linear(pixels) * scale
        return scores


def scripted(model: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".torch.jit.")
        return torch.jit.script(model)


def test_the_module_inside_is_found_and_others_are_themselves() -> None:
    model = Classifier()
    assert unwrapped(torch.compile(model, backend="eager")) is model
    assert innermost(torch.compile(nn.DataParallel(torch.compile(model, backend="eager")), backend="eager")) is model
    assert innermost(torch.optim.swa_utils.AveragedModel(model)).__class__ is Classifier
    other = scripted(model)
    assert unwrapped(other) is innermost(other) is other


def test_the_signature_is_that_of_the_module_inside() -> None:
    model = Classifier()
    for made in (model, torch.compile(model, backend="eager"), nn.DataParallel(model), scripted(model)):
        signature = forward_signature(made)
        assert signature is not None
        assert [(p.name, p.default) for p in signature.parameters.values()] == [
            ("pixels", signature.empty),
            ("scale", 2.0),
        ]


def test_a_forward_that_is_not_written_in_python_has_no_signature() -> None:
    model = Classifier()
    model.forward = type  # type: ignore[assignment]
    assert forward_signature(model) is None
