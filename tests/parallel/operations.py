"""Every operation of a real group, checked on each rank. Run by `test_process_group.py`."""

from __future__ import annotations

import torch

from speedtronic.config import ParallelConfig
from speedtronic.parallel.start import join_group
from speedtronic.ranks import Group


def check(group: Group) -> None:
    rank, size = group.rank, group.size
    first = sum(range(size))
    assert group.reduce(rank) == first
    assert isinstance(group.reduce(rank), int)
    assert group.reduce(rank + 0.5, "mean") == first / size + 0.5
    assert group.reduce(rank, "max") == size - 1
    assert group.reduce(2**40 + rank) == size * 2**40 + first

    own = torch.tensor([1.0, rank])
    assert group.reduce(own).tolist() == [size, first]
    assert own.tolist() == [1.0, rank]

    # Several sums on their way at once, waited for in another order.
    waits = [group.reduce_later(torch.full((3,), float(number + rank))) for number in range(4)]
    for number in (3, 0, 2, 1):
        assert waits[number]().tolist() == [size * number + first] * 3

    assert group.stack(torch.tensor([[rank, 7]])).tolist() == [[[each, 7]] for each in range(size)]
    values = group.gather({"rank": rank, "text": "ä" * rank, "none": None})
    assert values == [{"rank": each, "text": "ä" * each, "none": None} for each in range(size)]
    assert group.broadcast(["from", rank]) == ["from", 0]

    for tensor in (
        torch.tensor([rank == 0, False]),
        torch.tensor(complex(rank, 1)),
        torch.full((2, 3), rank, dtype=torch.bfloat16).t(),
        torch.empty(0),
    ):
        assert group.broadcast(tensor) is tensor
        assert not tensor.any() or rank == 0 or tensor.dtype in (torch.bool, torch.complex64)
    flags, number = torch.tensor([rank == 0, False]), torch.tensor(complex(rank, 1))
    assert group.broadcast(flags).tolist() == [True, False]
    assert group.broadcast(number).item() == complex(0, 1)
    print("checked", rank, "of", size)


if __name__ == "__main__":
    check(join_group(ParallelConfig(), "cpu")[0])
