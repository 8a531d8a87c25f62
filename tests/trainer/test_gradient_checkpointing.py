"""Gradient checkpointing is turned on by the model's own hook."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.models import (
    Events,
    Regression,
    config_of,
    make_trainer,
)


def test_gradient_checkpointing_calls_the_models_hook() -> None:
    """Seed: "If enabled, the trainer calls: model.set_gradient_checkpointing(True)"."""

    class Hooked(Regression):
        enabled: bool | None = None

        def set_gradient_checkpointing(self, enabled: bool) -> None:
            self.enabled = enabled

    model = Hooked()
    make_trainer(model)
    assert model.enabled is None
    make_trainer(model, config=config_of(gradient_checkpointing=True))
    assert model.enabled is True


@pytest.mark.parametrize("names", [("activation",), ("gradient",), ("activation", "gradient")])
def test_gradient_checkpointing_has_other_names_in_hugging_face_models(names: tuple[str, ...]) -> None:
    model: Any = Regression()
    called: list[str] = []
    for name in names:
        setattr(model, f"{name}_checkpointing_enable", lambda name=name: called.append(name))
    make_trainer(model, config={"gradient_checkpointing": True})
    assert called == [names[0]]


@pytest.mark.parametrize("error", [None, AttributeError("gone"), RuntimeError("broken")])
def test_a_missing_or_failing_checkpointing_hook_is_a_warning(error: Exception | None) -> None:
    """Seed: "A missing hook, attribute error, or any hook exception logs a warning and continues"."""

    class Failing(Regression):
        def set_gradient_checkpointing(self, enabled: bool) -> None:
            assert error is not None
            raise error

    events = Events()
    model = Regression() if error is None else Failing()
    ours = make_trainer(model, config=config_of(gradient_checkpointing=True), events=events)
    assert ours.fit(1).steps == 1
