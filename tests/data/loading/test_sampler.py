from __future__ import annotations

import time
import tracemalloc
from collections import Counter

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from speedtronic.data.loading.sampler import BatchSampler, GlobalBatch, Permutation, SampleOrder, derive_seed


def samples_at(order: SampleOrder, epoch: int, start: int, stop: int) -> npt.NDArray[np.int64]:
    return order.at(epoch, np.arange(start, stop))


@given(st.integers(1, 3000), st.integers(0, 2**64))
def test_an_epoch_holds_every_sample_once(size: int, seed: int) -> None:
    order = samples_at(SampleOrder(size, shuffle=True, seed=seed), 0, 0, size)

    assert np.array_equal(np.sort(order), np.arange(size))


@pytest.mark.parametrize("size", [2**k + d for k in range(2, 17, 2) for d in (-1, 0, 1)])
def test_sizes_around_powers_of_four_are_permuted(size: int) -> None:
    images = Permutation(size, 7)(np.arange(size))

    assert len(np.unique(images)) == size
    assert images.max() == size - 1


@given(st.integers(1, 500), st.integers(0, 3), st.data())
def test_any_stretch_of_an_epoch_is_found_without_what_comes_before(size: int, epoch: int, data: st.DataObject) -> None:
    order = SampleOrder(size, shuffle=True, seed=5)
    start = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(start, size))

    assert np.array_equal(samples_at(order, epoch, start, stop), samples_at(order, epoch, 0, size)[start:stop])


def test_the_order_differs_between_epochs_and_seeds_and_repeats() -> None:
    def order(seed: int, epoch: int) -> tuple[int, ...]:
        return tuple(samples_at(SampleOrder(100, shuffle=True, seed=seed), epoch, 0, 100).tolist())

    orders = {order(seed, epoch) for seed in range(4) for epoch in range(4)}

    assert len(orders) == 16
    assert order(1, 2) == order(1, 2)


def test_without_shuffling_samples_come_in_their_own_order() -> None:
    assert samples_at(SampleOrder(10, shuffle=False, seed=1), 3, 4, 8).tolist() == [4, 5, 6, 7]


def test_the_order_is_the_same_in_every_version() -> None:
    """Checkpoints hold positions, so what stands at a position must never change."""
    order = SampleOrder(10, shuffle=True, seed=1234)

    assert samples_at(order, 0, 0, 10).tolist() == [2, 5, 9, 3, 8, 4, 1, 0, 7, 6]
    assert samples_at(order, 1, 0, 10).tolist() == [7, 0, 5, 4, 9, 1, 2, 8, 6, 3]
    assert samples_at(SampleOrder(10**6, shuffle=True, seed=0), 0, 0, 3).tolist() == [544887, 495720, 537083]


def test_small_sets_are_shuffled_evenly() -> None:
    """All 24 orders of four samples; chi-squared with 23 degrees of freedom exceeds 60 with p = 4e-5."""
    epochs = 2400
    order = SampleOrder(4, shuffle=True, seed=9)

    counts = Counter(tuple(samples_at(order, epoch, 0, 4).tolist()) for epoch in range(epochs))

    expected = epochs / 24
    assert len(counts) == 24
    assert sum((count - expected) ** 2 / expected for count in counts.values()) < 60


def test_every_sample_is_as_likely_at_every_position() -> None:
    size, epochs = 50, 2000
    order = SampleOrder(size, shuffle=True, seed=3)
    counts = np.zeros((size, size))
    for epoch in range(epochs):
        counts[np.arange(size), samples_at(order, epoch, 0, size)] += 1

    expected = epochs / size
    statistic = ((counts - expected) ** 2 / expected).sum()

    # (size − 1)² = 2401 degrees of freedom: mean 2401, standard deviation 69.
    assert abs(statistic - 2401) < 6 * 69


def test_neighbours_do_not_stay_neighbours() -> None:
    order = samples_at(SampleOrder(10_000, shuffle=True, seed=0), 0, 0, 10_000)

    assert (np.abs(np.diff(order)) == 1).sum() < 20


