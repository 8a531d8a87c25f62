"""Files of JSON lines, plain and compressed: each line is a record."""

from __future__ import annotations

import codecs
import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

from speedtronic.data.prepare.inputs import (
    READ_AT_ONCE,
    Chunk,
    FileChunk,
    FileInput,
    Input,
    Problems,
    read_records,
    stamp_of,
)
from speedtronic.data.prepare.records import Document, Records
from speedtronic.data.text import check_text_file
from speedtronic.data.tokenizers.chunking import CutRule
from speedtronic.errors import DataError, MissingExtraError

_LOOKED_FOR_A_LINE = 64 * 2**10
_READ_COMPRESSED = 64 * 2**10  # what it becomes is held in memory
_COMPRESSION = 4  # text has about so many times the bytes of its compressed form


def json_lines(name: str, path: Path, records: Records) -> Input | None:
    """A file of JSON lines, compressed if its name says so; None if there is nothing in a compressed one.

    Raises:
        DataError: there is no readable, non-empty file, or it cannot be decompressed.
        MissingExtraError: a file of zstd, and `zstandard` is not installed.
    """
    size = check_text_file(path)
    if path.suffix.lower() == ".jsonl":
        return JsonLines(name, path, size, stamp_of(path), records)
    with decompressed(path) as file:
        if not file.read(1):
            return None
    return CompressedJsonLines(name, path, size * _COMPRESSION, stamp_of(path), records)


def _documents_of_lines(
    raw: bytes, records: Records, place: Callable[[int], str], left_out: Problems | None
) -> list[Document]:
    """The documents of lines of JSON; blank lines are skipped. `place` says where the line with a number is."""
    values = ((number, partial(_from_json, line)) for number, line in enumerate(raw.split(b"\n")) if line.strip())
    return read_records(records, values, place, left_out)


def _from_json(line: bytes) -> Any:
    try:
        return json.loads(line.decode("utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"not valid JSON ({error.msg} at column {error.colno})") from error


@dataclass(frozen=True)
class LinesChunk(FileChunk):
    """The lines that begin in a part of a file of JSON lines."""

    records: Records

    ends_documents = True

    @property
    def origin(self) -> str:
        return f"{self.path}, from line {self._line(0)} on"

    def documents(self, raw: bytes, left_out: Problems | None = None) -> list[Document]:
        # Some programs begin every UTF-8 file with a byte order mark.
        lines = raw.removeprefix(codecs.BOM_UTF8) if self.start == 0 else raw
        return _documents_of_lines(lines, self.records, lambda n: f"{self.path}: line {self._line(n)}", left_out)

    def _line(self, number: int) -> int:
        """The number in the file, from 1, of a line of this chunk. It is only needed for messages."""
        before = 0
        with self.path.open("rb") as file:
            for start in range(0, self.start, READ_AT_ONCE):
                before += file.read(min(READ_AT_ONCE, self.start - start)).count(b"\n")
        return before + number + 1


@dataclass(frozen=True)
class JsonLines(FileInput):
    """A file of JSON, one record a line. Empty documents and nulls are skipped."""

    records: Records

    def chunks(self, offset: int, size: int, rule: CutRule) -> Iterator[tuple[Chunk, int]]:
        with self.path.open("rb") as file:
            while offset < self.size:
                start = offset
                # A chunk ends with the line that holds its last byte.
                position = start + size - 1
                file.seek(position)
                offset = self.size
                while block := file.read(_LOOKED_FOR_A_LINE):
                    if (found := block.find(b"\n")) >= 0:
                        offset = min(position + found + 1, self.size)
                        break
                    position += len(block)
                yield LinesChunk(self.path, start, offset, self.records), offset


@dataclass(frozen=True)
class DecompressedChunk:
    """Lines of JSON that have been decompressed already. `line` is the number of the first, from 1."""

    path: Path
    line: int
    content: bytes
    records: Records

    ends_documents = True

    @property
    def origin(self) -> str:
        return f"{self.path}, from line {self.line} on"

    @property
    def size(self) -> int:
        return len(self.content)

    def raw(self) -> bytes:
        return self.content

    def documents(self, raw: bytes, left_out: Problems | None = None) -> list[Document]:
        lines = raw.removeprefix(codecs.BOM_UTF8) if self.line == 1 else raw
        return _documents_of_lines(lines, self.records, lambda n: f"{self.path}: line {self.line + n}", left_out)


@dataclass(frozen=True)
class CompressedJsonLines(FileInput):
    """JSON lines in a file of gzip or zstd. Its offsets are bytes behind decompression: each costs what precedes it."""

    records: Records

    def chunks(self, offset: int, size: int, rule: CutRule) -> Iterator[tuple[Chunk, int]]:
        with decompressed(self.path) as file:
            line, start = 1, 0
            while start < offset and (skipped := file.read(min(READ_AT_ONCE, offset - start))):
                line, start = line + skipped.count(b"\n"), start + len(skipped)
            while content := file.read(size):
                # A chunk ends with the line that holds its last byte.
                if not content.endswith(b"\n"):
                    content += file.readline()
                start += len(content)
                yield DecompressedChunk(self.path, line, content, self.records), start
                line += content.count(b"\n")


@contextmanager
def decompressed(path: Path) -> Iterator[io.BufferedIOBase]:
    """The content of a file of gzip or zstd, as its name says. DataError for what is damaged or cut off."""
    damaged: tuple[type[Exception], ...] = (OSError, EOFError, zlib.error)
    with ExitStack() as stack:
        if path.suffix.lower() == ".zst":
            try:
                import zstandard
            except ImportError as error:
                raise MissingExtraError(f"{path}: reading zstd needs zstandard: install speedtronic[zstd]") from error
            damaged = (*damaged, zstandard.ZstdError)
            source = stack.enter_context(path.open("rb"))
            file: io.BufferedIOBase = io.BufferedReader(_ZstdFrames(source, zstandard.ZstdDecompressor()), READ_AT_ONCE)
        else:
            file = stack.enter_context(gzip.open(path, "rb"))
        try:
            yield file
        except damaged as error:
            raise DataError(
                f"{path}: cannot be decompressed: {error}; the file may be damaged or not wholly copied"
            ) from error


class _ZstdFrames(io.RawIOBase):
    """The content of all frames of a zstd file. To the library's own reader a file that was cut off is a whole one."""

    def __init__(self, file: IO[bytes], decompressor: Any) -> None:
        self._file = file
        self._decompressor = decompressor
        self._frame: Any = None
        self._rest = b""  # compressed bytes behind the end of a frame
        self._content = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._content:
            compressed = self._rest or self._file.read(_READ_COMPRESSED)
            if not compressed:
                if self._frame is not None:
                    raise EOFError("the last frame ends early")
                return 0
            if self._frame is None:
                self._frame = self._decompressor.decompressobj()
            self._content = memoryview(self._frame.decompress(compressed))
            self._rest = b""
            if self._frame.eof:
                self._rest, self._frame = self._frame.unused_data, None
        part = self._content[: len(buffer)]
        buffer[: len(part)] = part
        self._content = self._content[len(part) :]
        return len(part)
