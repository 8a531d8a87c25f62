"""Where documents come from: text files, JSON lines, Parquet files, datasets of the `datasets` library.

An *input* is a file or a dataset of one or many documents. From any of its *offsets* on it can be read in *chunks* of
bounded size, which other processes can turn into documents. Where the chunks lie depends only on the input.
"""

from __future__ import annotations

import codecs
import fnmatch
import gzip
import io
import json
import os
import struct
import sysconfig
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import IO, Any, Protocol

from speedtronic.data.prepare.records import TEXT_RECORDS, Document, Records, TextRecords, pieces_of
from speedtronic.data.text import check_text_file, read_pieces, whole_characters
from speedtronic.data.tokenizers.chunking import CutRule, find_cut
from speedtronic.errors import DataError, MissingExtraError

PYTHON_STDLIB = "python-stdlib"
RECORD_PATTERNS = ("*.jsonl", "*.jsonl.gz", "*.jsonl.zst", "*.parquet")
DEFAULT_PATTERNS = ("*.txt", "*.md", "*.py", *RECORD_PATTERNS)

_NOT_LIBRARY = frozenset({"site-packages", "dist-packages", "__pycache__"})
_READ_AT_ONCE = 4 * 2**20
_LOOKED_FOR_A_LINE = 64 * 2**10
_READ_COMPRESSED = 64 * 2**10  # what it becomes is held in memory
_ROWS_AT_ONCE = 1024
_COMPRESSION = 4  # text has about so many times the bytes of its compressed form

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

    def documents(self, raw: bytes, left_out: Problems | None = None) -> list[Document]:
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


