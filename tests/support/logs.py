"""Logs of runs as the JSON-lines sink writes them, made by hand."""

from __future__ import annotations

import math
import random
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from speedtronic.metrics.jsonl import encode_line
from speedtronic.metrics.records import INFO, Record

_BEGAN = datetime(2030, 1, 1, tzinfo=UTC)


class LogWriter:
    """Appends to the `metrics.jsonl` of a folder; each line is a second after the one before."""

    def __init__(self, folder: Path, run_id: str = "a" * 32) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.file = folder / "metrics.jsonl"
        self._run_id = run_id
        self._elapsed = 0.0

    def write(self, event: str, **payload: Any) -> None:
        self._elapsed += 1
        time = _BEGAN + timedelta(seconds=self._elapsed)
        with self.file.open("a", encoding="ascii") as file:
            file.write(encode_line(Record(event, INFO, payload, self._elapsed, time, self._run_id)) + "\n")

    def start(self, step: int, target: int = 1000) -> None:
        self.write(
            "train_start",
            step=step,
            target_steps=target,
            device="cpu",
            precision="fp32",
            parameters=4208,
            micro_batches=1,
        )

    def step(self, step: int, loss: float = 1.0, **more: Any) -> None:
        self.write("train_step", step=step, loss=loss, **more)

    def new_process(self) -> None:
        """The clock begins anew."""
        self._elapsed = 0.0


def write_long_log(folder: Path, steps: int, spikes: dict[int, float]) -> None:
    """A run of many steps with all the keys that the trainer writes.

    Args:
        folder: of the run.
        steps: how many; each has a line.
        spikes: the loss of single steps.
    """
    log = LogWriter(folder)
    log.start(0, target=steps)
    noise = random.Random(0)
    with log.file.open("a", encoding="ascii") as file:
        for step in range(1, steps + 1):
            share = step / steps
            loss = spikes.get(step, 1.5 + 9 * math.exp(-6 * share) + 0.1 * noise.random())
            rate = 900 + 100 * noise.random()
            lr = 3e-4 * (1 - share)
            file.write(
                f'{{"event":"train_step","step":{step},"loss":{loss!r},"lr":{lr!r},"steps_per_sec":{rate!r},'
                f'"samples_per_sec":{rate * 32!r},"tokens_per_sec":{rate * 4096!r},"samples":{step * 32},'
                f'"tokens":{step * 4096},"micro_batches":1,"grad_norm":{1 + noise.random()!r},"lr_applied":{lr!r},'
                f'"interval_loss":{loss!r},"interval_steps_per_sec":{rate!r},"interval_samples_per_sec":{rate * 32!r},'
                f'"interval_tokens_per_sec":{rate * 4096!r},"peak_memory_bytes":693551104,"eta_s":{steps / rate!r},'
                f'"elapsed_s":{1 + step / 1000:.6f},"time":"2030-01-01T00:00:02.000+00:00","run_id":"{"a" * 32}"}}\n'
            )
