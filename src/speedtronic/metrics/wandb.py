"""Weights & Biases, through the `wandb` package. Its environment variables apply, `WANDB_MODE=offline` among them."""

from __future__ import annotations

import os
from typing import Any

from speedtronic.metrics.trackers import Point, TrackedRun, TrackerHook, import_tracker, require_tracker

# Seconds that a run may take to finish without a network, at the end of the process too. What is left then lies in the
# run's folder, and `wandb sync` sends it.
_FINISH_TIMEOUT = 10.0


def open_wandb(run: TrackedRun) -> WandbTracker:
    """The run in the project of `WANDB_PROJECT`, or else in `speedtronic`. A resumed run is the same run there."""
    return WandbTracker(
        project=os.environ.get("WANDB_PROJECT", "speedtronic"),
        name=run.name,
        id=run.run_id,
        dir=str(run.folder),
        config=dict(run.config),
        resume="allow",
    )


class WandbTracker:
    """One run of `wandb.init(**settings)`.

    Raises:
        RuntimeError: nobody is logged in.
    """

    def __init__(self, **settings: Any) -> None:
        wandb = import_tracker("wandb")
        mode = settings.get("mode") or wandb.setup().settings.mode
        # By itself, wandb would ask for a key on the terminal, and wait for the answer.
        if mode == "online" and not wandb.login(prompt=False, verify=False):
            raise RuntimeError(
                "no key for Weights & Biases; run `wandb login`, set WANDB_API_KEY, or set WANDB_MODE=offline"
            )
        quiet = wandb.Settings(console="off", silent=True, finish_timeout=_FINISH_TIMEOUT)
        if (folder := settings.get("dir")) is not None:
            os.makedirs(folder, exist_ok=True)
        # A run of its own beside one that the user's code has started.
        self._run = wandb.init(**{"settings": quiet, "reinit": "create_new", **settings})

    def log(self, point: Point) -> None:
        self._run.log(dict(point.numbers), step=point.step)

    def flush(self) -> None:
        """Do nothing: wandb's own process has what was logged, and writes it to the disk."""

    def close(self) -> None:
        self._run.finish()


class WandbHook(TrackerHook):
    """A hook that sends events to Weights & Biases.

    Args:
        project: the project's name.
        settings: further arguments of `wandb.init`, such as `name`, `mode` and `config`.

    Raises:
        MissingExtraError: `wandb` is not installed.
    """

    def __init__(self, project: str | None = None, **settings: Any) -> None:
        require_tracker("wandb")
        super().__init__(lambda: WandbTracker(project=project, **settings))
