"""Where text comes from: text files, JSON lines, Parquet files, datasets of the `datasets` library.

An *input* is a file or a dataset of one or many documents. From any of its *offsets* on it can be read in *chunks* of
bounded size, which other processes can turn into text. Where the chunks lie depends only on the input.
"""

from __future__ import annotations

import codecs
import fnmatch
import json
import os
import struct
import sysconfig
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

from speedtronic.data.text import check_text_file, read_pieces, whole_characters
from speedtronic.data.tokenizers.chunking import CutRule, find_cut
from speedtronic.errors import DataError, MissingExtraError

PYTHON_STDLIB = "python-stdlib"
DEFAULT_PATTERNS = ("*.txt", "*.md", "*.py", "*.jsonl", "*.parquet")

_NOT_LIBRARY = frozenset({"site-packages", "dist-packages", "__pycache__"})
_READ_AT_ONCE = 4 * 2**20
_LOOKED_FOR_A_LINE = 64 * 2**10
_ROWS_AT_ONCE = 1024


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
        """Whether each of its texts is the end of a document."""

    def raw(self) -> bytes:
        """Its content, for a checksum. Raises DataError when it cannot be read."""

    def texts(self, raw: bytes) -> list[str]:
        """The texts in its content. Raises DataError, naming the place, for what is not text."""


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
        """Where its offsets end: bytes of a file, rows of a dataset."""

    @property
    def stamp(self) -> str:
        """It changes when the input is changed."""

    def chunks(self, offset: int, size: int, rule: CutRule) -> Iterator[tuple[Chunk, int]]:
        """Chunks of about `size` bytes from `offset` on, each with the offset behind it."""


# ---------------------------------------------------------------------- text files


@dataclass(frozen=True)
class _File:
    """What text files and files of JSON lines have in common: their offsets are bytes."""

    name: str
    path: Path
    size: int
    stamp: str

    @property
    def length(self) -> int:
        return self.size


@dataclass(frozen=True)
class _FileChunk:
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
class TextChunk(_FileChunk):
    """A part of a text file: whole characters."""

    ends_documents: bool

    @property
    def origin(self) -> str:
        return f"{self.path}, from byte {self.start} on"

    def texts(self, raw: bytes) -> list[str]:
        whole_characters(raw, self.path, self.start, final=True)
        return [raw.decode("utf-8")]


@dataclass(frozen=True)
class TextFile(_File):
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


# ---------------------------------------------------------------------- JSON lines


@dataclass(frozen=True)
class LinesChunk(_FileChunk):
    """The lines that begin in a part of a file of JSON lines."""

    text_field: str

    ends_documents = True

    @property
    def origin(self) -> str:
        return f"{self.path}, from line {self._line(0)} on"

    def texts(self, raw: bytes) -> list[str]:
        texts = []
        # Some programs begin every UTF-8 file with a byte order mark.
        lines = raw.removeprefix(codecs.BOM_UTF8) if self.start == 0 else raw
        for number, line in enumerate(lines.split(b"\n")):
            if not line.strip():
                continue
            try:
                text = self._text(line)
            except (ValueError, RecursionError) as error:
                raise DataError(f"{self.path}: line {self._line(number)}: {error}") from error
            if text:
                texts.append(text)
        return texts

    def _text(self, line: bytes) -> str | None:
        try:
            record = json.loads(line.decode("utf-8"))
        except json.JSONDecodeError as error:
            raise ValueError(f"not valid JSON ({error.msg} at column {error.colno})") from error
        if not isinstance(record, dict) or not isinstance(text := record.get(self.text_field, 0), str | None):
            raise ValueError(f"not an object with a text {self.text_field!r}; choose the field with --text-field")
        if text is not None:
            text.encode("utf-8")  # fails for an escape such as \\ud800, which is not a character
        return text

    def _line(self, number: int) -> int:
        """The number in the file, from 1, of a line of this chunk. It is only needed for messages."""
        before = 0
        with self.path.open("rb") as file:
            for start in range(0, self.start, _READ_AT_ONCE):
                before += file.read(min(_READ_AT_ONCE, self.start - start)).count(b"\n")
        return before + number + 1


