"""Token shards: a folder of memory-mapped token files under one index.

    index.json        format, version, dtype, tokens, documents, tokenizer, source, and of each shard the file
                      name, the number of tokens and their SHA-256; written last: a folder with it is whole
    shard_00000.bin   a header of 32 bytes (magic, version, bytes per token, tokens; little-endian), then the
                      tokens

The checksums leave the headers out.
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
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from speedtronic.data.tokenizers import IdArray, Tokenizer, spec_fingerprint, tokenizer_from_spec
from speedtronic.errors import DataError
from speedtronic.processes import process_is_alive

FORMAT = "speedtronic-token-shards"
VERSION = 1
INDEX = "index.json"
DEFAULT_SHARD_TOKENS = 64 * 2**20

_HEADER = struct.Struct("<8sIIQ8x")
_MAGIC = b"SPDTRNC\0"
_DTYPES: dict[str, np.dtype[np.unsignedinteger[Any]]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
_LARGEST_INDEX = 64 * 2**20  # bytes; a real one is a few hundred per shard
_VERIFIED_AT_ONCE = 4 * 2**20


@dataclass(frozen=True)
class Shard:
    """One file of a set: its name in the folder, its number of tokens, the SHA-256 (hex) of its tokens."""

    file: str
    tokens: int
    sha256: str


class ShardWriter:
    """Writes a folder of shards; used as a context manager, it publishes the folder when the block ends well.

    Everything is written to a folder beside `folder` and renamed at the end, so a reader sees all or nothing;
    a block that raises leaves no trace.

    Args:
        folder: where the shards will be.
        tokenizer: whose ids these are; its spec goes into the index.
        shard_tokens: the most tokens in one file.
        replace: take the place of a prepared folder; without it, one that is there is an OSError.
    """

    def __init__(
        self,
        folder: Path,
        *,
        tokenizer: Tokenizer,
        shard_tokens: int = DEFAULT_SHARD_TOKENS,
        replace: bool = False,
    ) -> None:
        if shard_tokens < 1:
            raise DataError(f"a shard must hold at least 1 token, not {shard_tokens}")
        self.source: dict[str, Any] = {}
        self.tokens = 0
        self.documents = 0
        self._folder = folder
        self._replace = replace
        self._partial = _beside(folder, "partial")
        self._tokenizer = tokenizer
        self._shard_tokens = shard_tokens
        self._dtype = "uint16" if tokenizer.vocab_size <= 2**16 else "uint32"
        self._shards: list[Shard] = []
        self._file: BinaryIO | None = None
        self._in_file = 0
        self._digest = hashlib.sha256()

    def __enter__(self) -> ShardWriter:
        self._partial.mkdir(parents=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._publish()
        finally:
            if self._file is not None:
                self._file.close()
            shutil.rmtree(self._partial, ignore_errors=True)

    def write(self, ids: IdArray) -> None:
        """Append token ids. Raises DataError for an id outside the tokenizer's vocabulary."""
        if len(ids) and int(ids.max()) >= self._tokenizer.vocab_size:
            raise DataError(
                f"token id {int(ids.max())} does not fit the tokenizer's vocabulary of {self._tokenizer.vocab_size}"
            )
        tokens = ids.astype(_DTYPES[self._dtype], copy=False)
        while len(tokens):
            file = self._open_shard()
            part = tokens[: self._shard_tokens - self._in_file]
            payload = part.tobytes()
            file.write(payload)
            self._digest.update(payload)
            self._in_file += len(part)
            self.tokens += len(part)
            tokens = tokens[len(part) :]
            if self._in_file == self._shard_tokens:
                self._close_shard()

    def end_document(self) -> None:
        """Append the tokenizer's separator and count a document."""
        self.write(np.array([self._tokenizer.separator_id], np.uint32))
        self.documents += 1

    def _open_shard(self) -> BinaryIO:
        if self._file is None:
            self._file = (self._partial / _shard_name(len(self._shards))).open("wb")
            self._file.write(self._header(0))
            self._in_file = 0
            self._digest = hashlib.sha256()
        return self._file

    def _header(self, tokens: int) -> bytes:
        return _HEADER.pack(_MAGIC, VERSION, _DTYPES[self._dtype].itemsize, tokens)

    def _close_shard(self) -> None:
        if self._file is None:
            return
        self._file.seek(0)
        self._file.write(self._header(self._in_file))
        _sync_and_close(self._file)
        self._file = None
        self._shards.append(Shard(_shard_name(len(self._shards)), self._in_file, self._digest.hexdigest()))

    def _publish(self) -> None:
        self._close_shard()
        index = {
            "format": FORMAT,
            "version": VERSION,
            "dtype": self._dtype,
            "tokens": self.tokens,
            "documents": self.documents,
            "tokenizer": self._tokenizer.spec(),
            "tokenizer_fingerprint": spec_fingerprint(self._tokenizer.spec()),
            "source": self.source,
            "shards": [asdict(shard) for shard in self._shards],
        }
        file = (self._partial / INDEX).open("wb")
        file.write(json.dumps(index, indent=1).encode() + b"\n")
        _sync_and_close(file)
        if self._replace and is_prepared(self._folder):
            _swap(self._partial, self._folder)
        else:
            _move(self._partial, self._folder)


def _shard_name(number: int) -> str:
    return f"shard_{number:05d}.bin"


