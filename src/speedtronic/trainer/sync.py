"""Where a trainer meets whatever keeps its model in step with other machines."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class SyncCoordinator(Protocol):
    """A part that exchanges weights with other machines between two optimizer steps.

    The trainer starts it inside `fit`, tells it of every completed optimizer step, and stops it when `fit` ends,
    also on failure. A coordinator may be started again by a later `fit`.
    """

    def start(self) -> None: ...

    def after_optimizer_step(self, model: Any, step: int) -> bool | None:
        """Called on the training thread after each global step; true asks for a reset of the optimizer state."""

    def stop(self) -> None: ...

    def state_dict(self) -> dict[str, Any] | None: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@runtime_checkable
class PreparesState(Protocol):
    """A coordinator that wants its checkpointed state before it reads anything remote in `start`."""

    def prepare_state(self, state: dict[str, Any]) -> None: ...
