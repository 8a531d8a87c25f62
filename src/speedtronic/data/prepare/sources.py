"""Finding what to read: files and folders, the sources of Python's library, datasets."""

from __future__ import annotations

import fnmatch
import os
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from speedtronic.data.prepare.inputs import READ_AT_ONCE, Input, Problems, text_file
from speedtronic.data.prepare.json_lines import json_lines
from speedtronic.data.prepare.records import TEXT_RECORDS, Records, TextRecords, pieces_of
from speedtronic.data.prepare.tables import hub_dataset, parquet_file
from speedtronic.data.text import read_pieces
from speedtronic.errors import DataError

PYTHON_STDLIB = "python-stdlib"
RECORD_PATTERNS = ("*.jsonl", "*.jsonl.gz", "*.jsonl.zst", "*.parquet")
DEFAULT_PATTERNS = ("*.txt", "*.md", "*.py", *RECORD_PATTERNS)

_NOT_LIBRARY = frozenset({"site-packages", "dist-packages", "__pycache__"})


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
                inputs.append(parquet_file(name, path, records))
            case [*_, ".jsonl"] | [*_, ".jsonl", ".gz" | ".zst"]:
                if (lines := json_lines(name, path, records)) is not None:
                    inputs.append(lines)
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


def texts(inputs: Iterable[Input], left_out: Problems | None = None) -> Iterator[str]:
    """The text of every document, in pieces of a few MB at most, unless a document in a table is larger.

    Args:
        inputs: to read.
        left_out: as for `Chunk.documents`.

    Raises:
        DataError: naming the place of what is not UTF-8 or not a record with a text.
    """
    for each in inputs:
        for chunk, _ in each.chunks(0, READ_AT_ONCE, "characters"):
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


def _named(records: Records) -> str:
    columns = {**records.text_columns, **records.other_columns}
    return " and ".join(repr(name) for name, option in columns.items() if option)


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
