"""Which epoch a user's loader, samplers and datasets are told, also when an epoch is read again."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, ConcatDataset, DataLoader, Dataset, Sampler, StackDataset, Subset

from speedtronic.checkpoint import capture_rng_state, restore_rng_state
from speedtronic.data import BatchStream, TokenLoader
from speedtronic.data.loading.iterable_loader import StreamLoader
from speedtronic.errors import DataError


class Told:
    def __init__(self) -> None:
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)


class Numbers(Told, Dataset[torch.Tensor]):
    """Sample i of epoch e is 100 e + i."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(100 * self.epochs[-1] + index)


class Rotated(Told, Sampler[int]):
    """The order 0 1 2 3, rotated by the epoch, as `DistributedSampler` makes another order of it."""

    def __iter__(self) -> Iterator[int]:
        return iter([(self.epochs[-1] + i) % 4 for i in range(4)])

    def __len__(self) -> int:
        return 4


class Pairs(Told, BatchSampler):
    def __init__(self, sampler: Sampler[int]) -> None:
        Told.__init__(self)
        BatchSampler.__init__(self, sampler, 2, drop_last=True)


class Plain(Told):
    """A loader of the user's own."""

    def __iter__(self) -> Iterator[int]:
        return iter([10 * self.epochs[-1], 10 * self.epochs[-1] + 1])


