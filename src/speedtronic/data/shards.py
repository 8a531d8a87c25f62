"""Token shards: a folder of token files under one index.

    index.json           format, version, dtype, tokens, documents, vocab_size, the tokenizer's fingerprint, source,
                         and of each shard its file names, tokens, documents and the SHA-256 of both files' payloads;
                         written last: a folder with it is whole
    tokenizer_spec.json  what `tokenizer_from_spec` needs to rebuild the tokenizer
    shard_00000.bin      a header of 32 bytes (magic, version, bytes per token, tokens; little-endian), then the tokens
    shard_00000.idx      a header of 32 bytes (magic, version, bytes per entry, entries), then for each document that
                         ends in this shard the position, within it, behind its separator (uint64)

A document may span several shards. The checksums leave the headers out.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
import socket
import struct
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from io import FileIO
from itertools import accumulate
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from speedtronic.data.tokenizers.base import IdArray, Tokenizer, spec_fingerprint
from speedtronic.data.tokenizers.from_file import tokenizer_from_spec
from speedtronic.durable.processes import process_is_alive
from speedtronic.errors import DataError

FORMAT = "speedtronic-token-shards"
VERSION = 2
INDEX = "index.json"
TOKENIZER_SPEC = "tokenizer_spec.json"
DEFAULT_SHARD_TOKENS = 64 * 2**20

_HEADER = struct.Struct("<8sIIQ8x")
_TOKENS_MAGIC = b"SPDTRNC\0"
_DOCUMENTS_MAGIC = b"SPDTDOC\0"
_DTYPES: dict[str, np.dtype[np.unsignedinteger[Any]]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
_POSITION = np.dtype("<u8")
_LARGEST_INDEX = 64 * 2**20  # bytes; a real one is a few hundred per shard
_LARGEST_SPEC = 512 * 2**20  # bytes; a vocabulary of a million tokens has some tens of MB
_READ_AT_ONCE = 4 * 2**20

_MOST_MAPPED = 128  # files; each map keeps a file descriptor
_MOST_RESIDENT = 256 * 2**20  # bytes
_FAULT_AROUND = 64 * 2**10  # bytes that Linux maps for one page that is touched


def _token_dtype(vocab_size: int) -> np.dtype[np.unsignedinteger[Any]]:
    """How shards hold the ids of a vocabulary: uint16 up to 65,536 of them, else uint32."""
    return _DTYPES["uint16" if vocab_size <= 2**16 else "uint32"]


@dataclass(frozen=True)
class Shard:
    """One shard of a set.

    Attributes:
        file: the name of the file of its tokens.
        tokens: how many it holds.
        sha256: the checksum (hex) of its tokens.
        documents_file: the name of the file of its documents' ends.
        documents: how many documents end in it.
        documents_sha256: the checksum (hex) of these ends.
    """

    file: str
    tokens: int
    sha256: str
    documents_file: str
    documents: int
    documents_sha256: str


class _Payload:
    """A file of a header and fixed-size entries that is being written. The header is filled in at the end."""

    def __init__(self, path: Path, magic: bytes, dtype: np.dtype[Any], entries: int = 0) -> None:
        """Begin a file, or with `entries` go on behind so many of one that is there."""
        self.name = path.name
        self.entries = entries
        self._magic = magic
        self._dtype = dtype
        self._digest = hashlib.sha256()
        self._file: BinaryIO = path.open("r+b" if entries else "wb")
        try:
            if entries:
                self._go_on()
            else:
                self._file.write(self._header())
        except BaseException:
            self.close()
            raise

    def _go_on(self) -> None:
        _check_length(Path(self._file.name), self._dtype, self.entries)
        self._file.truncate(_size(self._dtype, self.entries))
        self._file.seek(_HEADER.size)
        while piece := self._file.read(_READ_AT_ONCE):
            self._digest.update(piece)

    def _header(self) -> bytes:
        return _HEADER.pack(self._magic, VERSION, self._dtype.itemsize, self.entries)

    def append(self, values: npt.NDArray[Any]) -> None:
        payload = values.astype(self._dtype, copy=False).tobytes()
        self._file.write(payload)
        self._digest.update(payload)
        self.entries += len(values)

    def sync(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())

    def finish(self) -> str:
        """The checksum of the whole file, which is on the disk now."""
        self._file.seek(0)
        self._file.write(self._header())
        self.sync()
        self._file.close()
        return self._digest.hexdigest()

    def close(self) -> None:
        # After a failed write the rest that is buffered cannot be written either, and need not be.
        with suppress(OSError):
            self._file.close()


class ShardFiles:
    """The files of a set that is being written into an existing folder.

    What has been written can be left at any `saved()` state and gone on with later, to equal files.

    Args:
        folder: where the files are; nobody else writes there.
        tokenizer: whose ids these are.
        shard_tokens: the most tokens in one shard.
        state: what `saved` returned; None to begin.

    Raises:
        DataError: a shard of no tokens.
        OSError: a file that `state` needs is missing or too short, or cannot be written.
    """

    def __init__(
        self,
        folder: Path,
        *,
        tokenizer: Tokenizer,
        shard_tokens: int = DEFAULT_SHARD_TOKENS,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        if shard_tokens < 1:
            raise DataError(f"a shard must hold at least 1 token, not {shard_tokens}")
        self.tokens = 0
        self.documents = 0
        self._folder = folder
        self._tokenizer = tokenizer
        self._vocab_size = tokenizer.vocab_size
        self._separator = np.array([tokenizer.separator_id], np.uint32)
        self._shard_tokens = shard_tokens
        self._dtype = _token_dtype(self._vocab_size)
        self._shards: list[Shard] = []
        self._open: tuple[_Payload, _Payload] | None = None
        if state is not None:
            self._restore(state)

    def _restore(self, state: Mapping[str, Any]) -> None:
        self.tokens, self.documents = state["tokens"], state["documents"]
        self._shards = [Shard(**shard) for shard in state["shards"]]
        for shard in self._shards:
            _check_length(self._folder / shard.file, self._dtype, shard.tokens)
            _check_length(self._folder / shard.documents_file, _POSITION, shard.documents)
        kept = {name for shard in self._shards for name in (shard.file, shard.documents_file)}
        if state["open"] is not None:
            self._open = self._payloads(*state["open"])
            kept.update(payload.name for payload in self._open)
        for path in self._folder.iterdir():
            if path.name not in kept:
                path.unlink()

    def saved(self) -> dict[str, Any]:
        """A JSON-able description of what is on the disk now."""
        for payload in self._open or ():
            payload.sync()
        return {
            "tokens": self.tokens,
            "documents": self.documents,
            "shards": [asdict(shard) for shard in self._shards],
            "open": None if self._open is None else [payload.entries for payload in self._open],
        }

    def append(self, ids: IdArray, ends: npt.NDArray[np.int64]) -> None:
        """Append token ids, separators included.

        Args:
            ids: (T,), any unsigned integers.
            ends: ascending positions in `ids`, each one behind the separator of a document.

        Raises:
            DataError: for an id outside the tokenizer's vocabulary.
        """
        if len(ids) and (largest := int(ids.max())) >= self._vocab_size:
            raise DataError(f"token id {largest} does not fit the tokenizer's vocabulary of {self._vocab_size}")
        self.tokens += len(ids)
        self.documents += len(ends)
        while len(ids):
            tokens, documents = self._open = self._open or self._payloads()
            part = ids[: self._shard_tokens - tokens.entries]
            within = ends[: ends.searchsorted(len(part), side="right")]
            documents.append(within + tokens.entries)
            tokens.append(part)
            ids, ends = ids[len(part) :], ends[len(within) :] - len(part)
            if tokens.entries == self._shard_tokens:
                self._close_shard()

    def write(self, ids: IdArray) -> None:
        """Append token ids of a document. Raises DataError for an id outside the tokenizer's vocabulary."""
        self.append(ids, _NO_ENDS)

    def end_document(self) -> None:
        """Append the tokenizer's separator and count a document."""
        self.append(self._separator, _END_OF_ONE)

    def _payloads(self, tokens: int = 0, documents: int = 0) -> tuple[_Payload, _Payload]:
        path = self._folder / f"shard_{len(self._shards):05d}.bin"
        first = _Payload(path, _TOKENS_MAGIC, self._dtype, tokens)
        try:
            return first, _Payload(path.with_suffix(".idx"), _DOCUMENTS_MAGIC, _POSITION, documents)
        except BaseException:
            first.close()
            raise

    def _close_shard(self) -> None:
        if self._open is None:
            return
        tokens, documents = self._open
        self._shards.append(
            Shard(
                file=tokens.name,
                tokens=tokens.entries,
                sha256=tokens.finish(),
                documents_file=documents.name,
                documents=documents.entries,
                documents_sha256=documents.finish(),
            )
        )
        self._open = None

    def finish(self, source: Mapping[str, Any]) -> None:
        """Close the last shard and write the index: the folder is a prepared one now."""
        self._close_shard()
        spec = self._tokenizer.spec()
        index = {
            "format": FORMAT,
            "version": VERSION,
            "dtype": self._dtype.name,
            "tokens": self.tokens,
            "documents": self.documents,
            "vocab_size": self._vocab_size,
            "tokenizer_fingerprint": spec_fingerprint(spec),
            "source": source,
            "shards": [asdict(shard) for shard in self._shards],
        }
        _write_json(self._folder / TOKENIZER_SPEC, spec)
        _write_json(self._folder / INDEX, index)

    def close(self) -> None:
        """Give the files up as they are."""
        for payload in self._open or ():
            payload.close()