@dataclass(frozen=True)
class JsonLines(_File):
    """A file of JSON objects, one a line. Each object's text is a document; empty texts and nulls are skipped."""

    text_field: str

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
                yield LinesChunk(self.path, start, offset, self.text_field), offset


# ---------------------------------------------------------------------- tables


@dataclass(frozen=True)
class RowsChunk:
    """Documents that have been read already."""

    origin: str
    rows: tuple[str, ...]
    size: int

    ends_documents = True

    def raw(self) -> bytes:
        encoded = [row.encode("utf-8") for row in self.rows]
        return b"".join(chain.from_iterable((struct.pack("<Q", len(text)), text) for text in encoded))

    def texts(self, raw: bytes) -> list[str]:
        return list(self.rows)


class _Table(ABC):
    """Rows with a column of text. Each row is a document; empty texts and nulls are skipped."""

    name: str
    length: int

    @abstractmethod
    def _batches(self, offset: int) -> Iterator[list[str | None]]:
        """The texts from row `offset` on."""

    def chunks(self, offset: int, size: int, rule: CutRule) -> Iterator[tuple[Chunk, int]]:
        rows: list[str] = []
        first, filled = offset, 0
        for row, text in enumerate(chain.from_iterable(self._batches(offset)), offset):
            if text:
                rows.append(text)
                filled += len(text)
            if filled >= size:
                yield RowsChunk(f"{self.name}, from row {first} on", tuple(rows), filled), row + 1
                rows, first, filled = [], row + 1, 0
        if rows:
            yield RowsChunk(f"{self.name}, from row {first} on", tuple(rows), filled), self.length


@dataclass(frozen=True)
class ParquetFile(_Table):
    """A Parquet file with a column of text."""

    name: str
    path: Path
    size: int
    stamp: str
    length: int
    text_field: str

    def _batches(self, offset: int) -> Iterator[list[str | None]]:
        with _opened_parquet(self.path) as file:
            first = 0  # the first row of the row group
            for group in range(file.num_row_groups):
                rows = file.metadata.row_group(group).num_rows
                skipped = max(offset - first, 0)
                if skipped < rows:
                    for batch in file.iter_batches(_ROWS_AT_ONCE, row_groups=[group], columns=[self.text_field]):
                        if skipped < len(batch):
                            yield batch.column(0)[skipped:].to_pylist()
                        skipped = max(skipped - len(batch), 0)
                first += rows


@dataclass(frozen=True)
class HubDataset(_Table):
    """A split of a dataset, loaded by the `datasets` library."""

    name: str
    size: int
    stamp: str
    length: int
    text_field: str
    dataset: Any

    def _batches(self, offset: int) -> Iterator[list[str | None]]:
        for start in range(offset, self.length, _ROWS_AT_ONCE):
            yield list(self.dataset[start : start + _ROWS_AT_ONCE][self.text_field])


# ---------------------------------------------------------------------- finding inputs


def choose_inputs(
    paths: Sequence[str | os.PathLike[str]],
    *,
    source: str | None = None,
    hub: str | None = None,
    split: str = "train",
    patterns: Sequence[str] = DEFAULT_PATTERNS,
    text_field: str = "text",
) -> tuple[list[Input], int]:
    """The inputs that one of `paths`, `source` and `hub` names, and how many files of them were left out.

    The arguments are those of `prepare`.

    Raises:
        DataError: not exactly one of the three is given; otherwise as `find_inputs` and `hub_dataset`.
        MissingExtraError: a format whose library is not installed.
    """
    if source not in (None, PYTHON_STDLIB):
        raise DataError(f"source {source!r} is unknown; the only built-in source is {PYTHON_STDLIB}")
    if [bool(paths), bool(source), bool(hub)].count(True) != 1:
        raise DataError(f"name one thing to read: files and folders, the source {PYTHON_STDLIB}, or a dataset")
    try:
        if source:
            return library_sources()
        if hub:
            return [hub_dataset(hub, split=split, text_field=text_field)], 0
        return find_inputs(paths, patterns=patterns, text_field=text_field), 0
    except OSError as error:
        raise DataError(f"{error.filename}: cannot be read: {error.strerror}") from error