class Stateful(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.position = 0

    def __iter__(self) -> Iterator[int]:
        for item in list(super().__iter__())[self.position :]:
            self.position += 1
            yield item
        self.position = 0

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


def batch_stream(loader: Any) -> BatchStream:
    return BatchStream(loader, capture_rng=capture_rng_state, restore_rng=restore_rng_state, warn=lambda _: None)


def taken(stream: BatchStream, count: int) -> list[Any]:
    return [batch.tolist() if isinstance(batch, torch.Tensor) else batch for batch in islice(stream, count)]


def user_loader() -> tuple[DataLoader[torch.Tensor], list[Told]]:
    dataset, sampler = Numbers(), Rotated()
    batch_sampler = Pairs(sampler)
    return DataLoader(dataset, batch_sampler=batch_sampler), [dataset, sampler, batch_sampler]


def test_dataset_sampler_and_batch_sampler_are_told_each_epoch() -> None:
    loader, parts = user_loader()
    batches = taken(batch_stream(loader), 6)
    assert batches == [[0, 1], [2, 3], [101, 102], [103, 100], [202, 203], [200, 201]]
    assert [part.epochs for part in parts] == [[0, 1, 2]] * 3


def test_an_epoch_that_is_read_again_is_told_again() -> None:
    for done in range(1, 7):
        first = batch_stream(user_loader()[0])
        taken(first, done)
        loader, parts = user_loader()
        resumed = batch_stream(loader)
        resumed.load_state_dict(first.state_dict())
        assert taken(resumed, 6) == taken(batch_stream(user_loader()[0]), done + 6)[done:]
        assert {part.epochs[0] for part in parts} == {(done - 1) // 2}


def test_a_loader_with_a_position_of_its_own_is_told_too() -> None:
    straight = taken(batch_stream(Stateful()), 9)
    assert straight == [0, 1, 10, 11, 20, 21, 30, 31, 40]
    for done in range(1, 6):
        first = batch_stream(Stateful())
        taken(first, done)
        resumed = batch_stream(Stateful())
        resumed.load_state_dict(first.state_dict())
        assert taken(resumed, 9 - done) == straight[done:]


def test_a_loader_of_the_users_own_is_told() -> None:
    assert taken(batch_stream(Plain()), 5) == [0, 1, 10, 11, 20]


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "wrapped",
    [lambda one: one, lambda one: Subset(one, range(4)), lambda one: ConcatDataset([Subset(one, range(4))])],
    ids=["itself", "subset", "concatenation"],
)
def test_our_loader_tells_a_dataset_in_its_workers_and_inside_torchs_wrappers(wrapped: Any, workers: int) -> None:
    def loader() -> TokenLoader:
        return TokenLoader(wrapped(Numbers()), 2, num_workers=workers, collate=torch.stack)

    straight = taken(batch_stream(loader()), 6)
    assert straight == [[0, 1], [2, 3], [100, 101], [102, 103], [200, 201], [202, 203]]
    first = batch_stream(loader())
    taken(first, 3)
    resumed = batch_stream(loader())
    resumed.load_state_dict(first.state_dict())
    assert taken(resumed, 3) == straight[3:]


def test_a_stack_of_datasets_is_told() -> None:
    one, other = Numbers(), Numbers()
    stacked: StackDataset[Any] = StackDataset(a=one, b=other)
    taken(batch_stream(TokenLoader(stacked, 2, collate=lambda samples: len(samples))), 3)
    assert one.epochs == other.epochs == [0, 1]


def test_a_dataset_that_two_loaders_share_is_told_by_each_what_it_reads() -> None:
    """Training is in its second epoch while an evaluation of the held-out part reads the first again."""
    dataset = Numbers()
    training = TokenLoader(Subset(dataset, [0, 1]), 1, collate=torch.stack)
    held_out = TokenLoader(Subset(dataset, [2, 3]), 1, collate=torch.stack)
    stream = batch_stream(training)
    assert taken(stream, 3) == [[0], [1], [100]]
    assert [batch.tolist() for batch in held_out] == [[2], [3]]
    assert taken(stream, 2) == [[101], [200]]
    held_out.restart()
    assert [batch.tolist() for batch in held_out] == [[2], [3]]
    assert taken(stream, 1) == [[201]]
    assert dataset.epochs == [0, 1, 0, 1, 2, 0, 2]


def test_an_epoch_that_the_dataset_refuses_is_named() -> None:
    class Short(Numbers):
        def set_epoch(self, epoch: int) -> None:
            if epoch:
                raise KeyError(epoch)
            super().set_epoch(epoch)

    stream = batch_stream(TokenLoader(Short(), 4, collate=torch.stack))
    next(stream)
    with pytest.raises(DataError, match=r"set_epoch\(1\) of .*Short: KeyError: 1"):
        next(stream)


def test_random_numbers_that_set_epoch_draws_repeat_with_the_seed() -> None:
    class Drawn(Numbers):
        def set_epoch(self, epoch: int) -> None:
            self.epochs.append(int(torch.randint(1000, ())))

    def batches(done: int) -> list[Any]:
        torch.manual_seed(done)  # of no consequence
        first = batch_stream(TokenLoader(Drawn(), 4, collate=torch.stack, seed=7))
        taken(first, done)
        resumed = batch_stream(TokenLoader(Drawn(), 4, collate=torch.stack, seed=7))
        resumed.load_state_dict(first.state_dict())
        return taken(resumed, 4 - done)

    assert batches(2) == batches(0)[2:]


def test_an_iterable_dataset_inside_a_chain_is_told() -> None:
    class Items(Told, torch.utils.data.IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter([self.epochs[-1]] * 2)

    chained: Any = torch.utils.data.ChainDataset([Items(), Items()])
    assert taken(batch_stream(StreamLoader(chained, 4, collate=torch.tensor)), 2) == [[0] * 4, [1] * 4]


@pytest.mark.slow
def test_workers_that_persist_are_said_once_to_miss_the_epoch() -> None:
    said: list[str] = []
    loader = DataLoader(Fixed(), batch_size=4, num_workers=1, persistent_workers=True)
    stream = BatchStream(loader, capture_rng=capture_rng_state, restore_rng=restore_rng_state, warn=said.append)
    assert taken(stream, 3) == [[0, 1, 2, 3]] * 3
    assert len(said) == 1
    assert "persistent_workers=False" in said[0]
    assert "Fixed" in said[0]


class Fixed(Numbers):
    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(index)
