"""Several optimizers by name, such as those of a generator and a discriminator."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Mapping
from typing import Any

import torch


class OptimizerSet(torch.optim.Optimizer):
    """Optimizers of different parts of a model, as one: for what clears gradients, saves, and looks at groups.

    Each makes its own steps. `param_groups` are the groups of all, in their order.

    Args:
        optimizers: by name.
    """

    def __init__(self, optimizers: Mapping[str, torch.optim.Optimizer]) -> None:
        # `Optimizer.__init__` would make its own groups and state. `__setstate__`, meant for copies, makes hooks only.
        super().__setstate__({"optimizers": dict(optimizers)})

    optimizers: dict[str, torch.optim.Optimizer]

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]  # torch declares an attribute
        """The param groups of all."""
        return [group for optimizer in self.optimizers.values() for group in optimizer.param_groups]

    @property
    def state(self) -> Any:  # type: ignore[override]  # torch declares an attribute
        """The state of each parameter, wherever it is kept."""
        return _States(*(optimizer.state for optimizer in self.optimizers.values()))

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]  # torch declares an attribute
        """None are shared."""
        return {}

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Refuse: which of them steps is decided by a `training_step`."""
        raise RuntimeError("several optimizers do not step together; step one of .optimizers")

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of all."""
        for optimizer in self.optimizers.values():
            optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """The state of each, by name."""
        return {"optimizers": {name: optimizer.state_dict() for name, optimizer in self.optimizers.items()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned. KeyError: it lacks one of them."""
        for name, optimizer in self.optimizers.items():
            optimizer.load_state_dict(state_dict["optimizers"][name])

    def __getstate__(self) -> dict[str, Any]:
        return {"optimizers": self.optimizers}


class _States(ChainMap[Any, Any]):
    """The states of several optimizers as one mapping, which can be cleared as a whole."""

    def clear(self) -> None:
        for state in self.maps:
            state.clear()