def find_inputs(
    paths: Sequence[str | os.PathLike[str]],
    *,
    patterns: Sequence[str] = DEFAULT_PATTERNS,
    text_field: str = "text",
) -> list[Input]:
    """The non-empty inputs at given paths, each once, in a fixed order.

    `.jsonl` and `.parquet` files are read as such, every other file as one document of text.

    Args:
        paths: files, and folders that are searched for `patterns`; hidden files and folders are skipped, links are
            followed.
        patterns: which file names are taken from folders; files that are named in `paths` always are.
        text_field: the field of JSON lines and the column of Parquet files that holds the text.

    Raises:
        DataError: a path that does not exist or cannot be read; a folder without a matching file; nothing but
            empty files; a Parquet file without that column.
        MissingExtraError: a Parquet file, and pyarrow is not installed.
    """
    files: dict[str, tuple[str, Path]] = {}
    for path in map(Path, paths):
        found = [(path.name, path)]
        if path.is_dir():
            # The names of files in a folder begin with the folder's own.
            root = path.resolve().name
            found = [
                (f"{root}/{file.relative_to(path).as_posix()}", file)
                for file in _walk(path)
                if any(fnmatch.fnmatchcase(file.name, pattern) for pattern in patterns)
            ]
        if not found:
            raise DataError(f"{path}: no file in this folder matches {' '.join(patterns)}; choose with --pattern")
        # A file that is named twice, or named and inside a named folder, is read once.
        files.update((os.path.realpath(file), (name, file)) for name, file in found)
    inputs: list[Input] = []
    for name, path in files.values():
        if _is_empty(path):
            continue
        match path.suffix.lower():
            case ".parquet":
                inputs.append(_parquet_file(name, path, text_field))
            case ".jsonl":
                file = text_file(path, name)
                inputs.append(JsonLines(file.name, file.path, file.size, file.stamp, text_field))
            case _:
                inputs.append(text_file(path, name))
    if not inputs:
        raise DataError(f"{', '.join(map(str, paths))}: all files are empty")
    return inputs


def text_file(path: Path, name: str) -> TextFile:
    """A text file, under a given name. Raises DataError if there is no readable, non-empty file."""
    return TextFile(name, path, check_text_file(path), _stamp(path))


def texts(inputs: Iterable[Input]) -> Iterator[str]:
    """The text of every document, in pieces of a few MB at most, unless a document in a table is larger.

    Raises:
        DataError: naming the place of what is not UTF-8 or not a record with a text.
    """
    for each in inputs:
        for chunk, _ in each.chunks(0, _READ_AT_ONCE, "characters"):
            yield from chunk.texts(chunk.raw())


def library_sources() -> tuple[list[Input], int]:
    """The sources of Python's library, and how many were left out: fixtures of its tests that are not UTF-8."""
    library = Path(sysconfig.get_path("stdlib"))
    inputs: list[Input] = []
    skipped = 0
    for path in _walk(library, _NOT_LIBRARY) if library.is_dir() else ():
        if path.suffix != ".py" or _is_empty(path):
            continue
        try:
            for _ in read_pieces(path):
                pass
        except DataError:
            skipped += 1
            continue
        inputs.append(text_file(path, path.relative_to(library).as_posix()))
    if not inputs:
        raise DataError(f"{library}: this Python has no library sources there; name files or folders instead")
    return inputs, skipped


