"""Fewer numbers that draw the same curve: rows that keep each spike, moving averages, percentiles."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from speedtronic.runs import Column

Rows = NDArray[np.intp]


def spike_rows(columns: Sequence[Column], buckets: int) -> Rows:
    """The rows that draw the curves of all columns: of each bucket of neighbours, where each is lowest and highest.

    With two buckets a pixel, the picture is that of all rows: the curve fills the same span of each pixel.

    Args:
        columns: of equal length; NaN is neither low nor high.
        buckets: into how many the rows are cut.

    Returns:
        Rows in their order, the first and the last among them; all rows where they are few.
    """
    length = len(columns[0]) if columns else 0
    if length <= 2 * buckets:
        return np.arange(length)
    size = -(-length // buckets)
    count = -(-length // size)
    starts = np.arange(count) * size
    found = [np.array([0, length - 1])]
    for column in columns:
        for sign in (1.0, -1.0):
            # In place of NaN, and behind the end, stands what no bucket chooses.
            padded = np.full(count * size, np.inf)
            padded[:length] = np.where(np.isnan(column), np.inf, sign * column)
            found.append(np.minimum(starts + padded.reshape(count, size).argmin(axis=1), length - 1))
    return np.unique(np.concatenate(found))


def moving_average(column: Column, window: int, rows: Rows) -> Column:
    """For each of `rows`, the mean of it and those before it: `window` of them, at most a fifth of all before it.

    So the steep start of a loss is not held up by its own past. NaN does not count; of nothing the mean is NaN. Each
    sum is taken by itself, so that one huge value spoils no mean but those that contain it.
    """
    if len(rows) == 0:
        return np.empty(0)
    first = rows - np.minimum(window - 1, rows // 5)
    # `reduceat` sums between each place and the next one: every second sum is wanted. The end may be a place too.
    places = np.column_stack([first, rows + 1]).ravel()
    known = np.append(np.isfinite(column), False)
    sums = np.add.reduceat(np.where(known, np.append(column, 0.0), 0.0), places)[::2]
    counts = np.add.reduceat(known.astype(np.float64), places)[::2]
    return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)


def bucket_percentiles(column: Column, buckets: int, percents: Sequence[float]) -> tuple[Rows, list[Column]]:
    """Percentiles of each bucket of neighbours.

    Returns:
        The last row of each bucket, and for each percent a column with a value for each bucket. A bucket without a
        finite value has none of its own.
    """
    parts = [rows for rows in np.array_split(np.arange(len(column)), max(1, min(buckets, len(column)))) if len(rows)]
    parts = [rows for rows in parts if np.isfinite(column[rows]).any()]
    values = [np.percentile(column[rows][np.isfinite(column[rows])], percents) for rows in parts]
    table = np.array(values).reshape(len(parts), len(percents))
    return np.array([rows[-1] for rows in parts], dtype=np.intp), list(table.T)
