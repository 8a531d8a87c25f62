"""What documents come from: an *input* is a file or a dataset of one or many documents.

From any of its *offsets* on it can be read in *chunks* of bounded size, which other processes can turn into documents.
Where the chunks lie depends only on the input.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from speedtronic.data.prepare.records import Document, Records
from speedtronic.data.text import check_text_file, whole_characters
from speedtronic.data.tokenizers.chunking import CutRule, find_cut
from speedtronic.errors import DataError

READ_AT_ONCE = 4 * 2**20

Problems = list[str]
"""What is wrong with the records that are left out, each with its place."""


class Chunk(Protocol):
    """A piece of an input, small enough for one process to hold. It can be sent to another process."""

    @property
    def origin(self) -> str:
        """Where it comes from, in words."""

    @property
    def size(self) -> int:
        """About how many bytes of text it has."""

    @property
    def ends_documents(self) -> bool:
        """Whether each of its documents ends in it."""

    def raw(self) -> bytes:
        """Its content, for a checksum. Raises DataError when it cannot be read."""

    def documents(self, raw: bytes, left_out: Problems | None = None) -> list[Document]:
        """The documents in its content, or the part of one.

        Args:
            raw: the content.
            left_out: gets what is wrong with each record that cannot be used. Without it such a record is an error.

        Raises:
            DataError: naming the place, for what is not text, and for a record that cannot be used.
        """


class Input(Protocol):
    """A source of documents."""

    @property
    def name(self) -> str:
        """Inputs are ordered by it. It does not depend on where the input lies."""

    @property
    def size(self) -> int:
        """Bytes of text, at least approximately."""

    @property
    def length(self) -> int:
        """Where its offsets end: bytes of a file, rows of a dataset. Of a compressed file it is an estimate."""

    @property
    def stamp(self) -> str:
        """It changes when the input is changed."""

    def chunks(self, offset: int, size: int, rule: CutRule) -> Iterator[tuple[Chunk, int]]:
        """Chunks of about `size` bytes from `offset` on, each with the offset behind it."""


def read_records(
    records: Records,
    values: Iterable[tuple[int, Callable[[], Any]]],
    place: Callable[[int], str],
    left_out: Problems | None,
) -> list[Document]:
    """The documents of numbered records. A record is made by a call, which may fail as reading it may."""
    documents: list[Document] = []
    for number, value in values:
        try:
            document = records.read(value())
        except DataError as error:  # of all such records
            raise DataError(f"{place(number)}: {error}") from error
        except (ValueError, RecursionError) as error:
            problem = f"{place(number)}: {error}"
            if left_out is None:
                raise DataError(problem) from error
            left_out.append(problem)
        else:
            if document:
                documents.append(document)
    return documents


# ---------------------------------------------------------------------- text files


@dataclass(frozen=True)
class FileInput:
    """What text files and files of JSON lines have in common: their offsets are bytes."""

    name: str
    path: Path
    size: int
    stamp: str

    @property
    def length(self) -> int:
        return self.size


@dataclass(frozen=True)
class FileChunk:
    """The bytes start … stop − 1 of a file."""

    path: Path
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start

    def raw(self) -> bytes:
        try:
            with self.path.open("rb") as file:
                file.seek(self.start)
                content = file.read(self.size)
        except OSError as error:
            raise DataError(f"{self.path}: cannot be read: {error.strerror}") from error
        if len(content) != self.size:
            raise DataError(f"{self.path}: has become shorter while it was read; start again when nothing changes it")
        return content


@dataclass(frozen=True)
class TextChunk(FileChunk):
    """A part of a text file: whole characters."""

    ends_documents: bool

    @property
    def origin(self) -> str:
        return f"{self.path}, from byte {self.start} on"

    def documents(self, raw: bytes, left_out: Problems | None = None) -> list[Document]:
        whole_characters(raw, self.path, self.start, final=True)
        return [raw.decode("utf-8")]


@dataclass(frozen=True)
class TextFile(FileInput):
    """A UTF-8 text file: one document."""

    def chunks(self, offset: int, size: int, rule: CutRule) -> Iterator[tuple[Chunk, int]]:
        if offset < self.size <= offset + size:  # most files: no need to look into it
            yield TextChunk(self.path, offset, self.size, ends_documents=True), self.size
            return
        with self.path.open("rb") as file:
            while offset < self.size:
                start, offset = offset, self.size
                # Cut where the rule allows it, unless the rest is small enough for one chunk.
                if start + size < self.size and (cut := find_cut(file, start + size, rule)) is not None:
                    offset = min(cut, self.size)
                yield TextChunk(self.path, start, offset, ends_documents=offset == self.size), offset


def text_file(path: Path, name: str) -> TextFile:
    """A text file, under a given name. Raises DataError if there is no readable, non-empty file."""
    return TextFile(name, path, check_text_file(path), stamp_of(path))


def stamp_of(path: Path) -> str:
    status = path.stat()
    return f"{status.st_size}:{status.st_mtime_ns}"