def hub_dataset(name: str, *, split: str, text_field: str = "text") -> Input:
    """A split of a dataset of the Hugging Face hub or of a local folder, by the `datasets` library.

    Args:
        name: NAME or NAME:CONFIG; NAME is `owner/dataset` or a folder of data files. Code that comes with a
            dataset is not run.
        split: such as `train`, or `train[:10%]`.
        text_field: the column that holds the text.

    Raises:
        DataError: it cannot be loaded, or has no such column of text.
        MissingExtraError: `datasets` is not installed.
    """
    try:
        import datasets  # type: ignore[import-untyped]
    except ImportError as error:
        raise MissingExtraError(
            "reading a Hugging Face dataset needs the `datasets` library: install speedtronic[datasets]"
        ) from error
    path, config = (name, None) if Path(name).exists() or ":" not in name else name.rsplit(":", 1)
    try:
        dataset = datasets.load_dataset(path, config, split=split)
    # The library raises errors of its own, of the network, of file systems and of parsers.
    except Exception as error:  # noqa: BLE001 - each says what it could not load
        raise DataError(f"dataset {name}, split {split}: {str(error).strip() or type(error).__name__}") from error
    _check_column(dataset.features.arrow_schema, text_field, f"dataset {name}")
    return HubDataset(
        name=f"{Path(path).resolve().name if config is None else name}:{split}",
        size=dataset.data.column(text_field).nbytes,
        stamp=f"{len(dataset)}:{dataset.data.nbytes}",
        length=len(dataset),
        text_field=text_field,
        dataset=dataset,
    )


def _stamp(path: Path) -> str:
    status = path.stat()
    return f"{status.st_size}:{status.st_mtime_ns}"


def _parquet_file(name: str, path: Path, text_field: str) -> ParquetFile:
    check_text_file(path)
    with _opened_parquet(path) as file:
        _check_column(file.schema_arrow, text_field, str(path))
        groups = [file.metadata.row_group(group) for group in range(file.num_row_groups)]
        chunks = chain.from_iterable(map(group.column, range(group.num_columns)) for group in groups)
        size = sum(chunk.total_uncompressed_size for chunk in chunks if chunk.path_in_schema == text_field)
        return ParquetFile(name, path, size, _stamp(path), file.metadata.num_rows, text_field)


@contextmanager
def _opened_parquet(path: Path) -> Iterator[Any]:
    try:
        import pyarrow  # type: ignore[import-untyped]
        import pyarrow.parquet  # type: ignore[import-untyped]
    except ImportError as error:
        raise MissingExtraError(f"{path}: reading Parquet needs pyarrow: install speedtronic[parquet]") from error
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            yield file
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read as Parquet: {error}") from error


def _check_column(schema: Any, text_field: str, origin: str) -> None:
    if text_field not in schema.names:
        raise DataError(
            f"{origin}: has no column {text_field!r}, but {', '.join(schema.names)}; choose one with --text-field"
        )
    if schema.names.count(text_field) > 1:
        raise DataError(f"{origin}: has several columns {text_field!r}; choose another one with --text-field")
    kind = str(schema.field(text_field).type)
    if kind not in {"string", "large_string", "string_view"} and not kind.startswith("dictionary<values=string"):
        raise DataError(f"{origin}: the column {text_field!r} holds {kind}, not text; choose with --text-field")


def _is_empty(path: Path) -> bool:
    return path.is_file() and path.stat().st_size == 0


def _walk(folder: Path, omitted: frozenset[str] = frozenset()) -> Iterator[Path]:
    """Regular files below `folder` in a fixed order, without hidden ones and the folders `omitted`.

    Links to folders are followed, to each folder once. Raises OSError for a folder that cannot be read.
    """

    def fail(error: OSError) -> None:  # by default `os.walk` passes over such folders
        raise error

    seen = {os.path.realpath(folder)}
    for parent, folders, files in os.walk(folder, onerror=fail, followlinks=True):
        wanted = sorted(name for name in folders if not name.startswith(".") and name not in omitted)
        folders.clear()  # `os.walk` visits what is left in this list
        for name in wanted:
            place = os.path.realpath(os.path.join(parent, name))
            if place not in seen:
                folders.append(name)
            seen.add(place)
        paths = (Path(parent, name) for name in sorted(files) if not name.startswith("."))
        yield from (path for path in paths if path.is_file())
