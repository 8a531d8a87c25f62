"""Gradients are summed over the ranks once, in buckets, whatever each rank has."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from speedtronic.errors import ModelError
from speedtronic.ranks import SingleProcess
from speedtronic.trainer import reduction
from speedtronic.trainer.reduction import average_buffers, sum_gradients
from tests.support.operations import Operations
from tests.support.thread_group import ThreadGroup, on_ranks

SHAPES = [(3, 5), (7,), (1,), (4, 4), (0, 2)]


def weights(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in SHAPES]


def gradient(rank: int, number: int) -> Tensor:
    return torch.randn(SHAPES[number], generator=torch.Generator().manual_seed(10 * rank + number))


def test_each_rank_gets_the_sums_of_gradients_and_numbers() -> None:
    def one_of_three(group: ThreadGroup) -> list[Tensor]:
        parameters = weights()
        for number, parameter in enumerate(parameters):
            parameter.grad = gradient(group.rank, number)
        numbers = sum_gradients(parameters, group, torch.tensor([1.5, group.rank]))
        assert numbers.tolist() == [4.5, 3.0]
        return [p.grad for p in parameters if p.grad is not None]

    for sums in on_ranks(3, one_of_three):
        assert len(sums) == len(SHAPES)
        for number, summed in enumerate(sums):
            torch.testing.assert_close(summed, sum(gradient(rank, number) for rank in range(3)))


def test_a_gradient_that_one_rank_lacks_counts_as_zero_there_and_one_that_all_lack_stays_absent() -> None:
    def one_of_two(group: ThreadGroup) -> list[Tensor | None]:
        parameters = weights()
        for number in (0, 1) if group.rank == 0 else (1, 3):
            parameters[number].grad = gradient(group.rank, number)
        sum_gradients(parameters, group, torch.zeros(1))
        return [parameter.grad for parameter in parameters]

    right = [gradient(0, 0), gradient(0, 1) + gradient(1, 1), None, gradient(1, 3), None]
    for found in on_ranks(2, one_of_two):
        for own, wanted in zip(found, right, strict=True):
            if own is None or wanted is None:
                assert own is wanted
            else:
                torch.testing.assert_close(own, wanted)


def test_an_update_takes_one_sum_for_each_bucket_and_one_for_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest weights come last, so they fill the first buckets."""
    monkeypatch.setattr(reduction, "_BUCKET_BYTES", 4 * 128)

    def one_of_two(group: ThreadGroup) -> list[str]:
        parameters = [nn.Parameter(torch.zeros(size)) for size in (1, 60, 64, 200)]
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        sum_gradients(parameters, group, torch.zeros(1))
        assert all(p.grad is not None and bool((p.grad == 2).all()) for p in parameters)
        return group.calls

    # 200 | 64 and 60 | 1, and the numbers.
    assert on_ranks(2, one_of_two) == [["reduce_later"] * 4] * 2


def test_gradients_of_another_dtype_or_layout_keep_it() -> None:
    def one_of_two(group: ThreadGroup) -> None:
        plain = nn.Parameter(torch.zeros(3, dtype=torch.float64))
        swapped = nn.Parameter(torch.zeros(3, 4).t())
        plain.grad, swapped.grad = torch.ones(3, dtype=torch.float64), torch.ones(3, 4).t()
        sum_gradients([plain, swapped], group, torch.zeros(1), torch.bfloat16)
        assert plain.grad is not None
        assert swapped.grad is not None
        assert plain.grad.dtype is torch.float64
        assert plain.grad.tolist() == [2.0] * 3
        assert swapped.grad.stride() == swapped.stride()
        assert bool((swapped.grad == 2).all())

    on_ranks(2, one_of_two)


def test_sparse_gradients_are_refused_with_the_remedy() -> None:
    embedding = nn.Embedding(5, 2, sparse=True)
    embedding(torch.tensor([1, 3])).sum().backward()
    with pytest.raises(ModelError, match="use sparse=False"):
        on_ranks(1, lambda group: sum_gradients([embedding.weight], group, torch.zeros(1)))


def test_running_statistics_become_the_mean_and_counts_the_largest() -> None:
    def one_of_two(group: ThreadGroup) -> list[list[float]]:
        buffers = [torch.tensor([1.0, 2.0]) * (1 + group.rank), torch.tensor(3 + group.rank), torch.tensor(8.0)]
        average_buffers(buffers, group)
        return [buffer.reshape(-1).tolist() for buffer in buffers]

    assert on_ranks(2, one_of_two) == [[[1.5, 3.0], [4], [8.0]]] * 2


def test_the_host_reads_nothing_and_copies_nothing_to_the_device() -> None:
    """But on a rank that lacks gradients, which must know who has them."""
    parameters = weights()
    for number, parameter in enumerate(parameters):
        parameter.grad = gradient(0, number)
    with Operations() as operations:
        sum_gradients(parameters, SingleProcess(), torch.zeros(3))
    assert not operations.reads
    assert not operations.counts["_to_copy"]
    assert not operations.counts["lift_fresh"]
