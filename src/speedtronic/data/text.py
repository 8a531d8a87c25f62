"""Reading text files: the checks before training, and UTF-8 errors with their offset."""

from __future__ import annotations

import codecs
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from speedtronic.data.file_array import MOST_RESIDENT, FileArray, UnsignedArray, array_in_file
from speedtronic.data.tokenizers.base import LONGEST_CHARACTER
from speedtronic.data.tokenizers.chars import CharTokenizer
from speedtronic.durable.files import where_looked
from speedtronic.errors import DataError

CHECKED_BEFORE_TRAINING = 64 * 2**20
"""Bytes at the start of a text file that are checked before training; the rest is checked when it is read."""

_PIECE = 4 * 2**20
_SAMPLE = 2**20


def check_text_file(path: Path) -> int:
    """The size in bytes of a readable, non-empty regular file. DataError for anything else, with the reason."""
    if path.is_dir():
        raise DataError(
            f"{path}: is a folder, not a text file; `speedtronic data prepare {path} --out DIR` reads folders"
        )
    if not path.exists():
        raise DataError(f"{path}: no such text file{where_looked(path)}")
    if not path.is_file():
        raise DataError(f"{path}: not a regular file, so it cannot be read at any position")
    if not os.access(path, os.R_OK):
        raise DataError(f"{path}: no permission to read this file")
    size = path.stat().st_size
    if size == 0:
        raise DataError(f"{path}: the text file is empty")
    return size


def read_pieces(path: Path, limit: int | None = None) -> Iterator[bytes]:
    """The file's bytes in pieces of a few MB, each whole characters of valid UTF-8.

    Args:
        path: the file.
        limit: stop after this many bytes; a character that is cut there is left out.

    Raises:
        DataError: naming the file and the offset of the first byte that is not UTF-8.
    """
    size = path.stat().st_size
    end = size if limit is None else min(size, limit)
    position, rest = 0, b""
    with path.open("rb") as file:
        while position < end:
            read = file.read(min(_PIECE, end - position))
            if not read:
                return
            # A character may continue in the next piece: its first bytes are kept as `rest`.
            piece = rest + read
            start = position - len(rest)
            position += len(read)
            whole = whole_characters(piece, path, start, final=limit is None and position == end)
            yield piece[:whole]
            rest = piece[whole:]


def whole_characters(data: bytes, path: Path, offset: int, *, final: bool) -> int:
    """How many bytes of `data`, which lie at `offset` of the file, form whole characters of valid UTF-8."""
    try:
        return codecs.utf_8_decode(data, "strict", final)[1]
    except UnicodeDecodeError as error:
        at = error.start
        raise DataError(
            f"{path}: byte 0x{data[at]:02x} at offset {offset + at} is not valid UTF-8 ({error.reason}); "
            f"convert the file, for example with `iconv -t UTF-8`"
        ) from error


def read_text(path: Path) -> Iterator[str]:
    """The file's text in pieces; raises DataError as `read_pieces` does."""
    for piece in read_pieces(path):
        yield piece.decode("utf-8")


def content_checksum(path: Path) -> str:
    """SHA-256 (hex) that identifies the content of a text file wherever it lies.

    It covers the size, the first 64 MB, and beyond them the first MB of every 64 MB, so that starting a run on a very
    large file does not read all of it.
    """
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        for _ in range(0, min(size, CHECKED_BEFORE_TRAINING), _SAMPLE):
            digest.update(file.read(_SAMPLE))
        for start in range(CHECKED_BEFORE_TRAINING, size, CHECKED_BEFORE_TRAINING):
            file.seek(start)
            digest.update(file.read(_SAMPLE))
    return digest.hexdigest()


class ByteText:
    """A UTF-8 file as tokens, one per byte: any position costs the same.

    Raises:
        DataError: at construction for a file that cannot be used or whose first 64 MB are not UTF-8 or do not
            fit the vocabulary; from `read` for what lies beyond.
    """

    def __init__(self, path: Path, tokenizer: CharTokenizer) -> None:
        self.path = path
        self._tokenizer = tokenizer
        self._size = check_text_file(path)
        self._values: UnsignedArray | FileArray | None = None
        offset = 0
        limit = CHECKED_BEFORE_TRAINING if self._size > CHECKED_BEFORE_TRAINING else None
        for piece in read_pieces(path, limit):
            tokenizer.check_bytes(np.frombuffer(piece, np.uint8), where=str(path), offset=offset)
            offset += len(piece)
        self._checked = offset
        self.fingerprint = content_checksum(path)

    def __len__(self) -> int:
        return self._size

    def read(self, start: int, out: npt.NDArray[np.int64]) -> None:
        """Fill `out` with the tokens from position `start` on."""
        if self._values is None:
            self._values = self._opened()
        # A block may begin inside a character: the bytes before it are needed to check it.
        begin = max(start - (LONGEST_CHARACTER - 1), 0)
        data = self._values[begin : start + len(out)]
        if start + len(out) > self._checked:
            self._check(data, begin, start)
        out[:] = data[start - begin :]

    def _opened(self) -> UnsignedArray | FileArray:
        with self.path.open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            if size != self._size:
                raise DataError(f"{self.path}: the text file has {size} bytes, and had {self._size} at the start")
            return array_in_file(file, np.dtype(np.uint8), size, mapped=size <= MOST_RESIDENT)

    def _check(self, data: UnsignedArray, begin: int, start: int) -> None:
        """Check the tokens from position `start` on, in data that lies at `begin` and starts a little before them."""
        first = start - begin
        while first > 0 and data[first] & 0xC0 == 0x80:
            first -= 1
        final = begin + len(data) == self._size
        whole_characters(data[first:].tobytes(), self.path, begin + first, final=final)
        self._tokenizer.check_bytes(data[start - begin :], where=str(self.path), offset=start)

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_values": None}
