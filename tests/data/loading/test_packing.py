from __future__ import annotations

import numpy as np
import pytest

from speedtronic.data.loading.packing import best_fit


def test_each_piece_goes_where_it_leaves_the_least_room() -> None:
    # 7, 6, 4, 3 and 3 open and fill: 7+3, 6+4, 3.
    assert best_fit(np.array([3, 4, 7, 6, 3]), 10).tolist() == [0, 1, 0, 1, 2]


@pytest.mark.parametrize("capacity", [1, 2, 16, 100])
def test_no_bin_is_overfull_and_bins_are_few(capacity: int) -> None:
    lengths = np.random.default_rng(capacity).integers(1, capacity + 1, 2000)
    bins = best_fit(lengths, capacity)
    filled = np.bincount(bins, weights=lengths)

    assert filled.max() <= capacity
    assert filled.min() > 0
    fewest = -(-lengths.sum() // capacity)
    assert len(filled) <= 11 / 9 * max(fewest, (lengths > capacity / 2).sum()) + 1


def test_nothing_to_pack_gives_no_bin() -> None:
    assert best_fit(np.array([], np.int64), 8).tolist() == []
