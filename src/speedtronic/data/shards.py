"""Token shards: a folder of token files under one index, and the reader of such a folder.

    index.json           format, version, dtype, tokens, documents, vocab_size, the tokenizer's fingerprint, source,
                         and for each shard its file names, tokens, documents and the SHA-256 of both files' payloads;
                         written last: a folder with an index is complete
    tokenizer_spec.json  what `tokenizer_from_spec` needs to rebuild the tokenizer
    shard_00000.bin      a header of 32 bytes (magic, version, bytes per token, tokens; little-endian), then the tokens
    shard_00000.idx      a header of 32 bytes (magic, version, bytes per entry, entries), then for each document that
                         ends in this shard the position, within it, behind its separator (uint64)
    shard_00000.tgt      only in a set with targets: a header of 32 bytes (magic, version, bytes per entry, entries),
                         then for each token 1 if it is a target of training and 0 if it is not (uint8)

The index of a set with targets has version 3, any other one version 2: an older reader would train on all tokens.
A document may span several shards. The checksums do not cover the headers. `shard_writer.py` writes such a folder.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from io import FileIO
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, NonNegativeInt, ValidationError

from speedtronic.data.file_array import MOST_RESIDENT, FileArray, UnsignedArray, array_in_file
from speedtronic.data.tokenizers.base import Tokenizer, spec_fingerprint
from speedtronic.data.tokenizers.from_file import tokenizer_from_spec
from speedtronic.durable.files import where_looked
from speedtronic.errors import DataError

# ---------------------------------------------------------------------- the format

FORMAT = "speedtronic-token-shards"
VERSION = 2
"""Of the files, and of an index without targets."""
VERSION_WITH_TARGETS = 3
INDEX = "index.json"
TOKENIZER_SPEC = "tokenizer_spec.json"

HEADER = struct.Struct("<8sIIQ8x")
TOKENS_MAGIC = b"SPDTRNC\0"
DOCUMENTS_MAGIC = b"SPDTDOC\0"
TARGETS_MAGIC = b"SPDTTGT\0"
TOKEN_DTYPES: dict[str, np.dtype[np.unsignedinteger[Any]]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
POSITION_DTYPE = np.dtype("<u8")
TARGET_DTYPE = np.dtype("u1")
READ_AT_ONCE = 4 * 2**20


def file_size(dtype: np.dtype[Any], entries: int) -> int:
    """Bytes of a file with this many entries."""
    return HEADER.size + entries * dtype.itemsize


@dataclass(frozen=True)
class Shard:
    """One shard of a set.

    Attributes:
        file: the name of the file with its tokens.
        tokens: how many tokens it holds.
        sha256: the checksum (hex) of its tokens.
        documents_file: the name of the file with the ends of its documents.
        documents: how many documents end in it.
        documents_sha256: the checksum (hex) of these ends.
        targets_file: the name of the file that says which tokens are targets; None where all are.
        targets_sha256: the checksum (hex) of its entries.
    """

    file: str
    tokens: NonNegativeInt
    sha256: str
    documents_file: str
    documents: NonNegativeInt
    documents_sha256: str
    targets_file: str | None = None
    targets_sha256: str | None = None

    def files(self, dtype: np.dtype[Any]) -> Iterator[tuple[str, bytes, np.dtype[Any], int, str | None]]:
        """Its files: name, magic, dtype and number of entries, checksum. `dtype` is that of a token."""
        yield self.file, TOKENS_MAGIC, dtype, self.tokens, self.sha256
        yield self.documents_file, DOCUMENTS_MAGIC, POSITION_DTYPE, self.documents, self.documents_sha256
        if self.targets_file is not None:
            yield self.targets_file, TARGETS_MAGIC, TARGET_DTYPE, self.tokens, self.targets_sha256


class ShardIndex(BaseModel):
    """What `index.json` says, with the fields in the order of the file."""

    model_config = ConfigDict(frozen=True)

    format: str = FORMAT
    version: int = VERSION
    dtype: Literal["uint16", "uint32"]
    tokens: NonNegativeInt
    documents: NonNegativeInt
    vocab_size: int
    tokenizer_fingerprint: str
    source: dict[str, Any]
    shards: list[Shard]


def is_prepared(folder: Path) -> bool:
    """Whether `folder` holds a finished set of shards."""
    return (folder / INDEX).is_file()


# ---------------------------------------------------------------------- reading

_LARGEST_INDEX = 64 * 2**20  # bytes; a real one is a few hundred per shard
_LARGEST_SPEC = 512 * 2**20  # bytes; a vocabulary of a million tokens has some tens of MB

_MOST_OPEN = 128  # files; each keeps a file descriptor, mapped or not


class ShardSet:
    """The shards of a prepared folder as one long sequence of tokens; any position costs the same.

    Sizes and headers of all files are checked here, checksums by `verify`. A file is opened when it is first read. A
    set that is small enough to stay in memory is mapped; of a larger one, only what is asked for is read. So the
    memory of the process does not grow with the size of the set.

    Attributes:
        folder: the folder.
        dtype: the dtype of a token in the files.
        tokens: how many tokens there are, separators included.
        documents: how many documents end in them.
        vocab_size: ids of the tokenizer.
        source: where the text came from, as the writer recorded it.
        shards: the shards, in order.
        has_targets: whether only some tokens are targets of training; `read_targets` says which.

    Raises:
        DataError: naming the folder or file and what is wrong with it.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self._place = self.folder.absolute()  # for what is read later: the working directory may change
        try:
            index = _read_index(self.folder)
            self.dtype = TOKEN_DTYPES[index.dtype]
            self.tokens = index.tokens
            self.documents = index.documents
            self.vocab_size = index.vocab_size
            self.source = index.source
            self.shards = index.shards
            self.has_targets = index.version == VERSION_WITH_TARGETS
            self._tokenizer_fingerprint = index.tokenizer_fingerprint
            self._check_files()
        except OSError as error:
            raise _unreadable(self.folder, error) from error
        self._ends = list(accumulate(shard.tokens for shard in self.shards))
        size = self.tokens * self.dtype.itemsize + self.documents * POSITION_DTYPE.itemsize
        self._mapped = size <= MOST_RESIDENT
        self._open: dict[str, UnsignedArray | FileArray] = {}

    def _check_files(self) -> None:
        for what, total, parts in (
            ("tokens", self.tokens, sum(shard.tokens for shard in self.shards)),
            ("documents", self.documents, sum(shard.documents for shard in self.shards)),
        ):
            if parts != total:
                raise _broken(self.folder / INDEX, f"the shards' {what} do not add up to the total")
        if not (self.folder / TOKENIZER_SPEC).is_file():
            raise _broken(self.folder / TOKENIZER_SPEC, "the file is missing")
        for shard in self.shards:
            if (shard.targets_file is not None) != self.has_targets:
                raise _broken(self.folder / INDEX, f"its version does not agree with the files of {shard.file}")
            for name, magic, dtype, entries, _ in shard.files(self.dtype):
                # A name from the index must not lead out of the folder, on any operating system.
                if name in {"", ".", ".."} or Path(name).name != name or "\\" in name:
                    raise _broken(self.folder / INDEX, f"shard name {name!r} is not a plain file name")
                path = self.folder / name
                if not path.is_file():
                    raise _broken(path, "the file is missing")
                with path.open("rb", buffering=0) as file:
                    _check_size(path, file, dtype, entries)
                    header = file.read(HEADER.size)
                if header != HEADER.pack(magic, VERSION, dtype.itemsize, entries):
                    raise _broken(path, "the header does not agree with the index")

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that made the tokens.

        Raises:
            DataError: its description is damaged, or this version does not know its kind.
            MissingExtraError: the library that it needs is not installed.
        """
        path = self._place / TOKENIZER_SPEC
        try:
            spec = _read_json(path, _LARGEST_SPEC)
        except OSError as error:
            raise _unreadable(path, error) from error
        if not isinstance(spec, dict) or spec_fingerprint(spec) != self._tokenizer_fingerprint:
            raise _broken(path, "the tokenizer does not match its fingerprint")
        tokenizer = tokenizer_from_spec(spec)
        if tokenizer.vocab_size != self.vocab_size:
            raise _broken(
                self.folder / INDEX, f"a vocabulary of {self.vocab_size}, but its tokenizer has {tokenizer.vocab_size}"
            )
        return tokenizer

    @property
    def fingerprint(self) -> str:
        """SHA-256 (hex) over the checksums of the tokens and targets: equal for equal ones in equal shards."""
        parts = "".join(
            f"{shard.tokens}:{shard.sha256};"
            if shard.targets_sha256 is None
            else f"{shard.tokens}:{shard.sha256}:{shard.targets_sha256};"
            for shard in self.shards
        )
        return hashlib.sha256(f"{self.dtype.str};{parts}".encode()).hexdigest()

    def __len__(self) -> int:
        return self.tokens

    def read(self, start: int, out: npt.NDArray[np.int64]) -> None:
        """Fill `out` with the tokens from position `start` on, across shard borders.

        Raises:
            DataError: a file was shortened or removed after the set was opened.
        """
        self._read(self._tokens, start, out)

    def read_targets(self, start: int, out: npt.NDArray[np.bool_]) -> None:
        """Fill `out` with whether the tokens from position `start` on are targets. Raises DataError as `read`."""
        if self.has_targets:
            self._read(self._targets, start, out)
        else:
            out[:] = True

    def _read(self, array: Callable[[int], UnsignedArray | FileArray], start: int, out: npt.NDArray[Any]) -> None:
        # The first shard that ends behind `start` holds it.
        number = bisect_right(self._ends, start)
        offset = start - (self._ends[number - 1] if number else 0)
        part = array(number)[offset : offset + len(out)]
        filled = len(part)
        out[:filled] = part
        # The rest of the block lies at the beginning of the shards that follow.
        while filled < len(out):
            number += 1
            part = array(number)[: len(out) - filled]
            out[filled : filled + len(part)] = part
            filled += len(part)

    def document_starts(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """The positions in [start, stop) at which a document begins, ascending; 0 is one.

        Raises:
            DataError: as `read`.
        """
        start, stop = max(start, 0), min(stop, self.tokens)
        starts = [np.array([0] if start == 0 < stop else [], np.int64)]
        # A document begins where another one has ended. The shard that holds its separator records the end.
        number = bisect_right(self._ends, max(start - 1, 0))
        while number < len(self.shards) and (before := self._ends[number] - self.shards[number].tokens) < stop - 1:
            ends = self._documents(number)
            # The ends in [start, stop) of this shard, whose positions count from its own first token. Each document has
            # a token at least, so no more ends than tokens lie there.
            low = bisect_left(ends, start - before)
            high = bisect_left(ends, stop - before, low, min(low + stop - start, len(ends)))
            if low < high:
                starts.append(ends[low:high].astype(np.int64) + before)
            number += 1
        return np.concatenate(starts)

    def document_lengths(self) -> Iterator[npt.NDArray[np.int64]]:
        """Tokens of every document, separator included, in order; an array for each shard."""
        start = before = 0
        for number, shard in enumerate(self.shards):
            # The first document of this shard may have begun in an earlier one, at `start`.
            ends = self._documents(number)[:].astype(np.int64) + before
            yield np.diff(ends, prepend=start)
            start = int(ends[-1]) if len(ends) else start
            before += shard.tokens

    def check(self, tokens: npt.NDArray[np.int64]) -> None:
        """Raise DataError if tokens that were read here, of any shape, are outside the tokenizer's vocabulary."""
        if tokens.size and (largest := int(tokens.max())) >= self.vocab_size:
            raise DataError(
                f"{self.folder}: holds the token id {largest}, outside its tokenizer's vocabulary of "
                f"{self.vocab_size}: some of its files are damaged; `speedtronic data inspect {self.folder} "
                f"--verify` names them; delete the folder and prepare the data again"
            )

    def verify(self) -> None:
        """Compare every file with its checksum. Raises DataError naming all that differ, or one that cannot be read."""
        damaged = []
        for shard in self.shards:
            for name, _, _, _, expected in shard.files(self.dtype):
                digest = hashlib.sha256()
                try:
                    with (self._place / name).open("rb") as file:
                        file.seek(HEADER.size)
                        while piece := file.read(READ_AT_ONCE):
                            digest.update(piece)
                except OSError as error:
                    raise _unreadable(self.folder / name, error) from error
                if digest.hexdigest() != expected:
                    damaged.append(name)
        if damaged:
            raise _broken(self.folder, f"the content of {', '.join(damaged)} does not match its checksum")

    def _tokens(self, number: int) -> UnsignedArray | FileArray:
        shard = self.shards[number]
        opened = self._open.get(shard.file)
        return self._opened(shard.file, self.dtype, shard.tokens) if opened is None else opened

    def _documents(self, number: int) -> UnsignedArray | FileArray:
        shard = self.shards[number]
        opened = self._open.get(shard.documents_file)
        return self._opened(shard.documents_file, POSITION_DTYPE, shard.documents) if opened is None else opened

    def _targets(self, number: int) -> UnsignedArray | FileArray:
        shard = self.shards[number]
        assert shard.targets_file is not None, "the set has targets"
        opened = self._open.get(shard.targets_file)
        return self._opened(shard.targets_file, TARGET_DTYPE, shard.tokens) if opened is None else opened

    def _opened(self, name: str, dtype: np.dtype[np.unsignedinteger[Any]], entries: int) -> UnsignedArray | FileArray:
        if len(self._open) >= _MOST_OPEN:
            self._open.clear()
        path = self._place / name
        try:
            with path.open("rb", buffering=0) as file:
                _check_size(path, file, dtype, entries)  # reading a map beyond the end of its file is a SIGBUS
                self._open[name] = array_in_file(file, dtype, entries, HEADER.size, mapped=self._mapped)
        except OSError as error:
            raise _unreadable(path, error) from error
        return self._open[name]

    def __getstate__(self) -> dict[str, object]:
        state = {**self.__dict__, "_open": {}}
        state.pop("tokenizer", None)  # it may be large; it is rebuilt when it is used
        return state


