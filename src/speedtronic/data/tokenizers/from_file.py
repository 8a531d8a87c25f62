"""A tokenizer from a file or a name, and from the spec that is kept with prepared data."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from speedtronic.data.tokenizers.base import Tokenizer
from speedtronic.data.tokenizers.chars import CharTokenizer, CorpusCharTokenizer
from speedtronic.data.tokenizers.huggingface import json_tokenizer
from speedtronic.data.tokenizers.tiktoken import RankTokenizer, tokens_of_rank_file
from speedtronic.durable.files import where_looked
from speedtronic.errors import DataError

LARGEST_FILE = 256 * 2**20
"""Bytes that a tokenizer file may have; the largest published ones have some 35 MB."""

JSON_FILE = "tokenizer.json"
_KINDS = (
    "a tokenizer is `bytes`, a JSON file of the `tokenizers` library, a folder with such a tokenizer.json, or a "
    "tiktoken rank file"
)


def load_tokenizer(name: str) -> Tokenizer:
    """The tokenizer for a name or path. A file is read as data; nothing in it is run.

    Args:
        name: "bytes", or the path, relative to the working folder, of a JSON file of the `tokenizers` library, of a
            folder with such a `tokenizer.json` (as Hugging Face models have), or of a tiktoken rank file (such as
            `gpt2.tiktoken`). The content tells which kind of file it is.

    Raises:
        DataError: there is no such file, or no tokenizer can be made of it; with the reason.
        MissingExtraError: the library that reads it is not installed.
    """
    if name == "bytes":
        return CharTokenizer()
    path = Path(name)
    if path.is_dir():
        path = path / JSON_FILE
        if not path.is_file():
            raise DataError(
                f"{name}: this folder has no {JSON_FILE}; {_KINDS}. The `transformers` library makes one of other "
                f"files: AutoTokenizer.from_pretrained(…).save_pretrained(…)"
            )
    if not path.exists():
        raise DataError(f"{path}: no such tokenizer file; {_KINDS}{where_looked(path)}")
    if not path.is_file():
        raise DataError(f"{path}: not a regular file; {_KINDS}")
    try:
        size = path.stat().st_size
        if size > LARGEST_FILE:
            raise DataError(f"{path}: {size} bytes are more than a tokenizer file may have ({LARGEST_FILE}); {_KINDS}")
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not text, so not a tokenizer file that can be read; {_KINDS}") from error
    try:
        # A JSON file begins with a brace, which no line of base64 does.
        if text.lstrip().startswith("{"):
            return json_tokenizer(text)
        return RankTokenizer(tokens_of_rank_file(text))
    except DataError as error:
        raise DataError(f"{path}: {error}") from error


def tokenizer_from_spec(spec: Mapping[str, Any]) -> Tokenizer:
    """Rebuild the tokenizer that wrote `spec`.

    Raises:
        DataError: the type is unknown, or the description is damaged.
        MissingExtraError: the library that the tokenizer needs is not installed.
    """
    match spec:
        case {"type": "bytes", "vocab_size": int(vocab_size)}:
            return CharTokenizer(vocab_size)
        case {"type": "chars", "characters": str(characters)}:
            return CorpusCharTokenizer(characters)
        case {"type": "tokenizers", "json": str(text)}:
            return json_tokenizer(text)
        case {"type": "tiktoken", "ranks": str(text)}:
            return RankTokenizer(tokens_of_rank_file(text))
    raise DataError(
        f"unknown tokenizer type {spec.get('type')!r}; this version knows 'bytes', 'chars', 'tokenizers' and 'tiktoken'"
    )
