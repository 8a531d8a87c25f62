"""Fewer rows draw the same curve: extremes stay, means and percentiles are those of NumPy."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from speedtronic.report.sampling import bucket_percentiles, moving_average, spike_rows


@given(
    st.lists(st.lists(st.floats(width=32), min_size=2, max_size=2), max_size=200),
    st.integers(min_value=1, max_value=40),
)
def test_the_rows_keep_the_extremes_of_every_column(table: list[list[float]], buckets: int) -> None:
    columns = list(np.array(table, dtype=np.float64).reshape(len(table), 2).T)
    rows = spike_rows(columns, buckets)
    assert np.all(np.diff(rows) > 0)
    if not table:
        assert len(rows) == 0
        return
    assert (rows[0], rows[-1]) == (0, len(table) - 1)
    for column in columns:
        known = column[~np.isnan(column)]
        if len(known):
            taken = column[rows]
            assert (np.nanmin(taken), np.nanmax(taken)) == (known.min(), known.max())


def test_a_million_rows_become_a_few_and_a_single_spike_among_them_stays() -> None:
    column = np.sin(np.arange(1_000_000) / 1e5)
    column[[3, 123_456, 999_998]] = [9.0, -7.0, 8.0]
    rows = spike_rows([column, np.zeros_like(column)], 500)
    assert len(rows) <= 500 * 4 + 2
    assert {3, 123_456, 999_998} <= set(rows.tolist())


def test_a_moving_average_is_the_mean_of_its_window_and_a_huge_value_spoils_no_other() -> None:
    generator = np.random.default_rng(0)
    column = generator.normal(size=300)
    column[[50, 51]] = [np.nan, 1e300]
    rows = np.array([0, 1, 10, 49, 50, 60, 100, 299])
    found = moving_average(column, 20, rows)
    for row, mean in zip(rows, found, strict=True):
        window = column[row - min(19, row // 5) : row + 1]
        assert np.isclose(mean, np.nanmean(window), rtol=1e-12, atol=0), row
    assert np.isnan(moving_average(np.full(5, np.nan), 5, np.arange(5))).all()
    assert len(moving_average(np.empty(0), 5, np.arange(0))) == 0


def test_percentiles_of_buckets_are_those_of_numpy_and_skip_what_is_not_finite() -> None:
    column = np.concatenate([np.arange(100.0), [np.nan, np.inf, 7.0], np.full(3, np.nan)])
    rows, (median, high) = bucket_percentiles(column[:100], 4, (50, 95))
    assert rows.tolist() == [24, 49, 74, 99]
    np.testing.assert_allclose(median, [np.percentile(part, 50) for part in column[:100].reshape(4, 25)])
    np.testing.assert_allclose(high, [np.percentile(part, 95) for part in column[:100].reshape(4, 25)])
    rows, (median,) = bucket_percentiles(column[100:], 2, (50,))
    assert (rows.tolist(), median.tolist()) == ([2], [7.0])
    assert [len(part) for part in bucket_percentiles(np.empty(0), 1, (50, 95))[1]] == [0, 0]
