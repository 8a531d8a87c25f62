"""Tables whose rows are records: Parquet files, and datasets of the `datasets` library."""

from __future__ import annotations

import json
import struct
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from speedtronic.data.prepare.inputs import Chunk, Input, Problems, read_records, stamp_of
from speedtronic.data.prepare.records import TEXT_RECORDS, Document, Records, TextRecords
from speedtronic.data.text import check_text_file
from speedtronic.data.tokenizers.chunking import CutRule
from speedtronic.errors import DataError, MissingExtraError

_ROWS_AT_ONCE = 1024


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
        return read_records(self.records, values, lambda number: f"{self.name}: row {number}", left_out)


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


def parquet_file(name: str, path: Path, records: Records) -> ParquetFile:
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
        return ParquetFile(name, path, size, stamp_of(path), file.metadata.num_rows, records)


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
