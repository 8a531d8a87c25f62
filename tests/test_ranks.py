"""The group of one process returns what it was given."""

from __future__ import annotations

from typing import get_args

import pytest
import torch

from speedtronic.errors import ConfigError
from speedtronic.ranks import Group, Reduction, SingleProcess, micro_batches_per_rank


def test_a_single_process_is_rank_0_of_1() -> None:
    alone: Group = SingleProcess()
    assert (alone.rank, alone.size) == (0, 1)


@pytest.mark.parametrize("how", get_args(Reduction))
def test_a_reduction_in_one_process_copies_and_reads_nothing(how: Reduction) -> None:
    alone: Group = SingleProcess()
    tensor = torch.ones(2, device="meta")
    assert alone.reduce(tensor, how) is tensor
    assert alone.reduce(3, how) == 3
    assert alone.reduce(0.5, how) == 0.5


def test_values_are_gathered_in_a_list_and_broadcast_as_they_are() -> None:
    alone: Group = SingleProcess()
    value = {"step": 3, "best": [1.5, None]}
    assert alone.gather(value) == [value]
    assert alone.broadcast(value) is value


def test_a_single_process_has_its_own_sums_and_stacks() -> None:
    alone: Group = SingleProcess()
    tensor = torch.arange(3)
    assert alone.reduce_later(tensor)() is tensor
    assert alone.stack(tensor).tolist() == [[0, 1, 2]]
    alone.note("anywhere")


@pytest.mark.parametrize(
    ("target", "micro_batch", "ranks", "remedy"),
    [(16, 16, 2, "such as 32; or set data.micro_batch_size to 8"), (6, 1, 4, "such as 8$"), (5, 5, 2, "such as 10$")],
)
def test_sizes_that_ranks_cannot_share_are_told_with_sizes_that_they_can(
    target: int, micro_batch: int, ranks: int, remedy: str
) -> None:
    with pytest.raises(ConfigError, match=remedy):
        micro_batches_per_rank(target, micro_batch, ranks)


def test_each_rank_has_its_share_of_the_micro_batches() -> None:
    assert micro_batches_per_rank(48, 4, 3) == 4
