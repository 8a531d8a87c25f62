"""Map-style datasets of token blocks.

Every dataset here gives samples of one shape: `block_size` input ids and as many labels. Label t is the token that
follows input t, or -100 where that is no target. Sample i of a token sequence covers tokens i·T … i·T + T, both
included: neighbouring blocks share one token, so that every token of the text except the first is a target once. A
tail that is shorter than a block is left out. A packed sample holds whole documents instead.
"""

from __future__ import annotations

import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset, get_worker_info

from speedtronic.data.loading.collate import IGNORED_LABEL, PADDING_ID
from speedtronic.data.loading.packing import best_fit
from speedtronic.data.prepare.text_cache import cached_tokens
from speedtronic.data.shards import ShardSet
from speedtronic.data.text import ByteText, check_text_file, read_text
from speedtronic.data.tokenizers.base import IdArray, Tokenizer, encode_pieces
from speedtronic.data.tokenizers.chars import CharTokenizer
from speedtronic.errors import DataError, warn

Indices = Sequence[int] | npt.NDArray[np.int64]


class TokenDataset(Dataset[dict[str, Tensor]], ABC):
    """Samples `{"input_ids": (T,), "labels": (T,)}` int64, which depend only on their index."""

    block_size: int

    @abstractmethod
    def __len__(self) -> int:
        """Number of samples."""

    @abstractmethod
    def batch(self, indices: Indices) -> dict[str, Tensor]:
        """`input_ids` and `labels` (B, T) int64 of several samples at once; the indices are in [0, len)."""

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """A checksum of what the samples contain. It does not depend on where the data lies."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        batch = self.batch([range(len(self))[index]])
        return {name: values[0] for name, values in batch.items()}

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        """All samples; in a worker of a DataLoader, that worker's share of them."""
        worker = get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker else (0, 1)
        return (self[index] for index in range(first, len(self), step))

    def part(self, start: int, stop: int) -> TokenDataset:
        """The samples start … stop − 1 as a separate dataset."""
        return _Part(self, range(start, stop))


class _Part(TokenDataset):
    def __init__(self, whole: TokenDataset, samples: range) -> None:
        self.block_size = whole.block_size
        self._whole = whole
        self._samples = samples

    def __len__(self) -> int:
        return len(self._samples)

    def batch(self, indices: Indices) -> dict[str, Tensor]:
        return self._whole.batch(np.asarray(indices, np.int64) + self._samples.start)

    @property
    def fingerprint(self) -> str:
        return checksum(self._whole.fingerprint, self._samples.start, self._samples.stop)


def checksum(*parts: object) -> str:
    """SHA-256 (hex) of some values."""
    return hashlib.sha256(":".join(map(str, parts)).encode()).hexdigest()


class _RowDataset(TokenDataset):
    """Samples of T + 1 consecutive tokens."""

    @abstractmethod
    def rows(self, indices: Indices) -> npt.NDArray[np.int64]:
        """The tokens of each sample, (B, T + 1)."""

    def batch(self, indices: Indices) -> dict[str, Tensor]:
        """`input_ids` and `labels` (B, T) int64 of several samples at once."""
        rows = self.rows(indices)
        return {
            "input_ids": torch.from_numpy(np.ascontiguousarray(rows[:, :-1])),
            "labels": torch.from_numpy(np.ascontiguousarray(rows[:, 1:])),
        }


class SyntheticTokenDataset(_RowDataset):
    """Noisy arithmetic progressions modulo the vocabulary. They need no file, and a model can learn them.

    Sample i starts at a random token and adds a stride of 1 to 4; one token in ten is replaced by a random
    one. It is a function of (seed, i): the numbers are raw outputs of the counter-based generator
    Philox4x64-10 (Salmon et al. 2011) with the seed as its key and the index in its counter.

    Args:
        num_samples: number of samples.
        block_size: T, tokens per sample.
        vocab_size: V; tokens are in [0, V).
        seed: any integer; taken modulo 2⁶⁴.

    Raises:
        DataError: for a size below 1.
    """

    _STRIDES = 4
    _NOISE = 0.1

    def __init__(self, num_samples: int, block_size: int, vocab_size: int, seed: int) -> None:
        for name, size in (
            ("num_samples", num_samples),
            ("block_size", block_size),
            ("vocab_size", vocab_size),
        ):
            if size < 1:
                raise DataError(f"synthetic data: {name} must be at least 1, not {size}")
        self.num_samples = num_samples
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.seed = seed
        self._generator = np.random.Philox(key=np.array([seed % 2**64, 0], np.uint64))
        self._state = self._generator.state

    def __len__(self) -> int:
        return self.num_samples

    def rows(self, indices: Indices) -> npt.NDArray[np.int64]:
        width = self.block_size + 1
        raw = np.empty((len(indices), 2 + 2 * width), np.uint64)
        for row, index in zip(raw, indices, strict=True):
            # Setting the counter costs a tenth of building a generator.
            self._state["state"]["counter"] = np.array([0, int(index), 0, 0], np.uint64)
            self._generator.state = self._state
            row[:] = self._generator.random_raw(len(row))
        # Two random numbers set the progression; each token takes one for its noise, and one for whether it is noisy.
        start, stride = raw[:, :1] % self.vocab_size, 1 + raw[:, 1:2] % self._STRIDES
        noise, chance = raw[:, 2 : 2 + width], raw[:, 2 + width :]
        tokens = (start + stride * np.arange(width, dtype=np.uint64)) % self.vocab_size
        replaced = chance < np.uint64(self._NOISE * 2**64)
        return np.where(replaced, noise % self.vocab_size, tokens).astype(np.int64)

    @property
    def fingerprint(self) -> str:
        return checksum("synthetic-1", self.num_samples, self.block_size, self.vocab_size, self.seed)


