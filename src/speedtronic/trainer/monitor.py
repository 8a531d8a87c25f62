"""What the evaluations of a run come to: their records, which was the best, and when it is time to stop."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from speedtronic.config import EvalConfig
from speedtronic.errors import ConfigError
from speedtronic.metrics import MetricLogger


def emit_evaluation(logger: MetricLogger, step: int | None, numbers: Mapping[str, Any], **more: Any) -> None:
    """Send the events of one evaluation: `eval` for each set, with `more` keys, then `sample` for each text."""
    own = {key: value for key, value in numbers.items() if key not in ("sets", "samples")}
    logger.emit("eval", {"step": step, **own, **more})
    for name, others in numbers.get("sets", {}).items():
        logger.emit("eval", {"step": step, "set": name, **others, **more})
    for sample in numbers.get("samples", ()):
        logger.emit("sample", {"step": step, **sample})


class Monitor:
    """Watches one number of the evaluations (`eval.monitor`), and counts those that did not improve it.

    The evaluations of `eval.every_steps` count, each once. That of the end of a run and those that a callback asks for
    do not: a run that is continued with a later end is to stop where it would have stopped without the earlier one.
    """

    def __init__(self, section: EvalConfig) -> None:
        self._section = section
        self._best: float | None = None
        self._best_step = 0
        self._without = 0  # evaluations since then
        self._counted = 0  # the step of the last one
        self._measured: tuple[int, float] | None = None

    def note(self, step: int, numbers: Mapping[str, Any]) -> bool:
        """Take in an evaluation after `step`, and return whether it counts.

        Raises:
            ConfigError: it has no number of the name that is monitored.
        """
        value = self.value(numbers)
        self._measured = step, value
        every = self._section.every_steps
        if every is None or step % every or step == self._counted:
            return False
        self._counted = step
        if self.improves(value, self._best):
            self._best, self._best_step, self._without = value, step, 0
        else:
            self._without += 1
        return True

    def value(self, numbers: Mapping[str, Any]) -> float:
        """The number of an evaluation that is monitored. Raises as `note` does."""
        of_set, _, name = self._section.monitor.rpartition("/")
        found = numbers if of_set in ("", numbers.get("set")) else numbers.get("sets", {}).get(of_set, {})
        if not isinstance(found.get(name), int | float):
            known = [key for key, value in numbers.items() if isinstance(value, int | float)]
            known += [f"{set_}/{key}" for set_, others in numbers.get("sets", {}).items() for key in others]
            raise ConfigError(
                f"eval.monitor: the evaluation has no number {self._section.monitor!r}; it has {', '.join(known)}. "
                "Perplexity and bits_per_byte are those of language models"
            )
        return float(found[name])

    def improves(self, value: float, best: float | None) -> bool:
        """Whether a value is better than the best so far, by more than `eval.min_delta`. A NaN never is."""
        if best is None:
            return not math.isnan(value)
        gain = best - value if self._section.better == "min" else value - best
        return gain > self._section.min_delta

    @property
    def exhausted(self) -> str | None:
        """Why the run should stop early; None if it should not."""
        patience = self._section.patience
        if patience is None or self._without < patience:
            return None
        best = "was a number" if self._best is None else f"was better than {self._best:.6g}, of step {self._best_step}"
        return (
            f"none of the last {self._without} evaluations {best} (eval.monitor: {self._section.monitor}, "
            f"eval.patience: {patience})"
        )

    def measured_at(self, step: int) -> dict[str, Any] | None:
        """What the checkpoint of a step is compared by: name, mode, value. None where that is `eval_loss`, or nothing
        was measured there."""
        if self._section.monitor == "loss" or self._measured is None or self._measured[0] != step:
            return None
        return {"name": self._section.monitor, "mode": self._section.better, "value": self._measured[1]}

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to stop where this one would."""
        return {
            "name": self._section.monitor,
            "mode": self._section.better,
            "best": self._best,
            "best_step": self._best_step,
            "without_improvement": self._without,
            "counted": self._counted,
        }

    def load_state_dict(self, state: Mapping[str, Any] | None, *, inform: Callable[[str], None]) -> None:
        """Continue from a saved state. That of another number cannot be compared, so the count starts anew."""
        if state is None:
            return
        if (state["name"], state["mode"]) != (self._section.monitor, self._section.better):
            if state["counted"]:
                inform(
                    f"eval.monitor was {state['name']} ({state['mode']}): the best {self._section.monitor} is looked "
                    "for from here on"
                )
            return
        self._best, self._best_step = state["best"], state["best_step"]
        self._without, self._counted = state["without_improvement"], state["counted"]