_NO_ENDS = np.array([], np.int64)
_END_OF_ONE = np.array([1], np.int64)
_FIRST = np.array([0], np.int64)


def _size(dtype: np.dtype[Any], entries: int) -> int:
    """Bytes of a file of so many entries."""
    return _HEADER.size + entries * dtype.itemsize


def _check_length(path: Path, dtype: np.dtype[Any], entries: int) -> None:
    if path.stat().st_size < _size(dtype, entries):
        raise OSError(f"{path} is shorter than it was")


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    with path.open("wb") as file:
        file.write(json.dumps(content, indent=1).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


class ShardWriter(ShardFiles):
    """Writes a folder of shards; used as a context manager, it publishes the folder when the block ends well.

    Everything is written to a folder beside `folder` and renamed at the end, so a reader sees all or nothing;
    a block that raises leaves no trace.

    Args:
        folder: where the shards will be.
        tokenizer: whose ids these are; its spec is kept with them.
        shard_tokens: the most tokens in one shard.
        replace: take the place of a prepared folder; without it, one that is there is an OSError.

    Attributes:
        source: JSON-able facts about where the text came from, kept in the index.
        tokens: how many have been written, separators included.
        documents: how many have been ended.

    Raises:
        DataError: a shard of no tokens.
    """

    def __init__(
        self,
        folder: Path,
        *,
        tokenizer: Tokenizer,
        shard_tokens: int = DEFAULT_SHARD_TOKENS,
        replace: bool = False,
    ) -> None:
        super().__init__(_beside(folder, "partial"), tokenizer=tokenizer, shard_tokens=shard_tokens)
        self.source: dict[str, Any] = {}
        self._published = folder
        self._replace = replace

    def __enter__(self) -> ShardWriter:
        self._folder.mkdir(parents=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self.finish(self.source)
                publish(self._folder, self._published, replace=self._replace)
        finally:
            self.close()
            shutil.rmtree(self._folder, ignore_errors=True)


def publish(finished: Path, folder: Path, *, replace: bool) -> None:
    """Rename a finished folder to `folder`, which may be an empty one or, with `replace`, a prepared one."""
    if replace and is_prepared(folder):
        _swap(finished, folder)
    else:
        _move(finished, folder)


def _beside(folder: Path, purpose: str) -> Path:
    return folder.parent / f".{folder.name}.{purpose}-{_host()}-{os.getpid()}-{secrets.token_hex(4)}"


def _host() -> str:
    return hashlib.blake2b(socket.gethostname().encode(), digest_size=4).hexdigest()


def remove_leftovers(folder: Path) -> None:
    """Remove what processes of this host that were killed while they wrote `folder` have left beside it."""
    pattern = re.compile(rf"\.{re.escape(folder.name)}\.(partial|old)-{_host()}-(\d+)-[0-9a-f]+")
    # What cannot be listed or removed is no obstacle here; if it is one to writing, that will say so.
    with suppress(OSError):
        for path in list(folder.parent.iterdir()):
            found = pattern.fullmatch(path.name)
            if found is None or process_is_alive(int(found[2])):
                continue
            if found[1] == "old" and not folder.exists():
                path.rename(folder)  # killed between the two renames of a replacement
            else:
                shutil.rmtree(path, ignore_errors=True)


def _move(new: Path, folder: Path) -> None:
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()
    new.rename(folder)


def _swap(new: Path, folder: Path) -> None:
    old = _beside(folder, "old")
    try:
        folder.rename(old)
        new.rename(folder)
    except BaseException:  # an interrupt too puts the old folder back; it is raised on
        if not folder.exists():
            old.rename(folder)
        raise
    shutil.rmtree(old)


def is_prepared(folder: Path) -> bool:
    """Whether `folder` holds a finished set of shards."""
    return (folder / INDEX).is_file()


class ShardSet:
    """The shards of a prepared folder as one long sequence of tokens; any position costs the same.

    Sizes and headers of all files are checked here, checksums by `verify`. A file is mapped into memory when it
    is first read; the maps are dropped now and then, so that neither they nor the pages they hold grow with the
    size of the set.

    Attributes:
        folder: the folder.
        dtype: of a token in the files.
        tokens: how many there are, separators included.
        documents: how many documents end in them.
        vocab_size: ids of the tokenizer.
        source: where the text came from, as the writer put it.
        shards: the files.

    Raises:
        DataError: naming the folder or file and what is wrong with it.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        try:
            self._open()
        except OSError as error:
            raise _unreadable(self.folder, error) from error
        self._ends = list(accumulate(shard.tokens for shard in self.shards))
        self._fits_in_memory = self.tokens * self.dtype.itemsize + self.documents * _POSITION.itemsize <= _MOST_RESIDENT
        self._maps: dict[str, npt.NDArray[np.unsignedinteger[Any]]] = {}
        self._touched = 0

    def _open(self) -> None:
        index = _read_index(self.folder)
        try:
            self.dtype = _DTYPES[index["dtype"]]
            self.tokens = int(index["tokens"])
            self.documents = int(index["documents"])
            self.vocab_size = int(index["vocab_size"])
            self.source: dict[str, Any] = dict(index["source"])
            self.shards = [_shard(entry) for entry in index["shards"]]
            self._tokenizer_fingerprint = str(index["tokenizer_fingerprint"])
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise _broken(self.folder / INDEX, f"a field is missing or wrong ({error})") from error
        self._check()

    def _check(self) -> None:
        if sum(shard.tokens for shard in self.shards) != self.tokens:
            raise _broken(self.folder / INDEX, "the shards' tokens do not add up to the total")
        if sum(shard.documents for shard in self.shards) != self.documents:
            raise _broken(self.folder / INDEX, "the shards' documents do not add up to the total")
        if not (self.folder / TOKENIZER_SPEC).is_file():
            raise _broken(self.folder / TOKENIZER_SPEC, "the file is missing")
        for shard in self.shards:
            self._check_file(shard.file, _TOKENS_MAGIC, self.dtype, shard.tokens)
            self._check_file(shard.documents_file, _DOCUMENTS_MAGIC, _POSITION, shard.documents)

    def _check_file(self, name: str, magic: bytes, dtype: np.dtype[Any], entries: int) -> None:
        if name in {"", ".", ".."} or Path(name).name != name or "\\" in name:
            raise _broken(self.folder / INDEX, f"shard name {name!r} is not a plain file name")
        path = self.folder / name
        if not path.is_file():
            raise _broken(path, "the file is missing")
        with path.open("rb", buffering=0) as file:
            _check_size(path, file, dtype, entries)
            header = file.read(_HEADER.size)
        if header != _HEADER.pack(magic, VERSION, dtype.itemsize, entries):
            raise _broken(path, "the header does not agree with the index")

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that made the tokens.

        Raises:
            DataError: its description is damaged, or of a kind that this version does not know.
            MissingExtraError: the library that it needs is not installed.
        """
        path = self.folder / TOKENIZER_SPEC
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
        """SHA-256 (hex) over the checksums of the tokens: equal for equal tokens in equal shards."""
        parts = "".join(f"{shard.tokens}:{shard.sha256};" for shard in self.shards)
        return hashlib.sha256(f"{self.dtype.str};{parts}".encode()).hexdigest()

    def __len__(self) -> int:
        return self.tokens

    def read(self, start: int, out: npt.NDArray[np.int64]) -> None:
        """Fill `out` with the tokens from position `start` on, across shard borders.

        Raises:
            DataError: a file has become shorter or vanished since the set was opened.
        """
        number = bisect_right(self._ends, start)
        offset = start - (self._ends[number - 1] if number else 0)
        part = self._tokens(number)[offset : offset + len(out)]
        if len(part) == len(out):
            out[:] = part
        else:
            self._read_across(number, offset, out)
        if not self._fits_in_memory:
            self._bound(len(out) * self.dtype.itemsize)

    def _read_across(self, number: int, offset: int, out: npt.NDArray[np.int64]) -> None:
        filled = 0
        while filled < len(out):
            part = self._tokens(number)[offset : offset + len(out) - filled]
            out[filled : filled + len(part)] = part
            filled += len(part)
            number, offset = number + 1, 0

    def document_starts(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """The positions in [start, stop) at which a document begins, ascending; 0 is one.

        Raises:
            DataError: as `read`.
        """
        start, stop = max(start, 0), min(stop, self.tokens)
        starts = [_FIRST if start == 0 < stop else _NO_ENDS]
        # A document begins where another has ended, which the shard of its separator records.
        number = bisect_right(self._ends, max(start - 1, 0))
        while number < len(self.shards) and (before := self._ends[number] - self.shards[number].tokens) < stop - 1:
            ends = self._documents(number)
            low, high = ends.searchsorted(np.array([max(start - before, 0), stop - before], _POSITION))
            if low < high:
                starts.append(ends[low:high].astype(np.int64) + before)
            number += 1
        if not self._fits_in_memory:
            self._bound(sum(part.nbytes for part in starts))
        return np.concatenate(starts)

    def document_lengths(self) -> Iterator[npt.NDArray[np.int64]]:
        """Tokens of every document, separator included, in order; an array for each shard."""
        start = before = 0
        for number, shard in enumerate(self.shards):
            ends = self._documents(number).astype(np.int64) + before
            yield np.diff(ends, prepend=start)
            if not self._fits_in_memory:
                self._bound(ends.nbytes)
            start = int(ends[-1]) if len(ends) else start
            before += shard.tokens

    def check(self, tokens: npt.NDArray[np.int64]) -> None:
        """Raise DataError if tokens that were read here, of any shape, cannot be the tokenizer's."""
        if tokens.size and (largest := int(tokens.max())) >= self.vocab_size:
            raise DataError(
                f"{self.folder}: holds the token id {largest}, outside its tokenizer's vocabulary of "
                f"{self.vocab_size}: its files have been damaged; `speedtronic data inspect {self.folder} "
                f"--verify` names those, and deleting the folder lets it be made again"
            )

    def _tokens(self, number: int) -> npt.NDArray[np.unsignedinteger[Any]]:
        shard = self.shards[number]
        mapped = self._maps.get(shard.file)
        return self._map(shard.file, self.dtype, shard.tokens) if mapped is None else mapped

    def _documents(self, number: int) -> npt.NDArray[np.unsignedinteger[Any]]:
        shard = self.shards[number]
        mapped = self._maps.get(shard.documents_file)
        return self._map(shard.documents_file, _POSITION, shard.documents) if mapped is None else mapped

    def _map(self, name: str, dtype: np.dtype[Any], entries: int) -> npt.NDArray[np.unsignedinteger[Any]]:
        if len(self._maps) >= _MOST_MAPPED:
            self._maps.clear()
        if not entries:
            mapped = np.empty(0, dtype)
        else:
            path = self.folder / name
            try:
                with path.open("rb", buffering=0) as file:
                    _check_size(path, file, dtype, entries)  # reading a map beyond the end of its file is a SIGBUS
                    # A plain view: slicing numpy's memmap class costs several times more.
                    mapped = np.asarray(np.memmap(file, dtype, mode="r", offset=_HEADER.size, shape=(entries,)))
            except OSError as error:
                raise _unreadable(path, error) from error
        self._maps[name] = mapped
        return mapped

    def _bound(self, read: int) -> None:
        """Drop the maps, and with them the pages that the process holds, when reads have touched many of these."""
        self._touched += read + _FAULT_AROUND
        if self._touched > _MOST_RESIDENT:
            self._touched = 0
            self._maps.clear()

    def verify(self) -> None:
        """Compare every file with its checksum. Raises DataError naming all that differ, or one that cannot be read."""
        checksums = {
            name: checksum
            for shard in self.shards
            for name, checksum in ((shard.file, shard.sha256), (shard.documents_file, shard.documents_sha256))
        }
        bad = [name for name, checksum in checksums.items() if self._checksum(name) != checksum]
        if bad:
            raise _broken(self.folder, f"the content of {', '.join(bad)} does not match its checksum")

    def _checksum(self, name: str) -> str:
        digest = hashlib.sha256()
        try:
            with (self.folder / name).open("rb") as file:
                file.seek(_HEADER.size)
                while piece := file.read(_READ_AT_ONCE):
                    digest.update(piece)
        except OSError as error:
            raise _unreadable(self.folder / name, error) from error
        return digest.hexdigest()

    def __getstate__(self) -> dict[str, object]:
        state = {**self.__dict__, "_maps": {}}
        state.pop("tokenizer", None)  # it may be large, and is rebuilt where it is asked for
        return state


def _shard(entry: Mapping[str, Any]) -> Shard:
    return Shard(
        file=str(entry["file"]),
        tokens=int(entry["tokens"]),
        sha256=str(entry["sha256"]),
        documents_file=str(entry["documents_file"]),
        documents=int(entry["documents"]),
        documents_sha256=str(entry["documents_sha256"]),
    )


def _check_size(path: Path, file: BinaryIO | FileIO, dtype: np.dtype[Any], entries: int) -> None:
    size, expected = os.fstat(file.fileno()).st_size, _size(dtype, entries)
    if size != expected:
        raise _broken(path, f"the file has {size} bytes in place of {expected}")


def _read_index(folder: Path) -> dict[str, Any]:
    prepare = f"`speedtronic data prepare --source python-stdlib --out {folder}`"
    if not folder.exists():
        raise DataError(
            f"{folder}: no prepared data here; make it with {prepare}, or with your own files and folders in "
            f"place of `--source python-stdlib`"
        )
    path = folder / INDEX
    if not path.is_file():
        raise DataError(
            f"{folder}: not a prepared folder (it has no {INDEX}); make one of the text in it with `speedtronic data "
            f"prepare {folder} --out DIR`, and give DIR in its place"
        )
    index = _read_json(path, _LARGEST_INDEX)
    if not isinstance(index, dict) or index.get("format") != FORMAT:
        raise _broken(path, f"not an index of {FORMAT}")
    if index.get("version") != VERSION:
        raise DataError(
            f"{path}: format version {index.get('version')!r}; this Speedtronic reads version {VERSION}: "
            f"prepare the data again with --force or use the version that wrote it"
        )
    return index


def _read_json(path: Path, largest: int) -> Any:
    if path.stat().st_size > largest:
        raise _broken(path, f"larger than {largest} bytes")
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise _broken(path, f"not valid JSON ({error})") from error


def _unreadable(path: Path, error: OSError) -> DataError:
    return DataError(f"{error.filename or path}: cannot be read: {error.strerror or error}")


def _broken(path: Path, reason: str) -> DataError:
    return DataError(f"{path}: {reason}; prepare the data again with `speedtronic data prepare … --force`")
