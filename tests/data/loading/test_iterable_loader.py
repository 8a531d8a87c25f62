from __future__ import annotations

import random
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from speedtronic.checkpoint import CheckpointManager
from speedtronic.data import BatchStream
from speedtronic.data.loading.iterable_loader import StreamLoader
from speedtronic.errors import DataError, SpeedtronicWarning
from speedtronic.trainer import Trainer
from tests.support.datasets import FailingStream, NoiseStream, ShardedNoiseStream, StatefulStream
from tests.support.models import make_trainer

KINDS = [NoiseStream, ShardedNoiseStream]

# Most of these continue by reading again, which is said. Tests that need not have it call `pytest.fail` instead.
pytestmark = pytest.mark.filterwarnings("ignore:.*reading the first:speedtronic.errors.SpeedtronicWarning")


@contextmanager
def closing(loader: StreamLoader) -> Iterator[StreamLoader]:
    try:
        yield loader
    finally:
        loader.close()


def endless(loader: StreamLoader) -> Iterator[Any]:
    while True:
        yield from loader


def batches(dataset: Any, batch_size: int = 2, *, epochs: int = 1, **options: Any) -> list[list[list[float]]]:
    with closing(StreamLoader(dataset, batch_size, **options)) as loader:
        return [batch.tolist() for _ in range(epochs) for batch in loader]


def numbers(made: list[list[list[float]]]) -> list[list[int]]:
    """Which items the batches are made of."""
    return [[int(row[0]) for row in batch] for batch in made]


def rows(made: list[list[list[float]]]) -> list[list[float]]:
    return [row for batch in made for row in batch]


# ---------------------------------------------------------------------- each item once


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_items_come_once_and_in_their_order(num_workers: int) -> None:
    made = batches(NoiseStream(7), epochs=2, num_workers=num_workers, drop_last=False)

    assert numbers(made) == [[0, 1], [2, 3], [4, 5], [6]] * 2


@pytest.mark.parametrize("num_workers", [0, 2])
def test_drop_last_leaves_out_the_batch_that_is_not_full(num_workers: int) -> None:
    assert numbers(batches(NoiseStream(7), num_workers=num_workers)) == [[0, 1], [2, 3], [4, 5]]


def test_what_a_dataset_gives_to_each_worker_is_batched_there() -> None:
    made = batches(ShardedNoiseStream(11), num_workers=2, drop_last=False)

    assert numbers(made) == [[0, 2], [1, 3], [4, 6], [5, 7], [8, 10], [9]]


def test_a_worker_whose_part_has_ended_does_not_end_the_others() -> None:
    class Lopsided(NoiseStream):
        def shard(self) -> tuple[int, int]:
            worker = get_worker_info()
            assert worker is not None
            return (self.size, 1) if worker.id == 0 else (0, 1)

    assert numbers(batches(Lopsided(6), num_workers=2, epochs=2)) == [[0, 1], [2, 3], [4, 5]] * 2


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_share_a_stream(kind: type[NoiseStream], num_workers: int) -> None:
    ranks = [
        rows(batches(kind(14), rank=rank, world_size=3, num_workers=num_workers, drop_last=False)) for rank in range(3)
    ]

    assert sorted(int(row[0]) for rank in ranks for row in rank) == list(range(14))


def test_ranks_take_batches_in_turn_and_share_the_last_global_batch_evenly() -> None:
    def of(rank: int, *, drop_last: bool) -> list[list[int]]:
        return numbers(batches(NoiseStream(15), rank=rank, world_size=3, drop_last=drop_last))

    assert [of(rank, drop_last=False) for rank in range(3)] == [
        [[0, 1], [6, 7], [12]],
        [[2, 3], [8, 9], [13]],
        [[4, 5], [10, 11], [14]],
    ]
    assert [of(rank, drop_last=True)[2:] for rank in range(3)] == [[], [], []]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_two_loaders_read_one_dataset_at_once(kind: type[NoiseStream], num_workers: int) -> None:
    dataset = kind(8)
    alone = batches(dataset, num_workers=num_workers)
    with (
        closing(StreamLoader(dataset, 2, num_workers=num_workers)) as one,
        closing(StreamLoader(dataset, 2, num_workers=num_workers)) as other,
    ):
        pairs = [(a.tolist(), b.tolist()) for a, b in zip(one, other, strict=True)]

    assert pairs == [(batch, batch) for batch in alone]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_spawned_workers_deliver_what_forked_ones_do(kind: type[NoiseStream]) -> None:
    forked, spawned = (
        batches(kind(9), epochs=2, num_workers=2, multiprocessing_context=context, drop_last=False)
        for context in ("fork", "spawn")
    )

    assert spawned == forked


