"""Streams of Hugging Face's `datasets`: resumed twice, they go on as if they had never stopped."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest
from torch.utils.data import ChainDataset, DataLoader, IterableDataset

from speedtronic.checkpoint import capture_rng_state, restore_rng_state
from speedtronic.data import BatchStream
from speedtronic.data.loading.iterable_loader import StreamLoader
from speedtronic.data.loading.streams import order_of, restores_exactly
from speedtronic.errors import DataError

datasets: Any = pytest.importorskip("datasets")


def stream(seed: int | None = 3, buffer: int = 8, first: int = 0) -> Any:
    rows = datasets.Dataset.from_dict({"a": list(range(first, first + 40))}).to_iterable_dataset(num_shards=4)
    return rows.shuffle(seed=seed, buffer_size=buffer) if buffer else rows


class Holding(IterableDataset[Any]):
    """A dataset of the user's that passes on what a stream of the library says of its position."""

    def __init__(self) -> None:
        self.rows = stream()

    def __iter__(self) -> Any:
        return iter(self.rows)

    def set_epoch(self, epoch: int) -> None:
        self.rows.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self.rows.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rows.load_state_dict(state)


def stateful(dataset: Any, workers: int) -> Any:
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")
    return torchdata.StatefulDataLoader(dataset, batch_size=2, num_workers=workers)


LOADERS: dict[str, Callable[[Any, int], Any]] = {
    "ours": lambda dataset, workers: StreamLoader(dataset, 2, num_workers=workers, seed=1),
    "torch": lambda dataset, workers: DataLoader(dataset, batch_size=2, num_workers=workers),
    "torchdata": stateful,
}


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("make", [stream, Holding], ids=["stream", "held"])
def test_a_shuffled_stream_resumed_twice_has_the_same_order(make: Callable[[], Any], workers: int, kind: str) -> None:
    """20 batches are an epoch: resumed within one, at its end, and in the next, which has another order."""

    def batches() -> BatchStream:
        loader = LOADERS[kind](make(), workers)
        return BatchStream(loader, capture_rng=capture_rng_state, restore_rng=restore_rng_state, warn=lambda _: None)

    def taken(source: BatchStream, count: int) -> list[list[int]]:
        return [batch["a"].tolist() for batch in islice(source, count)]

    straight = taken(batches(), 44)
    if make is stream or workers == 0:
        assert sorted(sum(straight[:20], [])) == list(range(40))
        assert straight[:20] != straight[20:40]
    for first, second in ((7, 11), (20, 3), (23, 9)):
        current = batches()
        got = taken(current, first)
        for count in (second, 44 - first - second):
            state = current.state_dict()
            current = batches()
            current.load_state_dict(state)
            got += taken(current, count)
        assert got == straight, (first, second)


class Colliding(Holding):
    """Sets the epoch of its stream as the library does, when every worker has seen what the epoch lacks."""

    def __init__(self, workers: int) -> None:
        super().__init__()
        self.all_have_seen = multiprocessing.get_context("fork").Barrier(workers)

    def set_epoch(self, epoch: int) -> None:
        lacks = epoch - self.rows._epoch
        self.all_have_seen.wait(timeout=60)
        self.rows._epoch += lacks

    def __iter__(self) -> Any:
        for row in super().__iter__():
            yield {**row, "epoch": self.rows.epoch}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="a barrier is inherited by forked workers only")
@pytest.mark.parametrize("wrap", [lambda held: held, lambda held: ChainDataset([held])], ids=["held", "chained"])
def test_workers_that_set_the_epoch_of_a_stream_at_once_all_read_that_epoch(wrap: Callable[[Any], Any]) -> None:
    loader = StreamLoader(wrap(Colliding(2)), 2, num_workers=2, seed=1, multiprocessing_context="fork")
    epochs = [{number for batch in loader for number in batch["epoch"].tolist()} for _ in range(3)]
    loader.close()
    assert epochs == [{0}, {1}, {2}]


def test_a_stream_shuffled_without_a_seed_is_refused_and_not_continued_in_another_order() -> None:
    for kind in ("ours", "torch"):

        def batches(kind: str = kind) -> BatchStream:
            loader = LOADERS[kind](stream(seed=None), 0)
            return BatchStream(loader, capture_rng=capture_rng_state, restore_rng=restore_rng_state)

        current = batches()
        next(current)
        with pytest.raises(DataError, match=r"shuffled in another order.*give shuffle\(\) the seed"):
            batches().load_state_dict(current.state_dict())


def test_a_stream_is_trusted_unless_it_keeps_what_its_state_does_not_hold() -> None:
    plain, mixed = stream(buffer=0), datasets.interleave_datasets([stream(buffer=0), stream(buffer=0, first=99)])
    doubled = plain.map(lambda batch: {"a": batch["a"] * 2}, batched=True, batch_size=5)
    for trusted in (plain, mixed, doubled, plain.filter(lambda row: row["a"] % 3 > 0), plain.take(9), [1, 2], None):
        assert restores_exactly(trusted)
    shuffled = datasets.interleave_datasets([stream(buffer=0), stream()])
    tables = doubled.with_format("arrow")
    for untrusted in (stream(), shuffled, stream().map(lambda row: row), Holding(), tables):
        assert not restores_exactly(untrusted)
    assert order_of(stream()) == order_of(stream()) != order_of(stream(seed=4))
    assert order_of(plain) is None
