"""Training and evaluation mode of a model whose user may have chosen the modes of its parts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from speedtronic.model.wrappers import innermost


class PartsSetApart:
    """The parts of a model that its user put in evaluation mode while the model itself is in training mode.

    Such as a frozen backbone, whose batch norms keep their statistics and whose dropout is off. They stay in evaluation
    mode when the model is trained, and also when the whole model was in evaluation mode in between. A model that was
    never seen otherwise than in evaluation mode, as some libraries load theirs, has no part set apart.

    A module of `torch.jit.trace` has the mode in which it was traced, whatever is set later. That is told at once.

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
        self._left = self._reached = False
        self._look()
        self._tell_of_traces()

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

    def stay_in_training(self) -> None:
        """Put right what a callback, or an evaluator, has left: a model in evaluation mode, or parts in training mode.

        `train()` on the whole model, as after sampling, also reaches what was set apart. Where weights there are
        trained by now, that is meant.
        """
        if self._model.training:
            if reached := {name: module for name, module in self._apart.items() if module.training}:
                self._put_apart_again(reached)
            return
        self.train()
        if not self._left:
            self._left = True
            self._warn(
                "a callback or an evaluator has left the model in evaluation mode, and it is trained in training mode: "
                "call train() on it after eval()"
            )

    def _put_apart_again(self, reached: dict[str, nn.Module]) -> None:
        unfrozen = [
            part for part in _outer(reached) if any(parameter.requires_grad for parameter in reached[part].parameters())
        ]
        meant = {name for name in reached if any(_is_in(name, part) for part in unfrozen)}
        if meant:
            self._apart = {name: module for name, module in self._apart.items() if name not in meant}
            self._inform(f"in training mode from here on: {_outermost(meant)}")
        not_meant = reached.keys() - meant
        for name in not_meant:
            reached[name].training = False
        if not_meant and not self._reached:
            self._reached = True
            self._warn(
                "a callback or an evaluator has put parts with frozen weights in training mode, and they stay in "
                f"evaluation mode: {_outermost(not_meant)}; train() on the whole model reaches them too"
            )

    def _look(self) -> set[str]:
        """See which parts are set apart; of a model in evaluation mode, return the parts in training mode instead."""
        modules = dict(innermost(self._model).named_modules())
        if modules[""].training:
            self._apart = {name: module for name, module in modules.items() if not module.training}
            return set()
        return {name for name, module in modules.items() if module.training}

    def _tell_of_traces(self) -> None:
        seen: list[str] = []
        for name, module in innermost(self._model).named_modules():
            if not isinstance(module, torch.jit.ScriptModule) or any(name.startswith(outer) for outer in seen):
                continue
            seen.append(f"{name}." if name else "")
            what = name or "the model"
            if operations := _fixed_modes(module, training=True):
                self._warn(
                    f"{what} was traced in training mode and keeps it ({operations}), so that an evaluation measures "
                    "the loss of training mode; use the module itself, or torch.jit.script, which has both modes"
                )
            if operations := _fixed_modes(module, training=False):
                trained = any(p.requires_grad for p in module.parameters())
                (self._warn if trained else self._inform)(
                    f"{what} was traced in evaluation mode and keeps it ({operations}) while the rest is trained"
                    + ("; if that is not meant, use the module itself, or torch.jit.script" if trained else "")
                )

    def _tell(self, message: str, tell: Callable[[str], None]) -> None:
        if message != self._told:
            self._told = message
            tell(message)


def _outermost(names: Iterable[str]) -> str:
    """The names that are not inside another one of them, as text."""
    outer = _outer(names)
    return ", ".join(outer[:4]) + (f" and {len(outer) - 4} more parts" if len(outer) > 4 else "")


def _outer(names: Iterable[str]) -> list[str]:
    given = set(names)
    return sorted(name for name in given if not any(name.startswith(f"{other}.") for other in given))


def _is_in(name: str, part: str) -> bool:
    return name == part or name.startswith(f"{part}.")


def _fixed_modes(module: Any, *, training: bool) -> str:
    """The kinds of operations in a scripted or traced module that are in this mode for good, as text."""
    try:
        graph = module.inlined_graph
    except (AttributeError, RuntimeError):  # no forward of its own
        return ""
    return ", ".join(sorted({name for name, fixed in _modes_in(graph) if fixed is training}))


def _modes_in(block: Any) -> Iterator[tuple[str, bool]]:
    """Each operation that acts differently in training, and its mode where that is a constant in the graph."""
    for node in block.nodes():
        for inner in node.blocks():
            yield from _modes_in(inner)
        if "train" not in node.schema():
            continue
        arguments = zip(torch._C.parse_schema(node.schema()).arguments, node.inputs(), strict=True)
        values = {argument.name: value for argument, value in arguments}
        # Without dropout, and without running statistics, an operation acts alike in both modes.
        constants = {name: value.toIValue() for name, value in values.items()}
        no_statistics = "running_mean" in values and values["running_mean"].type().kind() == "NoneType"
        if 0.0 in (constants.get("p"), constants.get("dropout")) or no_statistics:
            continue
        for name in ("train", "training"):
            if isinstance(mode := constants.get(name), bool):
                yield node.kind().removeprefix("aten::"), mode


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