class TokenSequence(Protocol):
    """A long sequence of tokens that can be read at any position."""

    @property
    def fingerprint(self) -> str:
        """A checksum of the tokens."""

    def __len__(self) -> int:
        """Number of tokens."""

    def read(self, start: int, out: npt.NDArray[np.int64]) -> None:
        """Fill `out` with the tokens from position `start` on."""


class _TokensInMemory:
    def __init__(self, tokens: IdArray) -> None:
        self._tokens = tokens
        self.fingerprint = hashlib.sha256(tokens.tobytes()).hexdigest()

    def __len__(self) -> int:
        return len(self._tokens)

    def read(self, start: int, out: npt.NDArray[np.int64]) -> None:
        out[:] = self._tokens[start : start + len(out)]


class _BlockDataset(_RowDataset):
    """The blocks of one token sequence."""

    def __init__(self, sequence: TokenSequence, block_size: int, origin: str) -> None:
        if block_size < 1:
            raise DataError(f"block_size must be at least 1, not {block_size}")
        if len(sequence) < block_size + 1:
            raise DataError(
                f"{origin}: has {len(sequence)} tokens, but one block of {block_size} needs {block_size + 1} "
                f"(with the target of its last input); use more text or a smaller block_size"
            )
        self.block_size = block_size
        self._sequence = sequence

    def __len__(self) -> int:
        return (len(self._sequence) - 1) // self.block_size

    def rows(self, indices: Indices) -> npt.NDArray[np.int64]:
        rows = np.empty((len(indices), self.block_size + 1), np.int64)
        for row, index in zip(rows, indices, strict=True):
            self._sequence.read(int(index) * self.block_size, row)
        if isinstance(self._sequence, ShardSet):
            self._sequence.check(rows)
        return rows

    @property
    def fingerprint(self) -> str:
        return checksum(self._sequence.fingerprint, self.block_size)


