from __future__ import annotations

import random
import time
import traceback
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset

from speedtronic.data import SyntheticTokenDataset, TextFileTokenDataset, TokenLoader
from speedtronic.data.loading.sampler import SampleOrder
from speedtronic.errors import DataError, SpeedtronicWarning
from tests.support import datasets as support


class Numbers(Dataset[int]):
    """Sample i is i."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        return index


class Noise(Numbers):
    """Random samples, from each of the three generators that augmentation code draws from."""

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([random.random(), np.random.random(), torch.rand(()).item()], dtype=torch.float64)


class Refusing(Numbers):
    def __getitem__(self, index: int) -> int:
        if index == 3:
            raise DataError("sample 3 is bad")
        return index


@contextmanager
def closing(loader: TokenLoader) -> Iterator[TokenLoader]:
    try:
        yield loader
    finally:
        loader.close()


def epoch(loader: TokenLoader) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


def flat(batches: list[list[int]]) -> list[int]:
    return [sample for batch in batches for sample in batch]


def stream(loader: TokenLoader) -> Iterator[Any]:
    while True:
        yield from loader


def test_an_epoch_delivers_every_sample_once_in_a_new_order() -> None:
    loader = TokenLoader(Numbers(12), 4, shuffle=True, seed=1)

    first, second = flat(epoch(loader)), flat(epoch(loader))

    assert sorted(first) == sorted(second) == list(range(12))
    assert first != second


def test_without_shuffling_the_order_is_that_of_the_dataset() -> None:
    assert epoch(TokenLoader(Numbers(6), 2)) == [[0, 1], [2, 3], [4, 5]]


def test_drop_last_leaves_out_the_batch_that_is_not_full() -> None:
    dropping, keeping = TokenLoader(Numbers(7), 3), TokenLoader(Numbers(7), 3, drop_last=False)

    assert epoch(dropping) == [[0, 1, 2], [3, 4, 5]]
    assert epoch(keeping) == [[0, 1, 2], [3, 4, 5], [6]]
    assert (len(dropping), len(keeping)) == (2, 3)
    assert dropping.epoch == keeping.epoch == 1


@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("done", [0, 1, 4, 5, 6, 11])
def test_a_saved_position_continues_the_same_data_order(done: int, drop_last: bool) -> None:
    def loader() -> TokenLoader:
        return TokenLoader(Numbers(11), 2, shuffle=True, seed=4, drop_last=drop_last)

    straight = [batch.tolist() for batch in islice(stream(loader()), 20)]
    interrupted = loader()
    list(islice(stream(interrupted), done))
    resumed = loader()
    resumed.load_state_dict(interrupted.state_dict())

    assert [batch.tolist() for batch in islice(stream(resumed), 20 - done)] == straight[done:]


def test_workers_deliver_what_one_process_does_and_save_the_same_position() -> None:
    dataset = SyntheticTokenDataset(10, 4, 50, 0)
    alone = TokenLoader(dataset, 2, shuffle=True, seed=4)
    with closing(TokenLoader(dataset, 2, shuffle=True, seed=4, num_workers=2)) as working:
        for theirs, ours in islice(zip(stream(working), stream(alone), strict=True), 12):
            assert torch.equal(theirs["input_ids"], ours["input_ids"])
            assert torch.equal(theirs["labels"], ours["labels"])
            assert working.state_dict() == alone.state_dict()
        position = alone.state_dict()
        expected = next(iter(alone))
        list(islice(stream(working), 3))

        working.load_state_dict(position)

        assert torch.equal(next(iter(working))["input_ids"], expected["input_ids"])


def test_another_batch_size_continues_with_the_same_samples() -> None:
    first = TokenLoader(Numbers(24), 4, shuffle=True, seed=2)
    order = flat(epoch(TokenLoader(Numbers(24), 4, shuffle=True, seed=2)))
    list(islice(stream(first), 2))

    second = TokenLoader(Numbers(24), 2, shuffle=True, seed=2)
    second.load_state_dict(first.state_dict())

    assert flat(epoch(second)) == order[8:]


def test_a_rest_too_small_for_the_new_batch_size_begins_the_next_epoch() -> None:
    first = TokenLoader(Numbers(10), 2)
    list(islice(stream(first), 4))
    second = TokenLoader(Numbers(10), 4)

    second.load_state_dict(first.state_dict())

    assert (second.epoch, next(iter(second)).tolist()) == (1, [0, 1, 2, 3])


def test_a_new_iterator_continues_at_the_position() -> None:
    loader = TokenLoader(Numbers(6), 2)

    assert next(iter(loader)).tolist() == [0, 1]
    assert epoch(loader) == [[2, 3], [4, 5]]
    assert epoch(loader) == [[0, 1], [2, 3], [4, 5]]


def test_restart_begins_every_pass_with_the_same_batches() -> None:
    loader = TokenLoader(Noise(4), 2)

    first = [batch.tolist() for batch in loader]
    loader.restart()
    again = next(iter(loader)).tolist()
    loader.restart()

    assert again == first[0]
    assert [batch.tolist() for batch in loader] == first


def test_a_position_far_into_a_huge_dataset_is_reached_at_once() -> None:
    dataset = SyntheticTokenDataset(10**12, 4, 50, 0)
    loader = TokenLoader(dataset, 4, shuffle=True, seed=0)
    state = {**loader.state_dict(), "epoch": 10**6, "samples": 10**11}
    began = time.perf_counter()

    loader.load_state_dict(state)
    batch = next(iter(loader))

    assert batch["input_ids"].shape == (4, 4)
    assert loader.state_dict()["samples"] == 10**11 + 4
    assert time.perf_counter() - began < 1


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_global_generators_are_neither_drawn_from_nor_changed(num_workers: int) -> None:
    def state() -> Any:
        return random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()

    before = state()
    with closing(TokenLoader(Noise(6), 2, shuffle=True, num_workers=num_workers)) as loader:
        list(islice(stream(loader), 5))

    assert state() == before


def noise(num_workers: int, seed: int, epochs: int = 2) -> list[list[float]]:
    with closing(TokenLoader(Noise(8), 2, seed=seed, num_workers=num_workers)) as loader:
        batches = list(islice(stream(loader), 4 * epochs))
    return [row for batch in batches for row in batch.tolist()]


def test_workers_repeat_neither_each_other_nor_an_epoch_but_repeat_with_the_seed() -> None:
    rows = noise(num_workers=2, seed=1)

    for generator in range(3):
        assert len({row[generator] for row in rows}) == 16
    assert rows == noise(num_workers=2, seed=1)
    assert rows == noise(num_workers=0, seed=1)
    assert rows != noise(num_workers=0, seed=2)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_bad_data_in_a_worker_is_the_same_one_line_error(num_workers: int) -> None:
    with closing(TokenLoader(Refusing(6), 2, num_workers=num_workers)) as loader:
        batches = iter(loader)
        next(batches)
        with pytest.raises(DataError) as failure:
            next(batches)

        assert str(failure.value) == "sample 3 is bad"
        assert loader.state_dict()["samples"] == 2


@pytest.mark.slow
def test_what_a_spawned_worker_needs_pickles(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("some text to train on " * 5)
    dataset = TextFileTokenDataset(path, 4)
    alone = TokenLoader(dataset.part(2, 10), 2, shuffle=True)
    next(iter(alone))  # maps the file
    alone.restart()
    spawning = TokenLoader(dataset.part(2, 10), 2, shuffle=True, num_workers=1, multiprocessing_context="spawn")

    with closing(spawning) as loader:
        for theirs, ours in zip(loader, alone, strict=True):
            assert torch.equal(theirs["labels"], ours["labels"])


@pytest.mark.slow
def test_spawned_workers_deliver_what_forked_ones_do() -> None:
    def made(context: str) -> list[Any]:
        options: dict[str, Any] = {"num_workers": 2, "multiprocessing_context": context}
        with closing(TokenLoader(support.Noise(10), 2, shuffle=True, drop_last=False, **options)) as loader:
            return [batch.tolist() for batch in islice(stream(loader), 10)]

    assert made("spawn") == made("fork")


@pytest.mark.parametrize("num_workers", [0, 2])
def test_two_loaders_read_one_dataset_at_once(num_workers: int) -> None:
    dataset = Noise(8)
    alone = [batch.tolist() for batch in TokenLoader(dataset, 2, shuffle=True)]
    with (
        closing(TokenLoader(dataset, 2, shuffle=True, num_workers=num_workers)) as one,
        closing(TokenLoader(dataset, 2, shuffle=True, num_workers=num_workers)) as other,
    ):
        pairs = [(a.tolist(), b.tolist()) for a, b in zip(one, other, strict=True)]

    assert pairs == [(batch, batch) for batch in alone]


# ---------------------------------------------------------------------- ranks


def of_ranks(size: int, batch_size: int, world_size: int, **options: Any) -> list[list[list[int]]]:
    return [
        epoch(TokenLoader(Numbers(size), batch_size, rank=rank, world_size=world_size, **options))
        for rank in range(world_size)
    ]


def test_ranks_divide_the_order_into_global_batches_and_the_last_one_evenly() -> None:
    assert of_ranks(15, 2, 3, drop_last=False) == [
        [[0, 1], [6, 7], [12]],
        [[2, 3], [8, 9], [13]],
        [[4, 5], [10, 11], [14]],
    ]
    assert of_ranks(13, 2, 3, drop_last=False)[0][-1] == [12]
    assert {len(batches) for batches in of_ranks(17, 2, 3)} == {2}


@settings(max_examples=30)
@given(st.integers(6, 80), st.integers(1, 5), st.integers(1, 6), st.booleans())
def test_each_sample_comes_once_over_all_ranks(size: int, batch_size: int, world_size: int, shuffle: bool) -> None:
    ranks = of_ranks(size, batch_size, world_size, shuffle=shuffle, drop_last=False)
    whole = flat(epoch(TokenLoader(Numbers(size), batch_size, shuffle=shuffle, drop_last=False)))
    rounds = [batch for of_all in zip_longest(*ranks, fillvalue=[]) for batch in of_all]

    assert flat(rounds) == whole
    assert max(map(len, ranks)) - min(map(len, ranks)) <= 1


def test_ranks_with_workers_read_what_they_do_without() -> None:
    for rank, expected in enumerate(of_ranks(12, 2, 2, shuffle=True)):
        with closing(TokenLoader(Numbers(12), 2, shuffle=True, num_workers=2, rank=rank, world_size=2)) as loader:
            assert epoch(loader) == expected


@pytest.mark.parametrize("rank", [0, 1])
def test_every_rank_can_be_restored_from_the_position_of_rank_0(rank: int) -> None:
    def loader(rank: int) -> TokenLoader:
        return TokenLoader(Numbers(12), 2, shuffle=True, rank=rank, world_size=2)

    straight = [batch.tolist() for batch in islice(stream(loader(rank)), 9)]
    interrupted = loader(0)
    list(islice(stream(interrupted), 4))
    resumed = loader(rank)
    resumed.load_state_dict(interrupted.state_dict())

    assert [batch.tolist() for batch in islice(stream(resumed), 5)] == straight[4:]


def test_another_number_of_ranks_continues_with_the_same_samples() -> None:
    before = TokenLoader(Numbers(24), 2, shuffle=True, rank=0, world_size=2)
    list(islice(before, 3))
    after = [TokenLoader(Numbers(24), 4, shuffle=True, rank=rank, world_size=3) for rank in range(3)]
    for loader in after:
        loader.load_state_dict(before.state_dict())

    order = flat(epoch(TokenLoader(Numbers(24), 1, shuffle=True)))

    assert flat([next(iter(loader)).tolist() for loader in after]) == order[12:24]


def test_a_rank_that_gets_nothing_is_an_error() -> None:
    with pytest.raises(DataError, match="7 samples, fewer than one batch of 2 for each of 4 ranks, and drop_last"):
        TokenLoader(Numbers(7), 2, rank=0, world_size=4)
    with pytest.raises(DataError, match="3 samples, too few for 4 ranks to have one each"):
        TokenLoader(Numbers(3), 2, rank=3, world_size=4, drop_last=False)
    with pytest.raises(DataError, match="rank 2 of world_size 2: ranks count from 0"):
        TokenLoader(Numbers(7), 2, rank=2, world_size=2)


# ---------------------------------------------------------------------- datasets of others


@pytest.mark.parametrize(
    ("dataset", "expected"),
    [
        ([3, 4, 5, 6], [[3, 4], [5, 6]]),
        (np.arange(8, dtype=np.int16).reshape(4, 2), [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]),
        (torch.arange(4), [[0, 1], [2, 3]]),
        (TensorDataset(torch.arange(4), torch.arange(4) ** 2), [[[0, 1], [0, 1]], [[2, 3], [4, 9]]]),
        ([{"x": 1.0}, {"x": 2.0}], [{"x": [1.0, 2.0]}]),
    ],
    ids=["list", "array", "tensor", "TensorDataset", "mappings"],
)
def test_an_object_with_a_length_and_an_index_is_a_dataset(dataset: Any, expected: list[Any]) -> None:
    assert [as_lists(batch) for batch in TokenLoader(dataset, 2)] == expected


def as_lists(batch: Any) -> Any:
    if isinstance(batch, dict):
        return {name: field.tolist() for name, field in batch.items()}
    return [field.tolist() for field in batch]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_sample_that_fails_is_named(num_workers: int) -> None:
    message = r"^sample 3 of tests\.support\.datasets\.Failing: ValueError: boom \(datasets\.py, line \d+\)$"
    with closing(TokenLoader(support.Failing(6), 2, num_workers=num_workers)) as loader:
        next(iter(loader))
        for _ in range(2):  # the position stays where it is
            with pytest.raises(DataError, match=message) as failure:
                next(iter(loader))

    assert 'raise ValueError("boom")' in "".join(traceback.format_exception(failure.value))


def test_samples_that_make_no_batch_are_named() -> None:
    ragged = [torch.zeros(1), torch.zeros(2)] * 5

    with pytest.raises(DataError, match=r"^samples 0, 1 of builtins\.list: the samples cannot be stacked"):
        next(iter(TokenLoader(ragged, 2)))
    with pytest.raises(DataError, match=r"^samples 0, 1, 2, 3, 4, 5, 6, 7, … \(10 samples\) of"):
        next(iter(TokenLoader(ragged, 10)))


def test_what_a_collate_function_raises_is_one_error_too() -> None:
    with pytest.raises(DataError, match=r"samples 0, 1 of .*Numbers: ZeroDivisionError: .* \(test_loader\.py, line"):
        next(iter(TokenLoader(Numbers(2), 2, collate=lambda samples: 1 // 0)))


class Huge(Dataset[int]):
    def __init__(self) -> None:
        self.reads = 0

    def __len__(self) -> int:
        return 10**9

    def __getitem__(self, index: int) -> int:
        self.reads += 1
        return index


@pytest.mark.parametrize("position", [0, 10**6, 9 * 10**8])
def test_a_shuffled_order_of_a_thousand_million_takes_no_memory_and_no_search(position: int) -> None:
    dataset = Huge()
    tracemalloc.start()
    try:
        loader = TokenLoader(dataset, 4, shuffle=True)
        loader.load_state_dict({**loader.state_dict(), "samples": position})
        batch = next(iter(loader))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert batch.tolist() == SampleOrder(10**9, shuffle=True, seed=0).at(0, np.arange(position, position + 4)).tolist()
    assert dataset.reads == 4
    assert peak < 2**20


def test_other_data_is_refused_by_checksum_naming_both() -> None:
    state = TokenLoader(SyntheticTokenDataset(10, 4, 50, seed=0), 2).state_dict()
    other = TokenLoader(SyntheticTokenDataset(20, 4, 50, seed=0), 2)

    with pytest.raises(DataError, match=r"20 samples with checksum \w+ now, 10 samples with checksum"):
        other.load_state_dict(state)


def test_a_changed_order_is_taken_with_a_warning() -> None:
    state = TokenLoader(Numbers(10), 2, seed=0).state_dict()
    other = TokenLoader(Numbers(10), 2, seed=1, shuffle=True)

    with pytest.warns(SpeedtronicWarning, match=r"data\.seed, data\.shuffle"):
        other.load_state_dict(state)


def test_a_dataset_is_recognised_by_its_fingerprint_or_else_by_type_and_length() -> None:
    class Named(Numbers):
        fingerprint = "my data"

    def of(dataset: Dataset[int]) -> str:
        return TokenLoader(dataset, 1).fingerprint

    assert of(Named(3)) == "my data"
    assert of(Numbers(3)) == of(Numbers(3))
    assert len({of(Numbers(3)), of(Numbers(4)), of(Noise(3)), of(Subset(Numbers(4), range(3)))}) == 4


def test_sizes_that_give_no_batch_are_refused() -> None:
    with pytest.raises(DataError, match=r"3 samples, fewer than one batch of 4, and drop_last"):
        TokenLoader(Numbers(3), 4)
    with pytest.raises(DataError, match="the dataset is empty"):
        TokenLoader(Numbers(0), 4, drop_last=False)
    with pytest.raises(DataError, match="batch_size must be at least 1, not 0"):
        TokenLoader(Numbers(3), 0)
    assert len(TokenLoader(Numbers(3), 4, drop_last=False)) == 1


def test_a_dataset_without_a_length_is_refused() -> None:
    class Endless(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(int, 1)

    with pytest.raises(DataError, match="Endless has no length"):
        TokenLoader(Endless(), 1)


def test_synthetic_data_of_another_seed_say_what_they_depend_on() -> None:
    then = TokenLoader(SyntheticTokenDataset(10, 4, 50, seed=1), 2).state_dict()

    with pytest.raises(DataError, match=r"data\.validation_fraction and, for synthetic data, data\.seed .*run\.seed"):
        TokenLoader(SyntheticTokenDataset(10, 4, 50, seed=2), 2).load_state_dict(then)


@given(
    size=st.integers(1, 40),
    batch_size=st.integers(1, 5),
    world_size=st.integers(1, 3),
    drop_last=st.booleans(),
    read=st.integers(0, 12),
    skipped=st.integers(0, 30),
)
@settings(max_examples=60)
def test_skipping_batches_ends_where_reading_them_does(
    size: int, batch_size: int, world_size: int, drop_last: bool, read: int, skipped: int
) -> None:
    def loader() -> TokenLoader:
        return TokenLoader(
            Numbers(size),
            batch_size,
            shuffle=True,
            seed=3,
            drop_last=drop_last,
            world_size=world_size,
            collate=list,
        )

    def take(count: int, source: TokenLoader) -> list[Any]:
        taken: list[Any] = []
        while len(taken) < count:
            taken += islice(iter(source), count - len(taken))
        return taken

    try:
        reading, skipping = loader(), loader()
    except DataError:
        return  # too little data for a batch
    take(read, skipping)
    skipping.skip_batches(skipped)
    assert take(5, skipping) == take(read + skipped + 5, reading)[-5:]
    assert skipping.state_dict() == reading.state_dict()


def test_skipping_batches_with_workers_drops_what_they_fetched_ahead() -> None:
    with closing(TokenLoader(Numbers(20), 2, num_workers=2)) as loader:
        batches = iter(loader)
        next(batches)
        loader.skip_batches(4)
        assert next(iter(loader)).tolist() == [10, 11]
