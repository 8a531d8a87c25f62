from __future__ import annotations

import types
from typing import Any

import pytest
from torch import nn

from speedtronic.config import ModelConfig, SpeedtronicConfig
from speedtronic.errors import ConfigError
from speedtronic.model import ReferenceTransformer
from speedtronic.registry import ModelRegistry, build_model, register_model, registry


def linear(config: ModelConfig, *, width: int = 2) -> nn.Module:
    return nn.Linear(width, config.vocab_size)


def section(name: str = "linear", **extra: Any) -> ModelConfig:
    return ModelConfig(name=name, extra=extra)


@pytest.fixture
def models() -> ModelRegistry:
    models = ModelRegistry()
    models.register("linear", linear)
    return models


def test_a_factory_gets_the_section_and_its_extra_keys(models: ModelRegistry) -> None:
    model = models.build(section(width=5))
    assert isinstance(model, nn.Linear)
    assert (model.in_features, model.out_features) == (5, ModelConfig().vocab_size)


def test_registering_works_as_a_call_and_as_a_decorator(models: ModelRegistry) -> None:
    @models.register("decorated")
    def decorated(config: ModelConfig) -> nn.Module:
        return nn.Identity()

    assert models.register("called", decorated) is decorated
    assert models.names() == ["called", "decorated", "linear"]
    assert "called" in models
    assert "other" not in models
    assert isinstance(models.build(section("decorated")), nn.Identity)


def test_a_class_of_modules_is_a_factory(models: ModelRegistry) -> None:
    @models.register("mine")
    class Mine(nn.Module):
        def __init__(self, config: ModelConfig, scale: float = 1.0) -> None:
            super().__init__()
            self.scale = scale

    model = models.build(section("mine", scale=3.0))
    assert isinstance(model, Mine)
    assert model.scale == 3.0


def test_a_name_is_taken_once(models: ModelRegistry) -> None:
    def other(config: ModelConfig) -> nn.Module:
        return nn.Identity()

    with pytest.raises(ConfigError, match=r"'linear' is already registered, as .*:linear; .*replace=True"):
        models.register("linear", other)
    models.register("linear", other, replace=True)
    assert isinstance(models.build(section()), nn.Identity)


def test_a_reloaded_plugin_may_register_its_function_again(models: ModelRegistry) -> None:
    again = types.FunctionType(linear.__code__, globals(), "linear", None, linear.__closure__)
    again.__module__ = linear.__module__
    again.__kwdefaults__ = {"width": 7}
    models.register("linear", again)
    model = models.build(section())
    assert isinstance(model, nn.Linear)
    assert model.in_features == 7


def test_two_nameless_functions_are_not_the_same(models: ModelRegistry) -> None:
    models.register("nameless", lambda config: nn.Identity())
    with pytest.raises(ConfigError, match="already registered"):
        models.register("nameless", lambda config: nn.Linear(1, 1))


def test_a_factory_that_cannot_be_called_is_a_type_error(models: ModelRegistry) -> None:
    with pytest.raises(TypeError, match="'three' must be callable, not int"):
        models.register("three", 3)  # type: ignore[type-var]


def test_an_unknown_name_lists_the_known_ones_the_nearest_and_the_way_in(models: ModelRegistry) -> None:
    with pytest.raises(ConfigError, match="'linaer'; did you mean 'linear'.*Known: linear.*plugins:"):
        models.build(section("linaer"))


def test_what_is_no_module_is_refused(models: ModelRegistry) -> None:
    models.register("text", lambda config: "model")
    with pytest.raises(ConfigError, match="'text' returned str"):
        models.build(section("text"))


def test_a_factory_that_takes_the_section_alone_reads_extra_itself(models: ModelRegistry) -> None:
    models.register("own-reader", lambda config: nn.Linear(config.extra["width"], 1))
    model = models.build(section("own-reader", width=5))
    assert isinstance(model, nn.Linear)
    assert model.in_features == 5


def test_extra_keys_that_the_factory_does_not_take_are_named(models: ModelRegistry) -> None:
    with pytest.raises(ConfigError, match=r"unexpected keyword argument 'depth'.*model\.extra\.depth"):
        models.build(section(depth=3))


def test_a_required_extra_key_that_is_missing_is_named(models: ModelRegistry) -> None:
    def needs_width(config: ModelConfig, *, width: int) -> nn.Module:
        return nn.Linear(width, width)

    models.register("needs_width", needs_width)
    with pytest.raises(ConfigError, match="missing a required.*'width'"):
        models.build(section("needs_width"))


def test_an_error_inside_a_factory_passes_through(models: ModelRegistry) -> None:
    def broken(config: ModelConfig) -> nn.Module:
        raise TypeError("inside")

    models.register("broken", broken)
    with pytest.raises(TypeError, match="^inside$"):
        models.build(section("broken"))


def test_a_factory_given_as_text_is_imported_when_it_is_needed(models: ModelRegistry) -> None:
    models.register("gone", "no_such_module_anywhere:build")
    models.register("nameless", "speedtronic.model:no_such_attribute")
    models.register("reference", "speedtronic.model:build_reference_transformer")
    assert isinstance(models.build(section("reference")), ReferenceTransformer)
    for name in ("gone", "nameless"):
        with pytest.raises(ConfigError, match=f"model '{name}' is registered as .* cannot be loaded"):
            models.build(section(name))


@pytest.mark.parametrize("name", ["reference_transformer", "gpt"])
def test_the_reference_model_has_two_names(name: str) -> None:
    config = SpeedtronicConfig.from_dict({"model": {"name": name, "n_layer": 1, "d_model": 16, "n_head": 2}})
    from_config, from_section = build_model(config), build_model(config.model)
    for model in (from_config, from_section):
        assert isinstance(model, ReferenceTransformer)
        assert model.config.n_layer == 1


def test_the_reference_model_refuses_extra_keys() -> None:
    with pytest.raises(ConfigError, match=r"model\.extra\.experts"):
        build_model(section("gpt", experts=8))


def test_register_model_fills_the_global_registry() -> None:
    try:
        register_model("of_a_test")(linear)
        assert isinstance(build_model(section("of_a_test")), nn.Linear)
    finally:
        registry._factories.pop("of_a_test", None)
