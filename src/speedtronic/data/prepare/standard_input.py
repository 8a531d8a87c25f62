"""Documents from the standard input, kept in a file for as long as they are read."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Literal

from speedtronic.errors import DataError

_SUFFIXES = {"text": ".txt", "jsonl": ".jsonl"}


@contextmanager
def kept_in_file(stream: IO[bytes], kind: Literal["text", "jsonl"], out: Path) -> Iterator[Path]:
    """A file with all that comes from a stream, beside the output, where there must be room anyway.

    A stream is read once, and a preparation may read its inputs twice, by several processes. The file is removed
    behind the block.

    Raises:
        DataError: the file cannot be written.
    """
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        folder = tempfile.mkdtemp(prefix=f".{out.name}.stdin-", dir=out.parent)
    except OSError as error:
        raise DataError(f"{out.parent}: cannot keep the standard input there: {error.strerror}") from error
    try:
        path = Path(folder, f"stdin{_SUFFIXES[kind]}")
        try:
            with path.open("wb") as file:
                shutil.copyfileobj(stream, file, 2**20)
        except OSError as error:
            raise DataError(f"{path}: cannot keep the standard input there: {error.strerror}") from error
        yield path
    except DataError as error:
        # The file has a name of chance, and is gone when this is read.
        raise DataError(str(error).replace(str(path), "the standard input")) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