def test_the_last_position_of_a_huge_set_is_found_at_once() -> None:
    size = 10**15
    order = SampleOrder(size, shuffle=True, seed=0)
    began = time.perf_counter()

    last = samples_at(order, 10**6, size - 1, size)

    assert 0 <= last[0] < size
    assert time.perf_counter() - began < 1


def test_a_derived_seed_depends_on_every_part_and_their_order() -> None:
    seeds = {derive_seed(1, 2, 3), derive_seed(3, 2, 1), derive_seed(12, 3), derive_seed(1, 23)}

    assert len(seeds) == 4
    assert all(0 <= seed < 2**64 for seed in seeds)


def test_an_order_over_a_thousand_million_samples_takes_no_memory() -> None:
    tracemalloc.start()
    try:
        order = SampleOrder(10**9, shuffle=True, seed=0)
        seen = [samples_at(order, 0, start, start + 1000) for start in (0, 10**6, 9 * 10**8, 10**9 - 1000)]
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert len(np.unique(np.concatenate(seen))) == 4000
    assert peak < 2**20


def test_any_positions_are_looked_up_together() -> None:
    order = SampleOrder(100, shuffle=True, seed=1)

    assert order.at(2, np.array([7, 3, 7])).tolist() == [samples_at(order, 2, p, p + 1).item() for p in (7, 3, 7)]


@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 100))
def test_shares_cover_a_global_batch_and_differ_by_at_most_one(batch_size: int, world_size: int, left: int) -> None:
    shares = [GlobalBatch(batch_size, rank, world_size, drop_last=False).share(left) for rank in range(world_size)]
    sizes = [len(share) for share in shares]

    assert [sample for share in shares for sample in share] == list(range(min(left, batch_size * world_size)))
    assert max(sizes) - min(sizes) <= 1
    assert sizes[0] == max(sizes)


def test_drop_last_leaves_out_a_global_batch_that_is_not_full() -> None:
    batch = GlobalBatch(2, 1, 2, drop_last=True)

    assert batch.share(4) == batch.share(9) == range(2, 4)
    assert len(batch.share(3)) == 0


@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 3), st.integers(1, 60), st.booleans())
def test_ranks_in_step_have_as_many_batches_and_each_sample_once(
    batch_size: int, ranks: int, nodes: int, size: int, shuffle: bool
) -> None:
    """Within a node; an epoch of a node that gets no sample of the last global batch is a batch shorter."""
    world = ranks * nodes
    seen: Counter[int] = Counter()
    for node in range(nodes):
        counts = set()
        for rank in range(node * ranks, (node + 1) * ranks):
            part = GlobalBatch(batch_size, rank=rank, world_size=world, drop_last=False, in_step=ranks)
            order = SampleOrder(size, shuffle=shuffle, seed=1)
            batches = sum(part.goes_on(size - begin) for begin in range(0, size, part.size))
            counts.add(batches)
            for begin in range(0, size, part.size):
                share = part.share(size - begin)
                seen.update(samples_at(order, 0, begin + share.start, begin + share.stop).tolist())
        assert len(counts) == 1
    assert seen == Counter(range(size))


def test_ranks_in_step_begin_the_next_epoch_together() -> None:
    """7 samples for 3 ranks of 2: after the second batch, of which only rank 0 has a sample, all are in epoch 1."""
    for rank in range(3):
        sampler = BatchSampler(
            SampleOrder(7, shuffle=False, seed=0), GlobalBatch(2, rank=rank, world_size=3, drop_last=False, in_step=3)
        )
        batches = iter(sampler)
        found = [next(batches) for _ in range(3)]
        assert [batch.indices.tolist() for batch in found] == [
            [2 * rank, 2 * rank + 1],
            [6] if rank == 0 else [],
            [2 * rank, 2 * rank + 1],
        ]
        assert sampler.batches_per_epoch == 2
        positions = []
        for _ in range(3):
            sampler.advance()
            positions.append((sampler.epoch, sampler.samples))
        assert positions == [(0, 6), (1, 0), (1, 6)]
