"""A coordinator for several ranks: rank 0 talks to other machines, and the ranks share what arrives."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from speedtronic.config import SpeedtronicConfig
from speedtronic.ranks import Group, share_weights
from speedtronic.trainer.sync import FullCoordinator, SyncCoordinator, WorkPosition, with_defaults


class _Position(NamedTuple):
    step: int
    samples: int
    tokens: int


def share_coordinator(
    coordinator: SyncCoordinator | None, group: Group, model: nn.Module, config: SpeedtronicConfig
) -> SyncCoordinator | None:
    """The coordinator of rank 0 as one for all ranks; None where rank 0 has none."""
    if group.size == 1 or isinstance(coordinator, GroupCoordinator):
        return coordinator
    if not group.broadcast(coordinator is not None):
        return None
    leader = coordinator if group.rank == 0 else None
    return GroupCoordinator(group, model, with_defaults(leader, config) if leader is not None else None)


class GroupCoordinator(FullCoordinator):
    """Every rank calls this, and the coordinator of rank 0 does the work.

    Whenever it has exchanged something, the ranks get the weights of rank 0, between the same two steps.

    Args:
        group: the ranks.
        model: the module that is trained.
        leader: the coordinator, on rank 0; None on the others.
    """

    def __init__(self, group: Group, model: nn.Module, leader: FullCoordinator | None) -> None:
        self._group = group
        self._model = model
        self._leader = leader
        self._resets = False

    @property
    def reset_inner_optimizer(self) -> bool:
        """Of the last exchange, which all ranks know."""
        return self._resets

    def prepare_state(self, state: dict[str, Any]) -> None:
        if self._leader is not None:
            self._leader.prepare_state(state)

    def start(self) -> None:
        if self._leader is not None:
            self._leader.start()
        # The leader may have begun with newer weights than the others have.
        share_weights(self._model, self._group)

    def after_optimizer_step(self, model: Any, step: int) -> bool:
        exchanged = False
        if self._leader is not None:
            exchanged = bool(self._leader.after_optimizer_step(model, step))
            self._resets = self._leader.reset_inner_optimizer
        answer = torch.tensor([exchanged, exchanged and self._resets], dtype=torch.int32)
        exchanged, self._resets = map(bool, self._group.reduce(answer, "max").tolist())
        if exchanged:
            share_weights(self._model, self._group)
        return exchanged

    def count(self, samples: int, tokens: int | Tensor) -> None:
        if self._leader is not None:
            self._leader.count(samples, tokens)

    def continue_at(self) -> WorkPosition | None:
        found = self._leader.continue_at() if self._leader is not None else None
        position = self._group.broadcast(None if found is None else [found.step, found.samples, found.tokens])
        return None if position is None else _Position(*position)

    def hand_over(self) -> None:
        if self._leader is not None:
            self._leader.hand_over()

    def stop(self) -> None:
        # A rank that has gone may have left an update half done, which must not reach other machines. It is as if this
        # rank had gone too, which a leader must survive.
        if self._leader is not None and not self._group.lost:
            self._leader.stop()

    def state_dict(self) -> dict[str, Any] | None:
        return self._leader.state_dict() if self._leader is not None else None

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._leader is not None:
            self._leader.load_state_dict(state)