def test_a_stream_may_be_endless() -> None:
    class Endless(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return count()

    with closing(StreamLoader(Endless(), 2, num_workers=2)) as loader:
        assert [batch.tolist() for batch in islice(loader, 3)] == [[0, 1], [2, 3], [4, 5]]
        assert loader.epoch == 0


# ---------------------------------------------------------------------- which worker it is


class Asking(NoiseStream):
    """Looks at `attribute` of the worker when item `at` is due."""

    def __init__(self, attribute: str, at: int) -> None:
        super().__init__(6)
        self.attribute = attribute
        self.at = at

    def __iter__(self) -> Iterator[Tensor]:
        for index, item in enumerate(super().__iter__()):
            if index == self.at:
                getattr(get_worker_info(), self.attribute)
            yield item


def test_a_dataset_that_asks_too_late_is_refused() -> None:
    with pytest.raises(DataError, match=r"Asking called get_worker_info\(\) after its first item, too late"):
        batches(Asking("id", at=1), num_workers=2)


def test_a_single_worker_may_ask_at_any_time() -> None:
    assert numbers(batches(Asking("id", at=1), num_workers=1)) == [[0, 1], [2, 3], [4, 5]]


def test_asking_for_anything_else_is_not_sharding() -> None:
    for attribute in ("dataset", "seed"):
        assert numbers(batches(Asking(attribute, at=0), num_workers=2)) == [[0, 1], [2, 3], [4, 5]]


def test_a_worker_knows_its_dataset_and_the_workers_of_all_ranks() -> None:
    class Curious(IterableDataset[tuple[int, int, int]]):
        size = 7

        def __iter__(self) -> Iterator[tuple[int, int, int]]:
            worker = get_worker_info()
            assert worker is not None
            yield worker.id, worker.num_workers, worker.dataset.size

    seen = [
        tuple(field.item() for field in batch)
        for rank in range(2)
        for batch in _read(StreamLoader(Curious(), 1, num_workers=2, rank=rank, world_size=2))
    ]

    assert seen == [(0, 4, 7), (1, 4, 7), (2, 4, 7), (3, 4, 7)]


def _read(loader: StreamLoader) -> list[Any]:
    with closing(loader):
        return list(loader)


# ---------------------------------------------------------------------- random numbers


@pytest.mark.parametrize("kind", KINDS)
def test_random_numbers_differ_between_items_and_epochs_and_repeat_with_the_seed(kind: type[NoiseStream]) -> None:
    made = rows(batches(kind(8), epochs=2, num_workers=2, seed=1))

    for generator in range(1, 4):
        assert len({row[generator] for row in made}) == 16
    assert made == rows(batches(kind(8), epochs=2, num_workers=2, seed=1))
    assert made != rows(batches(kind(8), epochs=2, num_workers=2, seed=2))


def test_random_numbers_do_not_depend_on_the_number_of_workers() -> None:
    assert batches(NoiseStream(8), epochs=2) == batches(NoiseStream(8), epochs=2, num_workers=2)
    assert batches(ShardedNoiseStream(8), epochs=2) == batches(ShardedNoiseStream(8), epochs=2, num_workers=1)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_global_generators_are_neither_drawn_from_nor_changed(num_workers: int) -> None:
    def state() -> Any:
        return random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()

    before = state()
    made = batches(NoiseStream(6), num_workers=num_workers)

    assert state() == before
    random.seed(7)
    assert batches(NoiseStream(6), num_workers=num_workers) == made


def test_a_dataset_is_told_the_epoch() -> None:
    class Reshuffled(NoiseStream):
        epoch = -1

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __iter__(self) -> Iterator[Tensor]:
            return iter([torch.tensor([self.epoch])])

    assert numbers(batches(Reshuffled(1), 1, epochs=3)) == [[0], [1], [2]]


# ---------------------------------------------------------------------- position


@pytest.mark.parametrize("done", [0, 1, 3, 4, 6])
@pytest.mark.parametrize(("kind", "num_workers"), [(NoiseStream, 0), (NoiseStream, 2), (ShardedNoiseStream, 2)])
def test_a_saved_position_continues_with_the_same_batches(kind: type[NoiseStream], num_workers: int, done: int) -> None:
    def loader() -> StreamLoader:
        return StreamLoader(kind(9), 2, seed=3, num_workers=num_workers)

    with closing(loader()) as straight, closing(loader()) as interrupted, closing(loader()) as resumed:
        expected = [batch.tolist() for batch in islice(endless(straight), 10)]
        list(islice(endless(interrupted), done))
        resumed.load_state_dict(interrupted.state_dict())
        assert resumed.state_dict() == interrupted.state_dict()
        assert [batch.tolist() for batch in islice(endless(resumed), 10 - done)] == expected[done:]


def test_reading_again_is_announced_with_the_number_of_batches() -> None:
    interrupted = StreamLoader(NoiseStream(9), 2)
    list(islice(endless(interrupted), 6))

    said = "NoiseStream keeps no position of its own: reading the first 2 batches of epoch 1 again"
    with pytest.warns(SpeedtronicWarning, match=said):
        StreamLoader(NoiseStream(9), 2).load_state_dict(interrupted.state_dict())


@pytest.mark.parametrize("done", [0, 1, 3, 4, 6])
def test_a_dataset_with_a_state_continues_without_reading_again(done: int, tmp_path: Path) -> None:
    straight = [batch.tolist() for batch in islice(endless(StreamLoader(StatefulStream(9), 2)), 10)]
    interrupted = StreamLoader(StatefulStream(9), 2)
    list(islice(endless(interrupted), done))
    CheckpointManager(tmp_path).save(1, interrupted.state_dict())
    state = CheckpointManager(tmp_path).load_latest()
    assert state is not None
    dataset = StatefulStream(9)
    resumed = StreamLoader(dataset, 2)
    resumed.warn = pytest.fail

    resumed.load_state_dict(state)
    rest = endless(resumed)
    first = next(rest).tolist()

    assert first == straight[done]
    assert dataset.made == (2 if done != 4 else 3)  # at the end of an epoch the item that makes no batch comes before
    assert [batch.tolist() for batch in islice(rest, 9 - done)] == straight[done + 1 :]


def test_workers_cannot_use_the_state_of_a_dataset() -> None:
    interrupted = StreamLoader(StatefulStream(9), 2)
    list(islice(endless(interrupted), 3))
    with closing(StreamLoader(StatefulStream(9), 2, num_workers=2)) as resumed:
        said = "cannot continue at its own position: reading the first 3 batches of epoch 0 again"
        with pytest.warns(SpeedtronicWarning, match=said):
            resumed.load_state_dict(interrupted.state_dict())

        assert next(iter(resumed)).tolist() == next(iter(interrupted)).tolist()


def test_another_batch_size_continues_at_the_position_of_the_dataset() -> None:
    interrupted = StreamLoader(StatefulStream(16), 2)
    list(islice(interrupted, 3))
    resumed = StreamLoader(StatefulStream(16), 4)
    resumed.warn = pytest.fail

    resumed.load_state_dict(interrupted.state_dict())

    assert numbers([batch.tolist() for batch in resumed]) == [[6, 7, 8, 9], [10, 11, 12, 13]]


def test_after_a_failure_a_dataset_with_a_state_is_read_up_to_the_batch() -> None:
    class Fragile(StatefulStream):
        fails = False

        def __iter__(self) -> Iterator[Tensor]:
            for item in super().__iter__():
                if self.fails and item[0] == 7:
                    self.fails = False
                    raise OSError("connection lost")
                yield item

    first = StreamLoader(Fragile(12), 2)
    list(islice(first, 1))
    loader = StreamLoader(Fragile(12), 2)
    loader.load_state_dict(first.state_dict())
    loader.dataset.fails = True  # type: ignore[attr-defined]
    made = [batch.tolist() for batch in islice(loader, 2)]

    with pytest.raises(DataError, match="item 7 of .*Fragile: OSError: connection lost"):
        next(iter(loader))
    again = StreamLoader(Fragile(12), 2)
    again.load_state_dict(loader.state_dict())

    assert numbers(made) == [[2, 3], [4, 5]]
    expected = batches(Fragile(12))[3:]
    assert [batch.tolist() for batch in loader] == expected
    assert [batch.tolist() for batch in again] == expected


def test_other_workers_and_batches_continue_with_the_same_items() -> None:
    interrupted = StreamLoader(NoiseStream(16), 2)
    list(islice(interrupted, 4))
    with closing(StreamLoader(NoiseStream(16), 4, num_workers=2)) as resumed:
        with pytest.warns(SpeedtronicWarning) as said:
            resumed.load_state_dict(interrupted.state_dict())

        assert numbers([next(iter(resumed)).tolist()]) == [[8, 9, 10, 11]]

    assert not [one for one in said if "divided differently" in str(one.message)]


def test_a_division_that_cannot_be_continued_is_taken_with_a_warning() -> None:
    with closing(StreamLoader(ShardedNoiseStream(16), 2, num_workers=2)) as interrupted:
        list(islice(interrupted, 3))
        state = interrupted.state_dict()

    with pytest.warns(SpeedtronicWarning, match="the epoch is divided differently than before"):
        StreamLoader(ShardedNoiseStream(16), 2, num_workers=1).load_state_dict(state)


@pytest.mark.parametrize("workers", [0, 2])
def test_another_batch_size_goes_on_at_the_same_item(workers: int) -> None:
    """After 3 batches of 2 come those of 4, which begin at item 6; after one of these, those of 3, at item 10."""
    whole = [item for batch in StreamLoader(NoiseStream(16), 2) for item in batch.tolist()]
    state = None
    seen = []
    for batch_size, batches in ((2, 3), (4, 1), (3, 2)):
        with closing(StreamLoader(NoiseStream(16), batch_size, num_workers=workers)) as loader:
            loader.warn = lambda message: None
            if state is not None:
                loader.load_state_dict(state)
            seen += [item for batch in islice(loader, batches) for item in batch.tolist()]
            state = loader.state_dict()
    assert seen == whole


def test_a_changed_seed_is_taken_with_a_warning() -> None:
    with pytest.warns(SpeedtronicWarning, match=r"data\.seed"):
        StreamLoader(NoiseStream(4), 2, seed=1).load_state_dict(StreamLoader(NoiseStream(4), 2).state_dict())


def test_other_data_is_refused_naming_both() -> None:
    class Named(NoiseStream):
        fingerprint = "mine, second edition"

    state = StreamLoader(NoiseStream(4), 2).state_dict()

    with pytest.raises(DataError, match=r"mine, second edition now, tests\.support\.datasets\.NoiseStream then"):
        StreamLoader(Named(4), 2).load_state_dict(state)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_restart_begins_every_pass_with_the_same_batches(num_workers: int) -> None:
    with closing(StreamLoader(NoiseStream(8), 2, num_workers=num_workers)) as loader:
        first = [batch.tolist() for batch in loader]
        loader.restart()
        again = [batch.tolist() for batch in islice(loader, 2)]
        loader.restart()

        assert again == first[:2]
        assert [batch.tolist() for batch in loader] == first


def test_iterating_after_close_continues_at_the_position() -> None:
    loader = StreamLoader(NoiseStream(8), 2, num_workers=1)
    next(iter(loader))
    loader.close()

    with closing(loader):
        assert numbers([next(iter(loader)).tolist()]) == [[2, 3]]


def test_a_stream_of_batches_resumes_with_it() -> None:
    def stream() -> BatchStream:
        return BatchStream(StreamLoader(NoiseStream(9), 2), capture_rng=dict, restore_rng=lambda state: None)

    straight = [batch.tolist() for batch in islice(stream(), 11)]
    interrupted = stream()
    list(islice(interrupted, 6))
    resumed = stream()
    resumed.load_state_dict(interrupted.state_dict())

    assert [batch.tolist() for batch in islice(resumed, 5)] == straight[6:]


class Pairs(IterableDataset[tuple[Tensor, Tensor]]):
    """Random inputs and targets for `Regression`."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return ((torch.randn(3), torch.randn(1)) for _ in range(10))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_training_on_a_stream_continues_as_if_it_had_not_stopped(num_workers: int) -> None:
    with ExitStack() as stack:

        def trainer() -> Trainer:
            loader = StreamLoader(Pairs(), 2, num_workers=num_workers)
            stack.callback(loader.close)
            return make_trainer(batches=loader)

        whole = trainer().fit(12)
        first, second = trainer(), trainer()
        first.fit(7)
        second.resume(first.state_dict())
        rest = second.fit(12)

    assert [record["loss"] for record in rest.metrics] == [record["loss"] for record in whole.metrics[7:]]


# ---------------------------------------------------------------------- what goes wrong


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(("kind", "size"), [(NoiseStream, 0), (NoiseStream, 1), (ShardedNoiseStream, 2)])
def test_an_epoch_without_a_batch_is_an_error(kind: type[NoiseStream], size: int, num_workers: int) -> None:
    with pytest.raises(DataError, match=r"epoch 0 of .*NoiseStream has no batch"):
        batches(kind(size), 4, num_workers=num_workers)


def test_a_dataset_that_can_be_read_only_once_is_an_error_in_the_second_epoch() -> None:
    class Once(NoiseStream):
        def __init__(self) -> None:
            super().__init__(4)
            self.items = super().__iter__()

        def __iter__(self) -> Iterator[Tensor]:
            return self.items

    with pytest.raises(DataError, match=r"epoch 1 of .*Once has no batch: .* its __iter__ does not start over"):
        batches(Once(), epochs=2)


def test_an_iterator_is_refused() -> None:
    with pytest.raises(DataError, match=r"builtins\.generator is an iterator, which can be read only once"):
        StreamLoader((number for number in range(3)), 1)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_item_that_fails_is_named(num_workers: int) -> None:
    message = r"^item 3 of tests\.support\.datasets\.FailingStream: ValueError: boom \(datasets\.py, line \d+\)$"
    with closing(StreamLoader(FailingStream(6), 2, num_workers=num_workers)) as loader:
        assert numbers([next(iter(loader)).tolist()]) == [[0, 1]]
        for _ in range(2):
            with pytest.raises(DataError, match=message) as failure:
                next(iter(loader))

    assert 'raise ValueError("boom")' in "".join(traceback.format_exception(failure.value))


def test_items_that_make_no_batch_are_named() -> None:
    class Ragged(NoiseStream):
        def __iter__(self) -> Iterator[Tensor]:
            return (torch.zeros(size) for size in (1, 1, 1, 2))

    with pytest.raises(DataError, match=r"batch 1 of .*Ragged: the samples cannot be stacked"):
        batches(Ragged(0))


# ---------------------------------------------------------------------- streams of Hugging Face


def _shards(names: list[str]) -> Iterator[dict[str, list[int]]]:
    for name in names:
        for number in range(8):
            yield {"input_ids": [ord(name), number], "labels": [number, 0]}


def hugging_face_stream() -> Any:
    datasets = pytest.importorskip("datasets")
    return datasets.IterableDataset.from_generator(_shards, gen_kwargs={"names": ["a", "b"]})


@pytest.mark.slow
def test_a_stream_of_hugging_face_shards_itself_and_is_shuffled_for_each_epoch() -> None:
    stream = hugging_face_stream().shuffle(seed=3, buffer_size=4)
    with closing(StreamLoader(stream, 2, num_workers=2)) as loader:
        first, second = ([row for batch in loader for row in batch["input_ids"].tolist()] for _ in range(2))
        assert loader.state_dict()["shards_itself"]

    assert sorted(first) == sorted(second) == sorted([ord(name), number] for name in "ab" for number in range(8))
    assert first != second


@pytest.mark.slow
@pytest.mark.parametrize("done", [3, 8, 11])
def test_a_stream_of_hugging_face_continues_at_its_own_position(done: int) -> None:
    def loader() -> StreamLoader:
        return StreamLoader(hugging_face_stream(), 2)

    straight = [batch["input_ids"].tolist() for batch in islice(endless(loader()), 20)]
    interrupted = loader()
    list(islice(endless(interrupted), done))
    resumed = loader()
    resumed.warn = pytest.fail
    resumed.load_state_dict(interrupted.state_dict())

    assert [batch["input_ids"].tolist() for batch in islice(endless(resumed), 20 - done)] == straight[done:]


@pytest.mark.parametrize("workers", [0, 2])
def test_ranks_in_step_share_a_stream_and_have_as_many_batches(workers: int) -> None:
    """7 items for 3 ranks of 2: of the second global batch rank 0 has the one item that is left, the others None."""
    seen: list[float] = []
    for rank in range(3):
        options = {"rank": rank, "world_size": 3, "in_step": 3}
        with closing(StreamLoader(NoiseStream(7), 2, drop_last=False, num_workers=workers, **options)) as loader:
            batches = [None if batch is None else batch[:, 0].tolist() for batch in loader]
            assert [batch is None for batch in batches] == [False, rank > 0]
            assert loader.epoch == 1
            seen += [item for batch in batches for item in batch or ()]
    assert sorted(seen) == list(range(7))
