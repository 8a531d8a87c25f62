"""A model with dropout, data with random numbers, and a callback that does something to its own process at a step."""

from __future__ import annotations

import os
import signal

import torch
from torch.utils.data import Dataset

from speedtronic.config import DataConfig
from speedtronic.trainer import Callback, RunView


class Noisy(Dataset[dict[str, torch.Tensor]]):
    """Samples that depend on their index and on the generator, as augmented ones do."""

    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = (torch.arange(9) * (index + 1) + torch.randint(0, 3, (9,))) % 64
        return {"input_ids": ids[:-1], "labels": ids[1:]}


def noisy(config: DataConfig) -> Noisy:
    return Noisy()


class Acting(Callback):
    """`ACT=SIGTERM:1:3` sends the signal to rank 1 after step 3, from itself; a launcher's second attempt is spared."""

    def on_step_end(self, run: RunView) -> None:
        what, rank, step = (os.environ.get("ACT") or "::").split(":")
        if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
            return
        if what and (rank, step) == (os.environ.get("RANK"), str(run.step)):
            os.kill(os.getpid(), signal.Signals[what])


def acting() -> Acting:
    return Acting()
