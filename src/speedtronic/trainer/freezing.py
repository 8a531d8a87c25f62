"""Parameters that train from, or until, an update (`optimizer.groups`)."""

from __future__ import annotations

from torch import nn

from speedtronic.config import OptimizerConfig
from speedtronic.config.sections import ParameterGroup
from speedtronic.model.wrappers import unwrapped
from speedtronic.optimizers.options import assigned
from speedtronic.trainer.callbacks import Callback, RunView
from speedtronic.trainer.unused import follows_config


class FreezingSchedule(Callback):
    """Freezes parameters before the first and after the last update that trains them.

    What is frozen follows from the global step alone, so a resumed run needs no state for it. The optimizer has all of
    these parameters from the start, and passes over those without a gradient.
    """

    def __init__(self, parameters: dict[nn.Parameter, ParameterGroup]) -> None:
        self._parameters = parameters

    def on_train_start(self, run: RunView) -> None:
        """Freeze what the next update does not train."""
        self._set(run.step)

    def on_step_end(self, run: RunView) -> None:
        """Freeze what the next update does not train."""
        self._set(run.step)

    def on_train_end(self, run: RunView) -> None:
        """Thaw everything, so that the next `fit` finds the weights of its average (`optimizer.ema`) as it began."""
        for parameter in self._parameters:
            parameter.requires_grad_(True)

    def _set(self, step: int) -> None:
        for parameter, group in self._parameters.items():
            trains = group.train_from <= step and (group.train_until is None or step < group.train_until)
            if parameter.requires_grad != trains:
                parameter.requires_grad_(trains)


def freezing_schedule(model: nn.Module, config: OptimizerConfig, optimizer: object) -> list[FreezingSchedule]:
    """The one callback that freezes and thaws parameters as `optimizer.groups` says, or none.

    There is none for an optimizer that was not built from the section: nothing acts on it then.

    Raises:
        ConfigError: one of the groups gets no parameter.
    """
    if not follows_config(optimizer):
        return []
    parameters = {
        parameter: group
        for parameter, group in assigned(unwrapped(model), config.groups).items()
        if parameter.requires_grad and (group.train_from or group.train_until is not None)
    }
    return [FreezingSchedule(parameters)] if parameters else []
