"""Model names that a config may use, and the factories behind them."""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, cast, overload

from torch import nn

from speedtronic.config import SpeedtronicConfig
from speedtronic.errors import ConfigError

if TYPE_CHECKING:
    from speedtronic.config import ModelConfig

ModelFactory = Callable[..., nn.Module]
"""Called as `factory(model_config, **model_config.extra)`, or as `factory(model_config)` where it takes nothing else
and so reads `extra` itself. A class of modules is a factory too."""

FactoryT = TypeVar("FactoryT", bound=ModelFactory | str)


class ModelRegistry:
    """Factories of models by name.

        @registry.register("tiny_mlp")
        def tiny_mlp(config: ModelConfig, *, activation: str = "relu") -> nn.Module: ...

    A factory may also be given as `"package.module:attribute"`, which is imported when the model is first
    built.
    """

    def __init__(self) -> None:
        self._factories: dict[str, ModelFactory | str] = {}

    @overload
    def register(self, name: str, factory: None = None, *, replace: bool = False) -> Callable[[FactoryT], FactoryT]: ...

    @overload
    def register(self, name: str, factory: FactoryT, *, replace: bool = False) -> FactoryT: ...

    def register(self, name: str, factory: Any = None, *, replace: bool = False) -> Any:
        """Put a factory under a name, as a call or as a decorator; returns the factory.

        Registering the same function again, by module and qualified name, is allowed: a plugin may be
        reloaded.

        Raises:
            ConfigError: the name is taken by another factory and `replace` is false.
            TypeError: the factory is neither a callable nor a string.
        """

        def add(added: FactoryT) -> FactoryT:
            self._add(name, added, replace)
            return added

        return add if factory is None else add(factory)

    def names(self) -> list[str]:
        """All registered names, sorted."""
        return sorted(self._factories)

    def __contains__(self, name: object) -> bool:
        return name in self._factories

    def build(self, config: ModelConfig) -> nn.Module:
        """Build the model that `config.name` stands for.

        Raises:
            ConfigError: the name is unknown, its factory cannot be imported or does not take `model.extra`,
                or it returned no `nn.Module`. What a factory itself raises passes through.
        """
        factory = self._factory(config.name)
        extra = _extra_arguments(config, factory)
        model: object = factory(config, **extra)
        if not isinstance(model, nn.Module):
            raise ConfigError(
                f"model.name: the factory of {config.name!r} returned {type(model).__name__}, no nn.Module"
            )
        return model

    def _add(self, name: str, factory: ModelFactory | str, replace: bool) -> None:
        if not callable(factory) and not isinstance(factory, str):
            raise TypeError(f"the factory of model {name!r} must be callable, not {type(factory).__name__}")
        present = self._factories.get(name, factory)
        if not replace and not _same(present, factory):
            raise ConfigError(
                f"model name {name!r} is already registered, as {_describe(present)}; "
                "choose another name, or register with replace=True"
            )
        self._factories[name] = factory

    def _factory(self, name: str) -> ModelFactory:
        if name not in self._factories:
            raise ConfigError(self._unknown(name))
        factory = self._factories[name]
        return _load(name, factory) if isinstance(factory, str) else factory

    def _unknown(self, name: str) -> str:
        near = difflib.get_close_matches(name, self._factories, n=1)
        suggestion = f"; did you mean {near[0]!r}?" if near else "."
        return (
            f"model.name: no model is registered as {name!r}{suggestion} Known: {', '.join(self.names())}. "
            "A model of your own is registered by importing its module: list that under `plugins:`"
        )


def _extra_arguments(config: ModelConfig, factory: ModelFactory) -> dict[str, Any]:
    """The keywords to call a factory with, checked against its signature."""
    try:
        signature = inspect.signature(factory)
    except ValueError:  # some callables written in C have none
        return config.extra
    if len(signature.parameters) == 1:
        return {}
    try:
        signature.bind(config, **config.extra)
    except TypeError as error:
        given = ", ".join(f"model.extra.{key}" for key in config.extra) or "no model.extra"
        raise ConfigError(
            f"model.extra: {error}: the factory of {config.name!r} takes {signature}, and was given {given}"
        ) from None
    return config.extra


def _load(name: str, reference: str) -> ModelFactory:
    module_name, _, attribute = reference.partition(":")
    try:
        return cast(ModelFactory, getattr(importlib.import_module(module_name), attribute))
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"model {name!r} is registered as {reference!r}, which cannot be loaded: {error}") from error


def _same(first: ModelFactory | str, second: ModelFactory | str) -> bool:
    if first is second or first == second:
        return True
    return _describe(first) == _describe(second) and "<" not in _describe(first)


def _describe(factory: Any) -> str:
    if isinstance(factory, str):
        return factory
    if inspect.isroutine(factory) or inspect.isclass(factory):
        return f"{factory.__module__}:{factory.__qualname__}"
    return repr(factory)


registry = ModelRegistry()
registry.register("reference_transformer", "speedtronic.model:build_reference_transformer")
registry.register("gpt", "speedtronic.model:build_reference_transformer")

register_model = registry.register


def build_model(config: ModelConfig | SpeedtronicConfig) -> nn.Module:
    """Build the model of a config, or of its `model` section; raises as `ModelRegistry.build`."""
    return registry.build(config.model if isinstance(config, SpeedtronicConfig) else config)
