"""The trainer's side of checkpoints: when one is due, and what a failed save means."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import Any

from speedtronic.checkpoint import CheckpointManager
from speedtronic.errors import CheckpointError
from speedtronic.metrics import MetricLogger
from speedtronic.ranks import Group, SingleProcess


class CheckpointSaver:
    """Saves checkpoints, and reports each finished or failed save as a `checkpoint` event.

    A failed save never ends the run: the older checkpoints stay, and the next one is tried when it is due. With several
    ranks, rank 0 decides and writes; the others call the same methods, and write nothing.

    Attributes:
        error: why the last save failed, if it did.
        finished: the checkpoints that have become durable, oldest first. Who reads them takes them out.
        due_at: with several ranks, the step for which rank 0 has said that a checkpoint is due.

    Args:
        manager: writes the checkpoints; None on a rank that writes none.
        logger: where the events go.
        background: write a snapshot while training continues; otherwise the loop waits for the disk.
        group: the ranks that are saved together.
    """

    def __init__(
        self,
        manager: CheckpointManager | None,
        logger: MetricLogger,
        *,
        background: bool,
        group: Group | None = None,
    ) -> None:
        self.error: str | None = None
        self.finished: list[Path] = []
        self._manager = manager
        self._logger = logger
        self._background = background
        self._group = group or SingleProcess()
        self.due_at: int | None = None
        self._step: int | None = None
        self._writing: Future[Path] | None = None

    def due(self, step: int) -> bool:
        """Whether the cadence asks for a checkpoint after `step`."""
        return self.due_at == step if self._group.size > 1 else self.wants(step)

    def wants(self, step: int) -> bool:
        """Whether the cadence of this rank's manager asks for a checkpoint after `step`."""
        return self._manager is not None and self._manager.should_save(step)

    def holds(self, step: int) -> bool:
        """Whether the last save was of `step` and has not failed."""
        # Only rank 0 knows of a failure.
        return self._group.broadcast(self._step == step and self.error is None)

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Save `state`, after the write before it has ended."""
        self.wait()
        self._step, self.error = step, None
        if self._manager is None:
            return
        try:
            if self._background:
                self._writing = self._manager.save_async(step, state)
            else:
                self._saved(self._manager.save(step, state))
        except (OSError, CheckpointError) as error:
            self._failed(error)

    def poll(self) -> None:
        """Report a write that has ended since the last look."""
        if self._writing is not None and self._writing.done():
            self.wait()

    def wait(self) -> None:
        """Wait for the current write, and report how it ended."""
        if self._writing is None:
            return
        writing, self._writing = self._writing, None
        assert self._manager is not None, "it writes"
        try:
            self._manager.wait()
        except (OSError, CheckpointError) as error:
            self._failed(error)
        else:
            self._saved(writing.result())

    def close(self) -> None:
        """Wait, then end the background thread of the manager."""
        self.wait()
        if self._manager is not None:
            self._manager.close()

    def _saved(self, path: Path) -> None:
        self._logger.emit("checkpoint", {"step": self._step, "path": str(path)})
        self.finished.append(path)

    def _failed(self, error: Exception) -> None:
        self.error = str(error)
        self._logger.emit("checkpoint", {"step": self._step, "path": None, "error": self.error})
        self._logger.warning(
            f"the checkpoint of step {self._step} could not be written ({error}); the older ones stay, and training "
            "continues"
        )
