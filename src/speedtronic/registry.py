"""Model names that a config may use, and the factories behind them."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeVar, cast, overload
from weakref import WeakSet

from torch import nn

from speedtronic.config import SpeedtronicConfig
from speedtronic.config.checks import unknown_model
from speedtronic.errors import ConfigError

if TYPE_CHECKING:
    from speedtronic.config import ModelConfig

ModelFactory = Callable[..., nn.Module]
"""Called as `factory(model_config, **model_config.extra)`, or as `factory(model_config)` if it has one parameter
and so reads `extra` itself. A subclass of `nn.Module` is a factory too."""

FactoryT = TypeVar("FactoryT", bound=ModelFactory | str)


BUILT_BY_NAME: WeakSet[nn.Module] = WeakSet()
"""The models that factories have built for `model.name` of a configuration."""


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
            if not callable(added) and not isinstance(added, str):
                raise TypeError(f"the factory of model {name!r} must be callable, not {type(added).__name__}")
            present = self._factories.get(name, added)
            if not replace and not _same(present, added):
                raise ConfigError(
                    f"model name {name!r} is already registered, as {_describe(present)}; "
                    "choose another name, or register with replace=True"
                )
            self._factories[name] = added
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
                or it did not return an `nn.Module`. What a factory itself raises passes through.
        """
        name = config.name
        if name not in self._factories:
            raise ConfigError(unknown_model(name, self._factories))
        factory = self._factories[name]
        if isinstance(factory, str):
            factory = _load(name, factory)
        model: object = factory(config, **_extra_arguments(config, factory))
        if not isinstance(model, nn.Module):
            raise ConfigError(f"model.name: the factory of {name!r} returned {type(model).__name__}, not an nn.Module")
        BUILT_BY_NAME.add(model)
        return model


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


def import_factory(name: str, *, key: str) -> Callable[..., Any]:
    """What a configuration names as `package.module:function`.

    Args:
        name: of the function, class or other callable.
        key: of the configuration, for errors.

    Raises:
        ConfigError: there is no such module, or nothing in it that has the name and can be called.
    """
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise ConfigError(f"{key}: {name!r} must name a factory as package.module:function")
    try:
        found = importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(f"{key}: cannot import {module!r}: {error}") from error
    try:
        factory = attrgetter(attribute)(found)
    except AttributeError as error:
        own = [
            public
            for public, value in vars(found).items()
            if not public.startswith("_") and callable(value) and getattr(value, "__module__", None) == found.__name__
        ]
        remedy = f"name one of its own: {', '.join(own)}" if own else "define it there"
        raise ConfigError(f"{key}: the module {module!r} has no {attribute!r}; {remedy}") from error
    if not callable(factory):
        raise ConfigError(f"{key}: {name} must be a function, not {type(factory).__name__}")
    return cast(Callable[..., Any], factory)


def call_factory(name: str, first: Any, *, key: str, args: Mapping[str, Any]) -> Any:
    """What a factory of a configuration returns for one object and keyword arguments. What it raises is passed on.

    Raises:
        ConfigError: as `import_factory`; or it does not take these arguments.
    """
    factory = import_factory(name, key=key)
    try:
        inspect.signature(factory).bind(first, **args)
    except TypeError as error:
        raise ConfigError(f"{key}: {name} takes {inspect.signature(factory)}: {error}") from None
    except ValueError:  # some callables written in C have no signature
        pass
    return factory(first, **args)


def _load(name: str, reference: str) -> ModelFactory:
    module_name, _, attribute = reference.partition(":")
    try:
        return cast(ModelFactory, getattr(importlib.import_module(module_name), attribute))
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"model {name!r} is registered as {reference!r}, which cannot be loaded: {error}") from error


def _same(first: ModelFactory | str, second: ModelFactory | str) -> bool:
    if first is second or first == second:
        return True
    # A reloaded module defines its functions again under the same names. A lambda or a local has `<` in its name,
    # which does not identify it.
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
registry.register("hf", "speedtronic.model.hugging_face:build_hugging_face_model")

register_model = registry.register


def build_model(config: ModelConfig | SpeedtronicConfig) -> nn.Module:
    """Build the model of a config, or of its `model` section; raises as `ModelRegistry.build`."""
    return registry.build(config.model if isinstance(config, SpeedtronicConfig) else config)
