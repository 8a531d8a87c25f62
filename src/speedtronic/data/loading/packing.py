"""Packing: which documents share a sample, so that little of it is padding."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import numpy.typing as npt


def best_fit(lengths: npt.NDArray[np.int64], capacity: int) -> npt.NDArray[np.int64]:
    """The bin of each piece, from 0, by best fit on decreasing lengths (Johnson 1973).

    Each piece, the longest first, goes into the bin that it leaves the least room in, or into a new one. The number of
    bins is at most 11/9 of the fewest possible, and some. It is a function of the lengths alone.

    Args:
        lengths: of the pieces, each from 1 to `capacity`.
        capacity: of a bin.
    """
    bins = np.empty(len(lengths), np.int64)
    count = 0
    bins_with_room: defaultdict[int, list[int]] = defaultdict(list)
    rooms = 0  # bit r is set if a bin has room for r more: the lowest bit from `length` on is the best fit
    for piece in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[piece])
        fitting = rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            own = bins_with_room[room].pop()
            if not bins_with_room[room]:
                rooms ^= 1 << room
        else:
            room, own, count = capacity, count, count + 1
        bins[piece] = own
        if left := room - length:
            bins_with_room[left].append(own)
            rooms |= 1 << left
    return bins
