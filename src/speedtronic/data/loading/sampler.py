"""The order of samples as a pure function of (seed, epoch, position)."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from speedtronic.errors import DataError

_ROUNDS = 8
_LEAST_HALF_BITS = 3  # a smaller Feistel network reaches too few permutations
_TABULATED = 1024  # entries
_SHIFT = np.uint64(33)
_MULTIPLIERS = (np.uint64(0xFF51AFD7ED558CCD), np.uint64(0xC4CEB9FE1A85EC53))


def derive_seed(*parts: int | str) -> int:
    """A 64-bit seed that depends on every part and on their order."""
    text = ":".join(map(str, parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


class Permutation:
    """A keyed pseudo-random permutation of range(size) that answers for any position in O(1) time and memory.

    A balanced Feistel network (Luby & Rackoff 1988) over the next power of four permutes a slightly larger
    domain; an image outside range(size) is permuted again until it falls inside ("cycle walking", Black &
    Rogaway 2002), which takes under four passes on average, except for sizes below 16. The round function is
    MurmurHash3's 64-bit finaliser.
    """

    def __init__(self, size: int, key: int) -> None:
        self.size = size
        half_bits = max(_LEAST_HALF_BITS, ((size - 1).bit_length() + 1) // 2)
        self._half_bits = np.uint64(half_bits)
        self._mask = np.uint64((1 << half_bits) - 1)
        digest = hashlib.blake2b(str(key).encode(), digest_size=8 * _ROUNDS).digest()
        self._keys = np.frombuffer(digest, np.dtype("<u8")).astype(np.uint64)
        # A small set may walk dozens of times, so its network is tabulated.
        domain = 1 << 2 * half_bits
        self._table = self._network(np.arange(domain, dtype=np.uint64)) if domain <= _TABULATED else None

    def __call__(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The images of `positions`, each in range(size)."""
        values = self._image(positions.astype(np.uint64))
        outside = np.flatnonzero(values >= self.size)
        while len(outside):
            values[outside] = self._image(values[outside])
            outside = outside[values[outside] >= self.size]
        return values.astype(np.int64)

    def _image(self, values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        return self._network(values) if self._table is None else self._table[values]

    def _network(self, values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        left, right = values >> self._half_bits, values & self._mask
        for key in self._keys:
            left, right = right, left ^ (_mix(right ^ key) & self._mask)
        return (left << self._half_bits) | right


def _mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    for multiplier in _MULTIPLIERS:
        values ^= values >> _SHIFT
        values *= multiplier
    values ^= values >> _SHIFT
    return values


class SampleOrder:
    """Which sample comes at which position of which epoch: sequential, or a new permutation every epoch."""

    def __init__(self, size: int, *, shuffle: bool, seed: int) -> None:
        self.size = size
        self.shuffle = shuffle
        self.seed = seed

    def indices(self, epoch: int, start: int, stop: int) -> npt.NDArray[np.int64]:
        """The sample indices at positions start … stop − 1 of `epoch`; needs 0 ≤ start ≤ stop ≤ size."""
        return self.at(epoch, np.arange(start, stop, dtype=np.int64))

    def at(self, epoch: int, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The sample indices at `positions` of `epoch`, each in [0, size)."""
        if not self.shuffle:
            return positions
        return Permutation(self.size, derive_seed(self.seed, epoch))(positions)


@dataclass(frozen=True)
class Deal:
    """How readers share one order: dealt in rounds of world_size · batch_size samples, a batch to each reader.

    What is left for the last round is shared as evenly as can be, rank 0 having the most, or left out with
    `drop_last`.

    Raises:
        DataError: a batch size below 1, or a rank that there is not.
    """

    batch_size: int
    rank: int
    world_size: int
    drop_last: bool

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise DataError(f"batch_size must be at least 1, not {self.batch_size}")
        if not 0 <= self.rank < self.world_size:
            raise DataError(f"rank {self.rank} of world_size {self.world_size}: ranks count from 0")

    @property
    def round_size(self) -> int:
        """Samples that all readers take together."""
        return self.world_size * self.batch_size

    def share(self, left: int) -> range:
        """Which samples of a round are this reader's, counted from its start, when `left` samples are left."""
        size = min(left, self.round_size)
        if self.drop_last and size < self.round_size:
            return range(0)
        first, end = (-(-size * reader // self.world_size) for reader in (self.rank, self.rank + 1))
        return range(first, end)