def _read_index(folder: Path) -> ShardIndex:
    prepare = f"`speedtronic data prepare --source python-stdlib --out {folder}`"
    if not folder.exists():
        raise DataError(
            f"{folder}: no prepared data here; make it with {prepare}, or with your own files and folders in "
            f"place of `--source python-stdlib`{where_looked(folder)}"
        )
    path = folder / INDEX
    if not path.is_file():
        raise DataError(
            f"{folder}: not a prepared folder (it has no {INDEX}); prepare the text in it with `speedtronic data "
            f"prepare {folder} --out DIR`, and give DIR in its place"
        )
    content = _read_json(path, _LARGEST_INDEX)
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise _broken(path, f"not an index of {FORMAT}")
    if content.get("version") not in (VERSION, VERSION_WITH_TARGETS):
        raise DataError(
            f"{path}: format version {content.get('version')!r}; this Speedtronic reads versions {VERSION} and "
            f"{VERSION_WITH_TARGETS}: "
            f"prepare the data again with --force or use the version that wrote it"
        )
    try:
        return ShardIndex.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        raise _broken(path, f"a field is missing or wrong ({field}: {first['msg']})") from error


def _read_json(path: Path, largest: int) -> Any:
    if path.stat().st_size > largest:
        raise _broken(path, f"larger than {largest} bytes")
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise _broken(path, f"not valid JSON ({error})") from error


def _check_size(path: Path, file: BinaryIO | FileIO, dtype: np.dtype[Any], entries: int) -> None:
    size, expected = os.fstat(file.fileno()).st_size, file_size(dtype, entries)
    if size != expected:
        raise _broken(path, f"the file has {size} bytes in place of {expected}")


def _unreadable(path: Path, error: OSError) -> DataError:
    return DataError(f"{error.filename or path}: cannot be read: {error.strerror or error}")


def _broken(path: Path, reason: str) -> DataError:
    return DataError(f"{path}: {reason}; prepare the data again with `speedtronic data prepare … --force`")