def _read_records(
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


def _documents_of_lines(
    raw: bytes, records: Records, place: Callable[[int], str], left_out: Problems | None
) -> list[Document]:
    """The documents of lines of JSON; blank lines are skipped. `place` says where the line with a number is."""
    values = ((number, partial(_from_json, line)) for number, line in enumerate(raw.split(b"\n")) if line.strip())
    return _read_records(records, values, place, left_out)


def _from_json(line: bytes) -> Any:
    try:
        return json.loads(line.decode("utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"not valid JSON ({error.msg} at column {error.colno})") from error


@dataclass(frozen=True)
class LinesChunk(_FileChunk):
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
            for start in range(0, self.start, _READ_AT_ONCE):
                before += file.read(min(_READ_AT_ONCE, self.start - start)).count(b"\n")
        return before + number + 1


@dataclass(frozen=True)
class JsonLines(_File):
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
class CompressedJsonLines(_File):
    """JSON lines in a file of gzip or zstd. Its offsets are bytes behind decompression: each costs what precedes it."""

    records: Records

    def chunks(self, offset: int, size: int, rule: CutRule) -> Iterator[tuple[Chunk, int]]:
        with _decompressed(self.path) as file:
            line, start = 1, 0
            while start < offset and (skipped := file.read(min(_READ_AT_ONCE, offset - start))):
                line, start = line + skipped.count(b"\n"), start + len(skipped)
            while content := file.read(size):
                # A chunk ends with the line that holds its last byte.
                if not content.endswith(b"\n"):
                    content += file.readline()
                start += len(content)
                yield DecompressedChunk(self.path, line, content, self.records), start
                line += content.count(b"\n")


@contextmanager
def _decompressed(path: Path) -> Iterator[io.BufferedIOBase]:
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
            file: io.BufferedIOBase = io.BufferedReader(
                _ZstdFrames(source, zstandard.ZstdDecompressor()), _READ_AT_ONCE
            )
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


# ---------------------------------------------------------------------- tables


@dataclass(frozen=True)
class RowsChunk:
    """Rows that have been read already: texts, or the JSON of what `records` reads.

    Attributes:
        name: of the table.
        first: the number of the first row.
    """

    name: str
    first: int
    rows: tuple[str, ...]
    size: int
    records: Records | None = None

    ends_documents = True

    @property
    def origin(self) -> str:
        return f"{self.name}, from row {self.first} on"

    def raw(self) -> bytes:
        encoded = [row.encode("utf-8") for row in self.rows]
        return b"".join(chain.from_iterable((struct.pack("<Q", len(text)), text) for text in encoded))

    def documents(self, raw: bytes, left_out: Problems | None = None) -> list[Document]:
        if self.records is None:
            return [*self.rows]
        values = ((number, partial(json.loads, row)) for number, row in enumerate(self.rows, self.first))
        return _read_records(self.records, values, lambda number: f"{self.name}: row {number}", left_out)


class _Table(ABC):
    """Rows with columns of text, or of what `records` reads. Empty documents and nulls are skipped."""

    name: str
    length: int
    records: Records

    @abstractmethod
    def _batches(self, offset: int) -> Iterator[Any]:
        """The rows from `offset` on, as tables or batches of Arrow with the wanted columns."""

    def chunks(self, offset: int, size: int, rule: CutRule) -> Iterator[tuple[Chunk, int]]:
        rows: list[str] = []
        first, filled = offset, 0
        for row, content in enumerate(chain.from_iterable(map(self._contents, self._batches(offset))), offset):
            if content:
                rows.append(content)
                filled += len(content)
            if filled >= size:
                yield self._chunk(first, rows, filled), row + 1
                rows, first, filled = [], row + 1, 0
        if rows:
            yield self._chunk(first, rows, filled), self.length

    def _chunk(self, first: int, rows: list[str], size: int) -> RowsChunk:
        records = None if isinstance(self.records, TextRecords) else self.records
        return RowsChunk(self.name, first, tuple(rows), size, records)

    def _contents(self, batch: Any) -> Iterator[str | None]:
        """The text of each row, or its JSON."""
        if not isinstance(self.records, TextRecords):
            yield from (json.dumps(_without_nulls(row), default=str) for row in batch.to_pylist())
        elif self.records.text_field in batch.schema.names:  # the usual case, and quicker
            yield from batch.column(self.records.text_field).to_pylist()
        else:
            yield from map(self.records.read, batch.to_pylist())


def _without_nulls(value: Any, in_list: bool = False) -> Any:
    """A copy in which the objects in lists have no fields that are null: a table gives each the fields of all."""
    if isinstance(value, Mapping):
        fields = {key: _without_nulls(each, in_list) for key, each in value.items()}
        return {key: each for key, each in fields.items() if each is not None} if in_list else fields
    return [_without_nulls(each, True) for each in value] if isinstance(value, list) else value


@dataclass(frozen=True)
class ParquetFile(_Table):
    """A Parquet file."""

    name: str
    path: Path
    size: int
    stamp: str
    length: int
    records: Records

    def _batches(self, offset: int) -> Iterator[Any]:
        with _opened_parquet(self.path) as file:
            columns = _columns(file.schema_arrow, self.records, str(self.path))
            first = 0  # the first row of the row group
            for group in range(file.num_row_groups):
                rows = file.metadata.row_group(group).num_rows
                skipped = max(offset - first, 0)
                if skipped < rows:
                    for batch in file.iter_batches(_ROWS_AT_ONCE, row_groups=[group], columns=columns):
                        if skipped < len(batch):
                            yield batch.slice(skipped)
                        skipped = max(skipped - len(batch), 0)
                first += rows


@dataclass(frozen=True)
class HubDataset(_Table):
    """A split of a dataset, loaded by the `datasets` library. `dataset` gives tables of Arrow."""

    name: str
    size: int
    stamp: str
    length: int
    records: Records
    dataset: Any

    def _batches(self, offset: int) -> Iterator[Any]:
        for start in range(offset, self.length, _ROWS_AT_ONCE):
            yield self.dataset[start : start + _ROWS_AT_ONCE]


# ---------------------------------------------------------------------- finding inputs


def choose_inputs(
    paths: Sequence[str | os.PathLike[str]],
    *,
    source: str | None = None,
    hub: str | None = None,
    split: str = "train",
    patterns: Sequence[str] = DEFAULT_PATTERNS,
    records: Records = TEXT_RECORDS,
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
        if source and not isinstance(records, TextRecords):
            raise DataError(f"the source {PYTHON_STDLIB} is text, and has no records with {_named(records)}")
        if source:
            return library_sources()
        if hub:
            return [hub_dataset(hub, split=split, records=records)], 0
        return find_inputs(paths, patterns=patterns, records=records), 0
    except OSError as error:
        raise DataError(f"{error.filename}: cannot be read: {error.strerror}") from error


def find_inputs(
    paths: Sequence[str | os.PathLike[str]],
    *,
    patterns: Sequence[str] = DEFAULT_PATTERNS,
    records: Records = TEXT_RECORDS,
) -> list[Input]:
    """The non-empty inputs at given paths, each once, in a fixed order.

    `.jsonl`, `.jsonl.gz`, `.jsonl.zst` and `.parquet` files are read as such, any other file as one document of text.

    Args:
        paths: files, and folders that are searched for `patterns`; hidden files and folders are skipped, links are
            followed.
        patterns: which file names are taken from folders; files that are named in `paths` always are.
        records: what the lines of JSON and the rows of Parquet files hold.

    Raises:
        DataError: a path that does not exist or cannot be read; a folder without a matching file; nothing but
            empty files; a Parquet file without such columns; a text file where records are asked for.
        MissingExtraError: a file of Parquet or zstd, and the library that reads it is not installed.
    """
    files: dict[str, tuple[str, Path]] = {}
    for path in map(Path, paths):
        if path == Path("-"):
            raise DataError(
                "-: for the standard input, say in place of paths what it is: --stdin text or --stdin jsonl"
            )
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
        match [suffix.lower() for suffix in path.suffixes]:
            case [*_, ".parquet"]:
                inputs.append(_parquet_file(name, path, records))
            case [*_, ".jsonl"]:
                inputs.append(JsonLines(name, path, check_text_file(path), _stamp(path), records))
            case [*_, ".jsonl", ".gz" | ".zst"]:
                estimate = check_text_file(path) * _COMPRESSION
                with _decompressed(path) as file:
                    if not file.read(1):
                        continue
                inputs.append(CompressedJsonLines(name, path, estimate, _stamp(path), records))
            case [*_, ".gz" | ".zst"]:
                raise DataError(
                    f"{path}: of compressed files, those of JSON lines are read (.jsonl.gz, .jsonl.zst); decompress "
                    f"it, or pipe it: `gzip -dc {path} | speedtronic data prepare --stdin text …`"
                )
            case _ if not isinstance(records, TextRecords):
                raise DataError(
                    f"{path}: a text, and no records with {_named(records)}; name files of JSON lines or Parquet"
                )
            case _:
                inputs.append(text_file(path, name))
    if not inputs:
        raise DataError(f"{', '.join(map(str, paths))}: all files are empty")
    return inputs


def text_file(path: Path, name: str) -> TextFile:
    """A text file, under a given name. Raises DataError if there is no readable, non-empty file."""
    return TextFile(name, path, check_text_file(path), _stamp(path))


def texts(inputs: Iterable[Input], left_out: Problems | None = None) -> Iterator[str]:
    """The text of every document, in pieces of a few MB at most, unless a document in a table is larger.

    Args:
        inputs: to read.
        left_out: as for `Chunk.documents`.

    Raises:
        DataError: naming the place of what is not UTF-8 or not a record with a text.
    """
    for each in inputs:
        for chunk, _ in each.chunks(0, _READ_AT_ONCE, "characters"):
            for document in chunk.documents(chunk.raw(), left_out):
                yield from pieces_of(document)


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


def hub_dataset(name: str, *, split: str, records: Records = TEXT_RECORDS) -> Input:
    """A split of a dataset of the Hugging Face hub or of a local folder, by the `datasets` library.

    Args:
        name: NAME or NAME:CONFIG; NAME is `owner/dataset`, a folder of data files, or one that `save_to_disk` wrote.
            Code that comes with a dataset is not run.
        split: such as `train`, or `train[:10%]`.
        records: what its rows hold.

    Raises:
        DataError: it cannot be loaded, or has no such columns.
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
        dataset = _saved_dataset(Path(path), split) or datasets.load_dataset(path, config, split=split)
    # The library raises errors of its own, of the network, of file systems and of parsers.
    except Exception as error:  # noqa: BLE001 - each says what it could not load
        raise DataError(f"dataset {name}, split {split}: {str(error).strip() or type(error).__name__}") from error
    columns = _columns(dataset.features.arrow_schema, records, f"dataset {name}")
    tops = list(dict.fromkeys(_top(dataset.features.arrow_schema, column) for column in columns))
    return HubDataset(
        name=f"{Path(path).resolve().name if config is None else name}:{split}",
        size=sum(dataset.data.column(top).nbytes for top in tops),
        stamp=f"{len(dataset)}:{dataset.data.nbytes}",
        length=len(dataset),
        records=records,
        dataset=dataset.select_columns(tops).with_format("arrow"),
    )


def _saved_dataset(folder: Path, split: str) -> Any:
    """A split of what `save_to_disk` wrote; None for any other folder."""
    import datasets

    if not any((folder / name).is_file() for name in ("dataset_dict.json", "state.json")):
        return None
    saved = datasets.load_from_disk(str(folder))
    if not isinstance(saved, Mapping):
        return saved  # a single split has no name
    if split not in saved:
        raise ValueError(f"it has the splits {', '.join(saved)}; choose one with --split")
    return saved[split]


def _stamp(path: Path) -> str:
    status = path.stat()
    return f"{status.st_size}:{status.st_mtime_ns}"


def _parquet_file(name: str, path: Path, records: Records) -> ParquetFile:
    check_text_file(path)
    with _opened_parquet(path) as file:
        columns = _columns(file.schema_arrow, records, str(path))
        groups = [file.metadata.row_group(group) for group in range(file.num_row_groups)]
        chunks = chain.from_iterable(map(group.column, range(group.num_columns)) for group in groups)
        size = sum(
            chunk.total_uncompressed_size
            for chunk in chunks
            if any(f"{chunk.path_in_schema}.".startswith(f"{column}.") for column in columns)
        )
        return ParquetFile(name, path, size, _stamp(path), file.metadata.num_rows, records)


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


def _named(records: Records) -> str:
    return " and ".join(repr(name) for name, option in _all_columns(records).items() if option)


def _all_columns(records: Records) -> dict[str, str]:
    return {**records.text_columns, **records.other_columns}


def _top(schema: Any, column: str) -> str:
    """The column of a table in which a column lies, which may be a field of a struct: `meta.text` in `meta`."""
    return column if column in schema.names else column.partition(".")[0]


def _columns(schema: Any, records: Records, origin: str) -> list[str]:
    """The columns that are read of a table. Raises DataError if one is missing or of another kind."""
    found = []
    for column, option in _all_columns(records).items():
        kind = _type_of(schema, column)
        if kind is None:
            if not option:  # it may be missing
                continue
            raise DataError(
                f"{origin}: has no column {column!r}, but {', '.join(schema.names)}; choose one with {option}"
            )
        if schema.names.count(_top(schema, column)) > 1:
            raise DataError(f"{origin}: has several columns {column!r}; choose another one with {option}")
        is_text = kind in {"string", "large_string", "string_view"} or kind.startswith("dictionary<values=string")
        if column in records.text_columns and not is_text:
            raise DataError(f"{origin}: the column {column!r} holds {kind}, not text; choose with {option}")
        found.append(column)
    return found


def _type_of(schema: Any, column: str) -> str | None:
    """The type of a column, or of a field of a struct, in words; None if there is none."""
    if column in schema.names:
        return str(schema.types[schema.names.index(column)])
    top, *inner = column.split(".")
    if not inner or top not in schema.names:
        return None
    kind = schema.types[schema.names.index(top)]
    for name in inner:
        if not hasattr(kind, "get_field_index") or (at := kind.get_field_index(name)) < 0:
            return None
        kind = kind.field(at).type
    return str(kind)


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
