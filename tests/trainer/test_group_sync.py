"""Of several ranks, the coordinator of rank 0 does the work, and the ranks share what arrives. They are threads."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from speedtronic.config import SpeedtronicConfig
from speedtronic.trainer.group_sync import GroupCoordinator, share_coordinator
from speedtronic.trainer.sync import FullCoordinator
from tests.support.thread_group import ThreadGroup, on_ranks


class Position(NamedTuple):
    step: int
    samples: int
    tokens: int


class Leader(FullCoordinator):
    """Finds newer weights at its start and after step 2, and asks for a reset at the latter."""

    def __init__(self, model: nn.Linear) -> None:
        self._model = model
        self.counted: list[tuple[int, int | Tensor]] = []
        self.calls: list[str] = []

    @property
    def reset_inner_optimizer(self) -> bool:
        return self._model.weight[0, 0].item() == 2.0

    def start(self) -> None:
        self.calls.append("start")
        self._set(1.0)

    def after_optimizer_step(self, model: Any, step: int) -> bool:
        if step == 2:
            self._set(2.0)
        return step == 2

    def count(self, samples: int, tokens: int | Tensor) -> None:
        self.counted.append((samples, tokens))

    def continue_at(self) -> Position | None:
        return Position(7, 70, 700)

    def hand_over(self) -> None:
        self.calls.append("hand over")

    def stop(self) -> None:
        self.calls.append("stop")

    def state_dict(self) -> dict[str, Any]:
        return {"version": 3}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.calls.append(f"load {state}")

    def prepare_state(self, state: dict[str, Any]) -> None:
        self.calls.append(f"prepare {state}")

    def _set(self, value: float) -> None:
        with torch.no_grad():
            self._model.weight.fill_(value)


def test_ranks_get_what_arrives_after_the_same_step() -> None:
    def one_of_two(group: ThreadGroup) -> list[Any]:
        model = nn.Linear(2, 2)
        leader = Leader(model) if group.rank == 0 else None
        shared = share_coordinator(leader, group, model, SpeedtronicConfig())
        assert isinstance(shared, GroupCoordinator)
        seen: list[Any] = []
        shared.prepare_state({"version": 2})
        shared.start()
        seen.append(model.weight[0, 0].item())
        for step in (1, 2):
            shared.count(10, 100)
            seen += [shared.after_optimizer_step(model, step), shared.reset_inner_optimizer, model.weight[0, 0].item()]
        position = shared.continue_at()
        assert position is not None
        seen.append((position.step, position.samples, position.tokens))
        shared.hand_over()
        shared.stop()
        assert shared.state_dict() == ({"version": 3} if group.rank == 0 else None)
        if leader is not None:
            assert leader.calls == ["prepare {'version': 2}", "start", "hand over", "stop"]
            assert leader.counted == [(10, 100)] * 2
        # A later `fit` has it already.
        assert share_coordinator(shared, group, model, SpeedtronicConfig()) is shared
        return seen

    assert on_ranks(2, one_of_two) == [[1.0, False, False, 1.0, True, True, 2.0, (7, 70, 700)]] * 2


def test_without_one_on_rank_0_there_is_none() -> None:
    model = nn.Linear(2, 2)
    found = on_ranks(
        2, lambda group: share_coordinator(Leader(model) if group.rank else None, group, model, SpeedtronicConfig())
    )
    assert found == [None, None]
