"""Tokenizers by name: bytes, or a file that somebody trained."""

from __future__ import annotations

from pathlib import Path

from speedtronic.data.tokenizers.base import CharTokenizer, Tokenizer
from speedtronic.data.tokenizers.huggingface import json_tokenizer
from speedtronic.data.tokenizers.tiktoken import RankTokenizer, tokens_of_rank_file
from speedtronic.errors import DataError

LARGEST_FILE = 256 * 2**20
"""Bytes that a tokenizer file may have; published ones have up to some 35 MB."""

JSON_FILE = "tokenizer.json"
_KINDS = (
    "a tokenizer is `bytes`, a JSON file of the `tokenizers` library, a folder with such a tokenizer.json, or a "
    "tiktoken rank file"
)


def load_tokenizer(name: str) -> Tokenizer:
    """The tokenizer that a name or path stands for. A file is read as data; nothing in it is run.

    Args:
        name: "bytes", or the path, relative to the working folder, of a JSON file of the `tokenizers` library, of a
            folder with such a `tokenizer.json` (as Hugging Face models have), or of a tiktoken rank file (such as
            `gpt2.tiktoken`). Files are told apart by their content.

    Raises:
        DataError: no such file, or it is no tokenizer that can be used; with the reason.
        MissingExtraError: the library that reads it is not installed.
    """
    if name == "bytes":
        return CharTokenizer()
    path = _file(Path(name))
    text = _read(path)
    try:
        if text.lstrip().startswith("{"):
            return json_tokenizer(text)
        return RankTokenizer(tokens_of_rank_file(text))
    except DataError as error:
        raise DataError(f"{path}: {error}") from error


def _file(path: Path) -> Path:
    if path.is_dir():
        if not (path / JSON_FILE).is_file():
            raise DataError(
                f"{path}: this folder has no {JSON_FILE}; {_KINDS}. The `transformers` library makes one of other "
                f"files: AutoTokenizer.from_pretrained(…).save_pretrained(…)"
            )
        return path / JSON_FILE
    if not path.exists():
        raise DataError(f"{path}: no such tokenizer file; {_KINDS}")
    if not path.is_file():
        raise DataError(f"{path}: not a regular file; {_KINDS}")
    return path


def _read(path: Path) -> str:
    try:
        size = path.stat().st_size
        if size > LARGEST_FILE:
            raise DataError(f"{path}: {size} bytes are more than a tokenizer file may have ({LARGEST_FILE}); {_KINDS}")
        return path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not text, so not a tokenizer file that can be read; {_KINDS}") from error
