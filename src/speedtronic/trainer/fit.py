"""What one call of `Trainer.fit` works with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from speedtronic.ranks import Group
from speedtronic.trainer.between_steps import BetweenSteps
from speedtronic.trainer.exchange import Totals, exchange
from speedtronic.trainer.readback import Readback
from speedtronic.trainer.reporting import StepReporter
from speedtronic.trainer.saving import CheckpointSaver
from speedtronic.trainer.signals import SignalWatch
from speedtronic.trainer.state import Run
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

    def announce(self, run: Run, micro_batches: int) -> None:
        """Say that training starts."""
        run.logger.emit(
            "train_start",
            {
                "step": run.step,
                "target_steps": self.target,
                "device": str(run.device),
                "precision": run.precision.mode,
                "parameters": sum(p.numel() for p in run.model.parameters()),
                "micro_batches": micro_batches,
            },
        )

    def exchange(
        self, group: Group, step: int, batches: Sequence[Any], sizes: Sequence[tuple[int, int | Tensor]]
    ) -> Callable[[], Totals]:
        """Tell the other ranks of this one's part of the update that makes `step`; return what waits for the totals.

        Args:
            group: all ranks.
            step: the global step after the update.
            batches: the micro batches of this rank.
            sizes: samples and tokens of each.
        """
        own = Totals(
            step=step,
            weight=self.updater.weight_of(batches) if group.size > 1 else 0,
            samples=sum(samples for samples, _ in sizes),
            tokens=sum(tokens for _, tokens in sizes),
            signal=self.signals.noted,
            save_due=self.saver is not None and self.saver.wants(step),
        )
        return exchange(group, own)

    def act_on(self, totals: Totals) -> None:
        """Let all ranks end, and save, after the same step."""
        self.signals.agreed = totals.signal
        if self.saver is not None:
            self.saver.due_at = totals.step if totals.save_due else None

    def wants_more(self, step: int) -> bool:
        """Whether a step follows the global step `step`: no target reached, no signal, and no callback's `stop`."""
        return step < self.target and self.signals.received is None and not self.between.view.stopping
