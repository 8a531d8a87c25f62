"""Where a trainer meets whatever keeps its model in step with other machines."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from torch import Tensor


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


@runtime_checkable
class CountsWork(Protocol):
    """A coordinator that wants to know what a step was trained on, before it hears of the step."""

    def count(self, samples: int, tokens: int | Tensor) -> None:
        """`tokens` is a 0-dim tensor where it was counted on the device; reading it would wait for the device."""


class WorkPosition(Protocol):
    """How far a run has come: optimizer steps, and the samples and tokens trained on."""

    @property
    def step(self) -> int: ...

    @property
    def samples(self) -> int: ...

    @property
    def tokens(self) -> int: ...


@runtime_checkable
class MovesOn(Protocol):
    """A coordinator that may know that work which lies ahead was done already, in a life of this run now forgotten."""

    def continue_at(self) -> WorkPosition | None:
        """Where the trainer should go on; said once. Asked after `start` and after each optimizer step."""


@runtime_checkable
class DecidesOnReset(Protocol):
    """A coordinator whose true after a step tells of an exchange, and asks for a reset only where this says so."""

    @property
    def reset_inner_optimizer(self) -> bool: ...


@runtime_checkable
class HandsOver(Protocol):
    """A coordinator that hands over the last work of a run before the last checkpoint, which then knows of it."""

    def hand_over(self) -> None:
        """Called on the training thread when no step is to follow, perhaps more than once."""
