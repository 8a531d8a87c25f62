"""Turns the numbers of finished updates into metric records and events."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from speedtronic.metrics import MetricLogger
from speedtronic.trainer.readback import Numbers
from speedtronic.trainer.result import MetricRecords, TrainResult, finite_or_none
from speedtronic.trainer.throughput import DeviceMeter

# The pace that the time left is computed from forgets a step with this factor: it remembers about the last ten.
_MEMORY = 0.9


@dataclass
class Counters:
    """Cumulative samples and tokens of all updates whose numbers have arrived."""

    samples: int = 0
    tokens: int = 0


@dataclass
class _Interval:
    """The updates since the last one that was logged."""

    began: float
    steps: int = 0
    samples: int = 0
    tokens: int = 0
    finite_losses: int = 0
    loss_sum: float = 0.0

    def add(self, numbers: Numbers) -> None:
        self.steps += 1
        self.samples += numbers.update.samples
        self.tokens += numbers.tokens
        # A loss that is not finite has an event of its own, and would hide the others here.
        if math.isfinite(numbers.loss):
            self.finite_losses += 1
            self.loss_sum += numbers.loss

    def begin(self, at: float) -> None:
        """Its rates are those of the steps after `at`. Its loss stays that of all."""
        self.began, self.steps, self.samples, self.tokens = at, 0, 0, 0

    def mean_loss(self) -> float:
        return self.loss_sum / self.finite_losses if self.finite_losses else math.nan


class StepReporter:
    """Keeps the records of one call of `fit`, and emits a `train_step` for each.

    Args:
        logger: where the events go.
        counters: the trainer's cumulative counters; advanced here.
        device: its memory is reported, and how busy it is.
        utilisation: from tokens per second to model FLOP utilisation, or None where the device's peak is unknown.
        target: the step at which this call of `fit` ends.
        every: the logger's cadence. An interval ends with each step that is a multiple of it.
    """

    def __init__(
        self,
        logger: MetricLogger,
        counters: Counters,
        device: torch.device,
        utilisation: Callable[[float], float] | None,
        *,
        target: int,
        every: int,
    ) -> None:
        self.records = MetricRecords()
        self.final_loss: float | None = None
        self.started = time.perf_counter()
        self._logger = logger
        self._counters = counters
        self._meter = DeviceMeter(device, logger.warning)
        self._utilisation = utilisation
        self._target = target
        self._every = every
        # Whether the first step compiles, or loads the kernels of a card.
        self._warms_up = device.type != "cpu"
        self._steps = 0
        self._first = Counters(counters.samples, counters.tokens)
        self._interval = _Interval(self.started)
        self._intervals = 0
        self._pace: float | None = None  # seconds per step, without evaluations
        self._evaluating = 0.0  # seconds so far

    def begin(self, *, compiles: bool) -> None:
        """The loop begins now: what `fit` did to get ready is in no interval.

        A first step that compiles, as one that loads the kernels of a card, is not in the rates of its interval either,
        if other steps follow it there.
        """
        self._warms_up = self._warms_up or compiles
        self._interval.began = time.perf_counter()

    def read_device(self) -> None:
        """Read the figures of the device, which the next reports have: once for all numbers that have arrived."""
        self._meter.read()

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """What happens inside takes no time of the interval. Every update so far has been reported."""
        began = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - began
            self._interval.began += seconds
            self._evaluating += seconds

    def report(self, numbers: Numbers) -> None:
        """Count, keep and emit one finished update."""
        update, interval = numbers.update, self._interval
        self._counters.samples += update.samples
        self._counters.tokens += numbers.tokens
        self._steps += 1
        self.final_loss = finite_or_none(numbers.loss)
        interval.add(numbers)
        # The seed's rates: of this call of `fit`, evaluations included. What a resumed run did before is not in them.
        seconds = max(update.at - self.started, 1e-9)
        recently = max(update.at - interval.began, 1e-9)
        tokens_per_sec = interval.tokens / recently
        record: dict[str, Any] = {
            "step": update.step,
            "loss": numbers.loss,
            "lr": update.lr,
            "steps_per_sec": self._steps / seconds,
            "samples_per_sec": (self._counters.samples - self._first.samples) / seconds,
            "tokens_per_sec": (self._counters.tokens - self._first.tokens) / seconds,
            "samples": self._counters.samples,
            "tokens": self._counters.tokens,
            "micro_batches": update.micro_batches,
            "grad_norm": numbers.grad_norm,
            "lr_applied": update.lr_applied,
            "interval_loss": interval.mean_loss(),
            "interval_steps_per_sec": interval.steps / recently,
            "interval_samples_per_sec": interval.samples / recently,
            "interval_tokens_per_sec": tokens_per_sec,
            **self._meter.figures,
            "eta_s": self._seconds_left(update.step, recently / interval.steps),
        }
        if self._utilisation is not None:
            # Of data without tokens nobody knows it, and that of a compilation says nothing.
            known = tokens_per_sec and not (self._warms_up and self._steps == 1)
            record["mfu"] = self._utilisation(tokens_per_sec) if known else None
        if update.losses:
            record["losses"] = dict(update.losses)
        self.records.append(record)
        if update.step % self._every == 0:
            self._end_interval(recently / interval.steps, update.at)
        elif self._warms_up and self._steps == 1:
            interval.begin(update.at)
        self._logger.emit("train_step", record)

    def _seconds_left(self, step: int, pace: float) -> float:
        """The steps that are left, at the pace of the last ones, and with the evaluations that so many steps had."""
        pace = pace if self._pace is None else self._pace
        return max(0, self._target - step) * (pace + self._evaluating / self._steps)

    def _end_interval(self, pace: float, at: float) -> None:
        self._intervals += 1
        # The first interval may hold a compilation, and kernels that were loaded. So the second one replaces it.
        known = pace if self._pace is None or self._intervals == 2 else self._pace
        self._pace = pace + _MEMORY**self._interval.steps * (known - pace)
        self._interval = _Interval(at)

    def move_to(self, samples: int, tokens: int) -> None:
        """Set the cumulative counters, without counting the difference as work of this call."""
        self._first.samples += samples - self._counters.samples
        self._first.tokens += tokens - self._counters.tokens
        self._counters.samples, self._counters.tokens = samples, tokens

    def end(
        self, step: int, *, eval_loss: float | None, interrupted_by: int | None, save_error: str | None
    ) -> TrainResult:
        """What `fit` came to at its last step, which the event `train_end` says too."""
        result = TrainResult(
            steps=step,
            samples=self._counters.samples,
            tokens=self._counters.tokens,
            final_loss=self.final_loss,
            elapsed_s=time.perf_counter() - self.started,
            metrics=self.records,  # type: ignore[arg-type]  # a list once it is read
            eval_loss=eval_loss,
            interrupted_by=interrupted_by,
            save_error=save_error,
        )
        self._logger.emit(
            "train_end",
            {
                "step": result.steps,
                "samples": result.samples,
                "tokens": result.tokens,
                "final_loss": result.final_loss,
                "eval_loss": result.eval_loss,
                "duration_s": result.elapsed_s,
            },
        )
        return result