class TextFileTokenDataset(_BlockDataset):
    """The blocks of a UTF-8 text file.

    With bytes as tokens any block costs the same to read. Other tokenizers encode the text
    once, into a cache on disk that later runs share. A tokenizer without a `spec` cannot be recognised, so it encodes
    the text into memory.

    Args:
        path: the text file.
        block_size: T, tokens per sample.
        tokenizer: None for `CharTokenizer(vocab_size)`.
        vocab_size: ids that the byte tokenizer may use, when `tokenizer` is None.
        warn: told where the cache cannot be written.

    Raises:
        DataError: a missing, empty or unreadable file, or a folder; text shorter than a block; invalid UTF-8,
            with file and offset; text that the vocabulary cannot hold. The first 64 MB of a byte-tokenized file
            are checked here, the rest when it is read. With any other tokenizer the whole text is checked here.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        block_size: int,
        tokenizer: Tokenizer | None = None,
        vocab_size: int = 256,
        *,
        warn: Callable[[str], None] = warn,
    ) -> None:
        self.path = Path(path).absolute()
        self.tokenizer: Tokenizer = CharTokenizer(vocab_size) if tokenizer is None else tokenizer
        sequence: TokenSequence
        if type(self.tokenizer) is CharTokenizer:
            sequence = ByteText(self.path, self.tokenizer)
        elif hasattr(self.tokenizer, "spec"):
            sequence = cached_tokens(self.path, self.tokenizer, warn=warn)
        else:
            check_text_file(self.path)
            sequence = _TokensInMemory(np.concatenate(list(encode_pieces(self.tokenizer, read_text(self.path)))))
        super().__init__(sequence, block_size, str(path))


class ShardDataset(_BlockDataset):
    """The blocks of a folder that `speedtronic data prepare` made.

    Args:
        shards: the folder, or an opened `ShardSet`.
        block_size: T, tokens per sample.
        document_mask: also give `document_ids` (T,) int64: 0 for the tokens of the first document in the sample, 1 for
            the next one, and so on. A document's separator is its last token.

    Raises:
        DataError: as `ShardSet` does, or the shards have fewer tokens than a block.
    """

    def __init__(self, shards: ShardSet | str | os.PathLike[str], block_size: int, document_mask: bool = False) -> None:
        self.shards = shards if isinstance(shards, ShardSet) else ShardSet(shards)
        self.document_mask = document_mask
        super().__init__(self.shards, block_size, str(self.shards.folder))

    def batch(self, indices: Indices) -> dict[str, Tensor]:
        """`input_ids` and `labels` (B, T) int64 of several samples, with `document_ids` (B, T) where asked for."""
        batch = super().batch(indices)
        if self.shards.has_targets:
            targets = np.empty(batch["labels"].shape, np.bool_)
            for row, index in zip(targets, indices, strict=True):
                self.shards.read_targets(int(index) * self.block_size + 1, row)
            # Labels and inputs may lie in the same memory, so these labels are new ones.
            batch["labels"] = batch["labels"].masked_fill(torch.from_numpy(~targets), IGNORED_LABEL)
        if self.document_mask:
            # A new document adds one to the id of the tokens from its first one on.
            begins = np.zeros((len(indices), self.block_size), np.int64)
            for row, index in zip(begins, indices, strict=True):
                start = int(index) * self.block_size
                row[self.shards.document_starts(start + 1, start + self.block_size) - start] = 1
            batch["document_ids"] = torch.from_numpy(begins.cumsum(axis=1))
        return batch


class PackedDataset(TokenDataset):
    """The documents of a prepared folder, packed by best fit: a sample holds whole documents and then padding.

    The last token of a document is a target only, so a document of n tokens takes n − 1 places, and no label reaches
    into the next document. A longer document is divided into pieces of T places, of which neighbours share one token.
    The order of the samples is fixed and random, so that the end of them, which a run holds out, is a fair sample. It
    takes 32 bytes of memory for each document.

    Args:
        shards: the folder, or an opened `ShardSet`.
        block_size: T, tokens per sample.
        document_mask: also give `document_ids` (T,) int64: 0 for the first piece in the sample, 1 for the next one, and
            so on; padding counts as one more.

    Raises:
        DataError: as `ShardSet` does, or no document has two tokens.
    """

    def __init__(self, shards: ShardSet | str | os.PathLike[str], block_size: int, document_mask: bool = False) -> None:
        if block_size < 1:
            raise DataError(f"block_size must be at least 1, not {block_size}")
        self.shards = shards if isinstance(shards, ShardSet) else ShardSet(shards)
        self.block_size = block_size
        self.document_mask = document_mask
        # Divide the documents, without their last tokens, into pieces.
        lengths = np.concatenate([*self.shards.document_lengths(), np.array([], np.int64)])
        lengths = np.append(lengths, len(self.shards) - lengths.sum())  # a last document without an end, mostly empty
        starts = np.cumsum(lengths) - lengths
        places = np.maximum(lengths - 1, 0)
        counts = -(-places // block_size)
        before = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)  # pieces of the same document
        self._starts = np.repeat(starts, counts) + before * block_size
        self._lengths = np.minimum(np.repeat(places, counts) - before * block_size, block_size)
        if not len(self._starts):
            raise DataError(f"{self.shards.folder}: no document has two tokens, one to read and one to learn")
        # Pack them, and put the samples into an order of chance.
        bins = best_fit(self._lengths, block_size)
        size = int(bins.max()) + 1
        chance = np.random.Philox(key=np.zeros(2, np.uint64)).random_raw(size)
        place = np.empty(size, np.int64)
        place[np.argsort(chance, kind="stable")] = np.arange(size)
        self._pieces = np.argsort(place[bins], kind="stable")
        self._ends = np.cumsum(np.bincount(place[bins]))

    def __len__(self) -> int:
        return len(self._ends)

    def batch(self, indices: Indices) -> dict[str, Tensor]:
        """`input_ids` and `labels` (B, T) int64 of several samples, with `document_ids` (B, T) where asked for."""
        shape = (len(indices), self.block_size)
        input_ids, labels = np.full(shape, PADDING_ID, np.int64), np.full(shape, IGNORED_LABEL, np.int64)
        document_ids = np.empty(shape, np.int64)
        for row, index in enumerate(indices):
            position = 0
            pieces = self._pieces[self._ends[index - 1] if index else 0 : self._ends[index]].tolist()
            for number, piece in enumerate(pieces):
                start, length = int(self._starts[piece]), int(self._lengths[piece])
                tokens, targets = np.empty(length + 1, np.int64), np.empty(length, np.bool_)
                self.shards.read(start, tokens)
                self.shards.read_targets(start + 1, targets)
                self.shards.check(tokens)
                stop = position + length
                input_ids[row, position:stop] = tokens[:-1]
                labels[row, position:stop] = np.where(targets, tokens[1:], IGNORED_LABEL)
                document_ids[row, position:stop] = number
                position = stop
            document_ids[row, position:] = len(pieces)
        batch = {"input_ids": torch.from_numpy(input_ids), "labels": torch.from_numpy(labels)}
        if self.document_mask:
            batch["document_ids"] = torch.from_numpy(document_ids)
        return batch

    @property
    def fingerprint(self) -> str:
        return checksum("packed-1", self.shards.fingerprint, self.block_size)
