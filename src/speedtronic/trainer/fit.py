"""What one call of `Trainer.fit` works with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from speedtronic.trainer.between_steps import BetweenSteps
from speedtronic.trainer.readback import Readback
from speedtronic.trainer.reporting import StepReporter
from speedtronic.trainer.saving import CheckpointSaver
from speedtronic.trainer.signals import SignalWatch
from speedtronic.trainer.step import Updater
from speedtronic.trainer.sync import FullCoordinator


@dataclass
class Fit:
    """The parts of one call of `fit`, and whether it goes on.

    Attributes:
        first_step: the global step at which it began.
        target: the global step at which it ends.
        show_step: the logger's, called after each step; it does nothing if the logger has none.
        log_last_step: the logger's, called after the last step; it does nothing if the logger has none.
    """

    first_step: int
    target: int
    updater: Updater
    readback: Readback
    reporter: StepReporter
    saver: CheckpointSaver | None
    coordinator: FullCoordinator | None
    signals: SignalWatch
    between: BetweenSteps
    show_step: Callable[[int], object]
    log_last_step: Callable[[], object]

    def wants_more(self, step: int) -> bool:
        """Whether a step follows the global step `step`: no target reached, no signal, and no callback's `stop`."""
        return step < self.target and self.signals.received is None and not self.between.view.stopping
