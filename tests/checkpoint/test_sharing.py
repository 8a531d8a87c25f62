"""States go from one rank to another as they are written into checkpoints, equal to the bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from speedtronic.checkpoint import capture_rng_state
from speedtronic.checkpoint.sharing import broadcast_state, gather_states
from tests.support.states import difference
from tests.support.thread_group import ThreadGroup, on_ranks


def state_of(rank: int) -> dict[str, Any]:
    return {
        "step": rank,
        "nothing": None,
        "numbers": (1.5, float("inf"), [2**70, -rank]),
        "array": np.arange(rank + 2, dtype=np.uint32),
        "tensors": {
            "half": torch.full((2, 3), rank, dtype=torch.bfloat16).t(),
            "flags": torch.tensor([rank == 0, True]),
            "number": torch.tensor(rank, dtype=torch.int64),
            "empty": torch.empty(0, 4),
        },
        "rng": capture_rng_state(),
    }


def test_every_rank_gets_the_states_of_all() -> None:
    states = [state_of(rank) for rank in range(3)]
    for gathered in on_ranks(3, lambda group: gather_states(group, states[group.rank])):
        assert difference(gathered, states) is None


def test_every_rank_gets_the_state_of_rank_0() -> None:
    state = state_of(7)

    def one_of_two(group: ThreadGroup) -> dict[str, Any] | None:
        return broadcast_state(group, state if group.rank == 0 else None)

    for found in on_ranks(2, one_of_two):
        assert difference(found, state) is None


def test_where_rank_0_has_none_there_is_none() -> None:
    assert on_ranks(2, lambda group: broadcast_state(group, None)) == [None, None]


def test_a_single_rank_keeps_its_own() -> None:
    state = state_of(0)
    (found,) = on_ranks(1, lambda group: [broadcast_state(group, state), *gather_states(group, state)])
    assert found[0] is state
    assert found[1] is state
