"""The order of samples as a pure function of (seed, epoch, position), and its division into batches."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from speedtronic.errors import DataError

_ROUNDS = 8
_LEAST_HALF_BITS = 3  # a smaller Feistel network reaches too few permutations
_TABULATED = 1024  # entries
_SHIFT = np.uint64(33)
_MULTIPLIERS = (np.uint64(0xFF51AFD7ED558CCD), np.uint64(0xC4CEB9FE1A85EC53))
_ORDERED_AT_ONCE = 1024  # positions whose samples are looked up together; a trade of latency for array speed


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
        # The network works on pairs of numbers of `half_bits` bits each, the two halves of a position.
        half_bits = max(_LEAST_HALF_BITS, ((size - 1).bit_length() + 1) // 2)
        self._half_bits = np.uint64(half_bits)
        self._mask = np.uint64((1 << half_bits) - 1)
        digest = hashlib.blake2b(str(key).encode(), digest_size=8 * _ROUNDS).digest()
        self._round_keys = np.frombuffer(digest, np.dtype("<u8")).astype(np.uint64)
        # In a small domain a position may walk dozens of times, so the network is tabulated.
        domain = 1 << 2 * half_bits
        self._table = self._network(np.arange(domain, dtype=np.uint64)) if domain <= _TABULATED else None

    def __call__(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The images of `positions`, each in range(size)."""
        values = self._image(positions.astype(np.uint64))
        # Cycle walking: send the images outside range(size) through the network again until all are inside.
        outside = np.flatnonzero(values >= self.size)
        while len(outside):
            values[outside] = self._image(values[outside])
            outside = outside[values[outside] >= self.size]
        return values.astype(np.int64)

    def _image(self, values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        return self._network(values) if self._table is None else self._table[values]

    def _network(self, values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        left, right = values >> self._half_bits, values & self._mask
        for key in self._round_keys:
            # The round function mixes the bits of the right half; the left half absorbs them, and they swap places.
            mixed = right ^ key
            for multiplier in _MULTIPLIERS:
                mixed ^= mixed >> _SHIFT
                mixed *= multiplier
            mixed ^= mixed >> _SHIFT
            left, right = right, left ^ (mixed & self._mask)
        return (left << self._half_bits) | right


class SampleOrder:
    """Which sample comes at which position of which epoch: sequential, or a new permutation every epoch."""

    def __init__(self, size: int, *, shuffle: bool, seed: int) -> None:
        self.size = size
        self.shuffle = shuffle
        self.seed = seed

    def at(self, epoch: int, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The sample indices at `positions` of `epoch`, each in [0, size)."""
        if not self.shuffle:
            return positions
        return Permutation(self.size, derive_seed(self.seed, epoch))(positions)


@dataclass(frozen=True)
class GlobalBatch:
    """How the ranks divide one order: in global batches of world_size · batch_size samples, a batch to each rank.

    A last global batch that is not full is divided as evenly as possible, rank 0 gets the most; with `drop_last` it
    is left out.

    Attributes:
        in_step: how many ranks train one model together, from a multiple of it on. While one of them gets a sample of
            a global batch, those that get none have an empty batch, and all begin the next epoch together.

    Raises:
        DataError: a batch size below 1, or a rank outside [0, world_size).
    """

    batch_size: int
    rank: int
    world_size: int
    drop_last: bool
    in_step: int = 1

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise DataError(f"batch_size must be at least 1, not {self.batch_size}")
        if not 0 <= self.rank < self.world_size:
            raise DataError(f"rank {self.rank} of world_size {self.world_size}: ranks count from 0")
        if self.in_step < 1 or self.world_size % self.in_step:
            raise DataError(f"{self.in_step} ranks in step do not divide the world_size {self.world_size}")

    @property
    def size(self) -> int:
        """Samples that all ranks take together."""
        return self.world_size * self.batch_size

    def share(self, left: int) -> range:
        """Which samples of a global batch are this rank's, counted from its start, when `left` samples are left."""
        return self._between(self.rank, self.rank + 1, left)

    def goes_on(self, left: int) -> bool:
        """Whether any of the ranks in step has a share of a global batch, when `left` samples are left."""
        first = self.rank - self.rank % self.in_step
        return len(self._between(first, first + self.in_step, left)) > 0

    def _between(self, first: int, end: int, left: int) -> range:
        """The samples of the ranks from `first` to before `end`."""
        size = min(left, self.size)
        if self.drop_last and size < self.size:
            return range(0)
        # Rank r begins at size · r / world_size, rounded up.
        return range(-(-size * first // self.world_size), -(-size * end // self.world_size))


@dataclass(frozen=True)
class BatchIndices:
    """The samples of one batch: what a loader asks its workers for. Perhaps none, with ranks in step."""

    epoch: int
    indices: npt.NDArray[np.int64]


class BatchSampler:
    """The batches of one rank from a position on, epoch after epoch. Each `iter` starts at the current position.

    Attributes:
        order: the order of the samples.
        global_batch: how the ranks divide it.
        epoch: the epoch of the next batch, from 0.
        samples: how many samples all ranks together have taken in this epoch.

    Raises:
        DataError: there are too few samples for a batch on this rank.
    """

    def __init__(self, order: SampleOrder, global_batch: GlobalBatch) -> None:
        self.order = order
        self.global_batch = global_batch
        self.epoch = 0
        self.samples = 0
        if order.size == 0:
            raise DataError("the dataset is empty")
        if self.batches_per_epoch == 0:
            if not global_batch.drop_last:
                raise DataError(
                    f"the dataset has {order.size} samples, too few for {global_batch.world_size} ranks to have one "
                    f"each"
                )
            each = f" for each of {global_batch.world_size} ranks" if global_batch.world_size > 1 else ""
            raise DataError(
                f"the dataset has {order.size} samples, fewer than one batch of {global_batch.batch_size}{each}, and "
                f"drop_last leaves out batches that are not full; use a smaller micro_batch_size, a smaller block_size "
                f"or more data"
            )

    @property
    def batches_per_epoch(self) -> int:
        return self._batches_in(self.order.size)

    def _batches_in(self, samples: int) -> int:
        whole, rest = divmod(samples, self.global_batch.size)
        return whole + self.global_batch.goes_on(rest)

    def after(self, batches: int) -> tuple[int, int]:
        """The position, epoch and samples, that lies `batches` batches ahead."""
        left = self._batches_in(self.order.size - self.samples)
        if batches < left:
            return self.epoch, self.samples + batches * self.global_batch.size
        epochs, rest = divmod(batches - left, self.batches_per_epoch)
        return self.epoch + 1 + epochs, rest * self.global_batch.size

    def advance(self) -> None:
        """Count one batch as delivered."""
        self.move_to(self.epoch, min(self.samples + self.global_batch.size, self.order.size))

    def move_to(self, epoch: int, samples: int) -> None:
        """Go to a position, or to the start of the next epoch when no batch is left in this one."""
        over = not self.global_batch.goes_on(self.order.size - samples)
        self.epoch, self.samples = (epoch + 1, 0) if over else (epoch, samples)

    def __iter__(self) -> Iterator[BatchIndices]:
        epoch, start, size = self.epoch, self.samples, self.order.size
        stride = self.global_batch.size * max(1, _ORDERED_AT_ONCE // self.global_batch.batch_size)
        while True:
            # Look up the order of many batches at once, since arrays are much faster than single positions.
            for first in range(start, size, stride):
                shares = []
                for begin in range(first, min(first + stride, size), self.global_batch.size):
                    share = self.global_batch.share(min(first + stride, size) - begin)
                    shares.append(np.arange(begin + share.start, begin + share.stop, dtype=np.int64))
                indices = self.order.at(epoch, np.concatenate(shares))
                for begin, positions in zip(range(first, size, self.global_batch.size), shares, strict=False):
                    batch, indices = indices[: len(positions)], indices[len(positions) :]
                    if self.global_batch.goes_on(size - begin):
                        yield BatchIndices(epoch, batch)
            epoch, start = epoch + 1, 0
