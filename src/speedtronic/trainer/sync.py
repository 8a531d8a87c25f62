"""How the trainer talks to a coordinator, which keeps its model in step with other machines."""

from __future__ import annotations

from typing import Any, Protocol, cast, runtime_checkable

from torch import Tensor

from speedtronic.config import SpeedtronicConfig


@runtime_checkable
class SyncCoordinator(Protocol):
    """A part that exchanges weights with other machines between two optimizer steps.

    The trainer starts it inside `fit`, calls it after every completed optimizer step, and stops it when `fit` ends,
    also after a failure. A later `fit` may start it again. `FullCoordinator` has more calls that a coordinator can
    answer.
    """

    def start(self) -> None: ...

    def after_optimizer_step(self, model: Any, step: int) -> bool | None:
        """Called on the training thread after each global step; true asks for a reset of the optimizer state."""

    def stop(self) -> None: ...

    def state_dict(self) -> dict[str, Any] | None: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class WorkPosition(Protocol):
    """How far a run has come: optimizer steps, and the samples and tokens it was trained on."""

    @property
    def step(self) -> int: ...

    @property
    def samples(self) -> int: ...

    @property
    def tokens(self) -> int: ...


@runtime_checkable
class FullCoordinator(SyncCoordinator, Protocol):
    """Every call that the trainer makes to a coordinator. The calls of this class are optional.

    Inherit from it to get the defaults, which do nothing, or write any of its members into a class of your own: the
    trainer finds them by name.
    """

    @property
    def reset_inner_optimizer(self) -> bool:
        """Whether a true from `after_optimizer_step` asks for a reset; false where it only reports an exchange."""
        return True

    def prepare_state(self, state: dict[str, Any]) -> None:
        """Called before `start` with the state of a checkpoint, so that it is known before anything remote is read."""
        return

    def count(self, samples: int, tokens: int | Tensor) -> None:
        """Called before `after_optimizer_step` with what the step was trained on.

        `tokens` is a 0-dim tensor where it was counted on the device; reading it would wait for the device.
        """
        return

    def continue_at(self) -> WorkPosition | None:
        """Where the trainer should go on, when an earlier session of this run already did the work up to there.

        Called after `start` and after each optimizer step. Each position is returned once.
        """
        return None

    def hand_over(self) -> None:
        """Hand over the last work of a run, before the last checkpoint, which then knows of it.

        Called on the training thread when no step follows, perhaps more than once.
        """
        return


def with_defaults(coordinator: SyncCoordinator, config: SpeedtronicConfig) -> FullCoordinator:
    """The coordinator, with a default for every optional call that it does not have.

    Args:
        coordinator: one with the calls of `SyncCoordinator`, and any of `FullCoordinator`.
        config: `distributed.reset_inner_optimizer` is the default where `distributed` is enabled. Elsewhere a true from
            `after_optimizer_step` always asks for a reset.
    """
    if isinstance(coordinator, FullCoordinator):
        return coordinator
    reset = config.distributed.reset_inner_optimizer or not config.distributed.enabled
    return cast(FullCoordinator, _WithDefaults(coordinator, reset=reset))


def start_with_state(coordinator: FullCoordinator, state: dict[str, Any] | None) -> None:
    """Start the coordinator, and give it the state of a checkpoint where there is one."""
    if state is not None:
        coordinator.prepare_state(state)
    coordinator.start()
    if state is not None:
        coordinator.load_state_dict(state)


class _WithDefaults:
    """Answers with the coordinator's own member where it has one, else with the default of `FullCoordinator`."""

    def __init__(self, coordinator: SyncCoordinator, *, reset: bool) -> None:
        self._coordinator = coordinator
        self._reset = reset

    def __getattr__(self, name: str) -> Any:
        if hasattr(self._coordinator, name):
            return getattr(self._coordinator, name)
        return self._reset if name == "reset_inner_optimizer" else getattr(FullCoordinator, name).__get__(self)
