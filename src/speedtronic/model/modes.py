"""Training and evaluation mode of a model whose user may have chosen the modes of its parts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from torch import nn

from speedtronic.model.wrappers import innermost


class PartsSetApart:
    """The parts of a model that its user put in evaluation mode while the model itself is in training mode.

    Such as a frozen backbone, whose batch norms keep their statistics and whose dropout is off. They stay in evaluation
    mode when the model is trained, and also when the whole model was in evaluation mode in between. A model that was
    never seen otherwise than in evaluation mode, as some libraries load theirs, has no part set apart.

    Args:
        model: the module, also inside one that torch wrapped around it.
        inform: is told which parts stay in evaluation mode.
        warn: is told it instead where that may not be meant.
    """

    def __init__(self, model: nn.Module, *, inform: Callable[[str], None], warn: Callable[[str], None]) -> None:
        self._model = model
        self._inform = inform
        self._warn = warn
        self._apart: dict[str, nn.Module] = {}
        self._told: str | None = None
        self._look()

    def train(self) -> None:
        """Put the model in training mode, by its own `train()`, and keep in evaluation mode what is set apart."""
        in_training = self._look()
        self._model.train()
        for module in self._apart.values():
            module.training = False
        if self._apart:
            # Parts with weights that are trained may be so because a library loaded them like that.
            trained = any(p.requires_grad for module in self._apart.values() for p in module.parameters(recurse=False))
            self._tell(
                f"in evaluation mode while the rest is trained: {_outermost(self._apart)}"
                + ("; if that is not meant, call train() on the model first" if trained else ""),
                self._warn if trained else self._inform,
            )
        elif in_training:
            self._tell(
                f"the model is in evaluation mode except for {_outermost(in_training)}, and is trained as a whole; to "
                "keep parts in evaluation mode, call train() on the model, and then eval() on those parts",
                self._warn,
            )

    def _look(self) -> set[str]:
        """See which parts are set apart; of a model in evaluation mode, return the parts in training mode instead."""
        modules = dict(innermost(self._model).named_modules())
        if modules[""].training:
            self._apart = {name: module for name, module in modules.items() if not module.training}
            return set()
        return {name for name, module in modules.items() if module.training}

    def _tell(self, message: str, tell: Callable[[str], None]) -> None:
        if message != self._told:
            self._told = message
            tell(message)


def _outermost(names: Iterable[str]) -> str:
    """The names that are not inside another one of them, as text."""
    given = set(names)
    outer = sorted(name for name in given if not any(name.startswith(f"{other}.") for other in given))
    return ", ".join(outer[:4]) + (f" and {len(outer) - 4} more parts" if len(outer) > 4 else "")


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put every module of the model in evaluation mode, and afterwards each back in its former mode.

    `model.train()` alone would also switch modules to training that were in evaluation mode on purpose, such as a
    frozen batch norm.
    """
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
