"""All that an evaluation of a run does: several sets of data, and texts that the model writes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import nn

from speedtronic.evaluation.held_out import HeldOutLoss, keep_random_state
from speedtronic.model import evaluation_mode
from speedtronic.trainer.loss import LossFunction

Write = Callable[[nn.Module], Iterable[Mapping[str, str]]]
"""Lets a model write, and returns mappings with `prompt` and `text`."""


class Evaluation:
    """An evaluator for `Trainer`: measures a model on each of several sets, and lets it write.

    Args:
        sets: by name, at least one; the first one's loss is the evaluation loss of the run.
        write: lets the model write texts, after it was measured; None where it writes none. Of several ranks, give it
            to rank 0 alone.
    """

    def __init__(self, sets: Mapping[str, HeldOutLoss], write: Write | None = None) -> None:
        self._sets = dict(sets)
        self._write = write

    @property
    def loss_fn(self) -> LossFunction | None:
        """That of the sets; may be set until the first evaluation."""
        return next(iter(self._sets.values())).loss_fn

    @loss_fn.setter
    def loss_fn(self, loss_fn: LossFunction | None) -> None:
        for measure in self._sets.values():
            measure.loss_fn = loss_fn

    def __call__(self, model: nn.Module, should_stop: Callable[[], bool] = lambda: False) -> dict[str, Any] | None:
        """Return the numbers of the first set and its name as `set`; in `sets` those of all others, by name.

        `samples` holds the texts, if there are any. None, if `should_stop` returned true before the end.

        Raises:
            DataError, ModelError, ConfigError: as `HeldOutLoss`; the message names the set.
        """
        found: dict[str, dict[str, Any]] = {}
        for name, measure in self._sets.items():
            try:
                numbers = measure(model, should_stop)
            except Exception as error:  # the model and the data are the user's code; the error is raised on
                error.add_note(f"raised by the evaluation of the set {name}")
                raise
            if numbers is None:
                return None
            found[name] = numbers
        (first, own), *others = found.items()
        result = {"set": first, **own}
        if others:
            result["sets"] = dict(others)
        if self._write is not None and not should_stop():
            with evaluation_mode(model), keep_random_state():
                result["samples"] = [dict(sample) for sample in self._write(model)]
        return result
