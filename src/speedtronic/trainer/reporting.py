"""Turns the numbers of finished updates into metric records and events."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from speedtronic.metrics import MetricLogger
from speedtronic.trainer.readback import Numbers
from speedtronic.trainer.result import MetricRecords, finite_or_none
from speedtronic.trainer.throughput import peak_memory_bytes


@dataclass
class Counters:
    """Cumulative samples and tokens of all updates whose numbers have arrived."""

    samples: int = 0
    tokens: int = 0


class StepReporter:
    """Keeps the records of one call of `fit`, and emits a `train_step` for each.

    Args:
        logger: where the events go.
        counters: the trainer's cumulative counters; advanced here.
        device: its peak memory is reported.
        utilisation: from tokens per second to model FLOP utilisation, or None where the device's peak is unknown.
    """

    def __init__(
        self,
        logger: MetricLogger,
        counters: Counters,
        device: torch.device,
        utilisation: Callable[[float], float] | None,
    ) -> None:
        self.records = MetricRecords()
        self.final_loss: float | None = None
        self.started = time.perf_counter()
        self._logger = logger
        self._counters = counters
        self._device = device
        self._utilisation = utilisation
        self._steps = 0
        self._first = Counters(counters.samples, counters.tokens)

    def report(self, numbers: Numbers) -> None:
        """Count, keep and emit one finished update."""
        update = numbers.update
        self._counters.samples += update.samples
        self._counters.tokens += numbers.tokens
        self._steps += 1
        self.final_loss = finite_or_none(numbers.loss)
        # Rates are of this call of `fit` alone: what a resumed run did before is not in them.
        seconds = max(update.at - self.started, 1e-9)
        tokens_per_sec = (self._counters.tokens - self._first.tokens) / seconds
        record: dict[str, Any] = {
            "step": update.step,
            "loss": numbers.loss,
            "lr": update.lr,
            "steps_per_sec": self._steps / seconds,
            "samples_per_sec": (self._counters.samples - self._first.samples) / seconds,
            "tokens_per_sec": tokens_per_sec,
            "samples": self._counters.samples,
            "tokens": self._counters.tokens,
            "micro_batches": update.micro_batches,
            "grad_norm": numbers.grad_norm,
            "lr_applied": update.lr_applied,
            "peak_memory_bytes": peak_memory_bytes(self._device),
        }
        if self._utilisation is not None:
            # Of data without tokens nobody knows it.
            record["mfu"] = self._utilisation(tokens_per_sec) if tokens_per_sec else None
        self.records.append(record)
        self._logger.emit("train_step", record)

    def move_to(self, samples: int, tokens: int) -> None:
        """Set the cumulative counters, without counting the difference as work of this call."""
        self._first.samples += samples - self._counters.samples
        self._first.tokens += tokens - self._counters.tokens
        self._counters.samples, self._counters.tokens = samples, tokens

    def elapsed(self) -> float:
        """Seconds since `fit` began."""
        return time.perf_counter() - self.started