def _sync_and_close(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
    file.close()


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

    Sizes and headers of all files are checked here, checksums by `verify`. Files are mapped when first read.

    Raises:
        DataError: naming the folder or file and what is wrong with it.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        index = _read_index(self.folder)
        try:
            self.dtype = _DTYPES[index["dtype"]]
            self.tokens = int(index["tokens"])
            self.documents = int(index["documents"])
            self.tokenizer_spec: dict[str, Any] = dict(index["tokenizer"])
            self.source: dict[str, Any] = dict(index["source"])
            self.shards = [Shard(str(s["file"]), int(s["tokens"]), str(s["sha256"])) for s in index["shards"]]
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise _broken(self.folder / INDEX, f"a field is missing or wrong ({error})") from error
        self._check(index)
        self._ends = list(accumulate(shard.tokens for shard in self.shards))
        self._maps: dict[int, npt.NDArray[np.unsignedinteger[Any]]] = {}

    def _check(self, index: dict[str, Any]) -> None:
        if sum(shard.tokens for shard in self.shards) != self.tokens:
            raise _broken(self.folder / INDEX, "the shards' tokens do not add up to the total")
        if index.get("tokenizer_fingerprint") != spec_fingerprint(self.tokenizer_spec):
            raise _broken(self.folder / INDEX, "the tokenizer does not match its fingerprint")
        for shard in self.shards:
            self._check_file(shard)

    def _check_file(self, shard: Shard) -> None:
        if shard.file in {"", ".", ".."} or Path(shard.file).name != shard.file or "\\" in shard.file:
            raise _broken(self.folder / INDEX, f"shard name {shard.file!r} is not a plain file name")
        path = self.folder / shard.file
        if not path.is_file():
            raise _broken(path, "the file is missing")
        expected = _HEADER.size + shard.tokens * self.dtype.itemsize
        if path.stat().st_size != expected:
            raise _broken(path, f"the file has {path.stat().st_size} bytes in place of {expected}")
        with path.open("rb") as file:
            header = file.read(_HEADER.size)
        if header != _HEADER.pack(_MAGIC, VERSION, self.dtype.itemsize, shard.tokens):
            raise _broken(path, "the header does not agree with the index")

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that made the tokens. Raises DataError for a kind that this version does not know."""
        return tokenizer_from_spec(self.tokenizer_spec)

    @property
    def fingerprint(self) -> str:
        """SHA-256 (hex) over the checksums of the tokens: equal for equal tokens in equal shards."""
        parts = "".join(f"{shard.tokens}:{shard.sha256};" for shard in self.shards)
        return hashlib.sha256(f"{self.dtype.str};{parts}".encode()).hexdigest()

    def __len__(self) -> int:
        return self.tokens

    def read(self, start: int, out: npt.NDArray[np.int64]) -> None:
        """Fill `out` with the tokens from position `start` on, across shard borders."""
        number = bisect_right(self._ends, start)
        offset = start - (self._ends[number - 1] if number else 0)
        filled = 0
        while filled < len(out):
            part = self._map(number)[offset : offset + len(out) - filled]
            out[filled : filled + len(part)] = part
            filled += len(part)
            number, offset = number + 1, 0

    def check(self, tokens: npt.NDArray[np.int64]) -> None:
        """Raise DataError if tokens that were read here, of any shape, cannot be the tokenizer's."""
        if tokens.size and int(tokens.max()) >= self.tokenizer.vocab_size:
            raise DataError(
                f"{self.folder}: holds the token id {int(tokens.max())}, outside its tokenizer's vocabulary of "
                f"{self.tokenizer.vocab_size}: its files have been damaged; `speedtronic data inspect {self.folder} "
                f"--verify` names those, and deleting the folder lets it be made again"
            )

    def _map(self, number: int) -> npt.NDArray[np.unsignedinteger[Any]]:
        mapped = self._maps.get(number)
        if mapped is None:
            path = self.folder / self.shards[number].file
            # A plain view: slicing numpy's memmap class costs several times more.
            mapped = np.asarray(np.memmap(path, self.dtype, mode="r", offset=_HEADER.size))
            self._maps[number] = mapped
        return mapped

    def verify(self) -> None:
        """Compare every shard with its checksum. Raises DataError naming all that differ."""
        bad = [shard.file for shard in self.shards if self._checksum(shard) != shard.sha256]
        if bad:
            raise _broken(self.folder, f"the content of {', '.join(bad)} does not match its checksum")

    def _checksum(self, shard: Shard) -> str:
        digest = hashlib.sha256()
        with (self.folder / shard.file).open("rb") as file:
            file.seek(_HEADER.size)
            while piece := file.read(_VERIFIED_AT_ONCE):
                digest.update(piece)
        return digest.hexdigest()

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_maps": {}}


def _read_index(folder: Path) -> dict[str, Any]:
    prepare = f"`speedtronic data prepare --source python-stdlib --out {folder}`"
    if not folder.exists():
        raise DataError(
            f"{folder}: no prepared data here; make it with {prepare}, or with your own files and folders in "
            f"place of `--source python-stdlib`"
        )
    path = folder / INDEX
    if not path.is_file():
        raise DataError(f"{folder}: not a prepared folder (it has no {INDEX}); make one with {prepare}")
    if path.stat().st_size > _LARGEST_INDEX:
        raise _broken(path, f"larger than {_LARGEST_INDEX} bytes")
    try:
        index = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise _broken(path, f"not valid JSON ({error})") from error
    if not isinstance(index, dict) or index.get("format") != FORMAT:
        raise _broken(path, f"not an index of {FORMAT}")
    if index.get("version") != VERSION:
        raise DataError(
            f"{path}: format version {index.get('version')!r}; this Speedtronic reads version {VERSION}: "
            f"prepare the data again or use the version that wrote it"
        )
    return index


def _broken(path: Path, reason: str) -> DataError:
    return DataError(f"{path}: {reason}; prepare the data again with `speedtronic data prepare … --force`")
