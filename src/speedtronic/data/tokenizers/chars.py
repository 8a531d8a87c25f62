"""Tokenizers that need no training: UTF-8 bytes, and the characters of a corpus."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from speedtronic.data.tokenizers.base import UNMAPPED, IdArray, check_id, utf8
from speedtronic.errors import DataError

BYTE_VALUES = 256


class CharTokenizer:
    """One token per UTF-8 byte; ids are the byte values 0 to 255, in a vocabulary of any size.

    A vocabulary larger than 256 has ids without a meaning, which decode to U+FFFD. A smaller one refuses to encode
    text with a byte that does not fit: two bytes never share an id.
    """

    separator_id = 0

    def __init__(self, vocab_size: int = BYTE_VALUES) -> None:
        if vocab_size < 1:
            raise DataError(f"vocab_size must be at least 1, not {vocab_size}")
        self.vocab_size = vocab_size

    def encode_array(self, text: str) -> IdArray:
        ids = np.frombuffer(utf8(text), np.uint8)
        self.check_bytes(ids, where="the text")
        return ids

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.encode_array(text).tolist()
        return ids

    def check_bytes(self, values: IdArray, *, where: str, offset: int = 0) -> None:
        """Raise DataError for the first byte outside this vocabulary; `values[0]` is at `offset`."""
        if self.vocab_size >= BYTE_VALUES or not len(values) or int(values.max()) < self.vocab_size:
            return
        at = int(np.argmax(values >= self.vocab_size))
        raise DataError(
            f"{where}: byte 0x{int(values[at]):02x} (id {int(values[at])}) at offset {offset + at} does not "
            f"fit a vocabulary of {self.vocab_size} (ids 0 to {self.vocab_size - 1}); "
            f"a vocab_size of {BYTE_VALUES} holds every byte"
        )

    def token_bytes(self, token: int) -> bytes:
        check_id(token, self.vocab_size)
        return bytes([token]) if token < BYTE_VALUES else UNMAPPED

    def decode(self, ids: Iterable[int]) -> str:
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", "replace")

    def spec(self) -> dict[str, Any]:
        return {"type": "bytes", "vocab_size": self.vocab_size}

    def __repr__(self) -> str:
        return f"CharTokenizer(vocab_size={self.vocab_size})"


class CorpusCharTokenizer:
    """One token per Unicode character of a corpus; ids follow the order of the code points.

    The vocabulary is the corpus's characters and NUL, which separates documents and has id 0.
    """

    separator_id = 0

    def __init__(self, characters: Iterable[str]) -> None:
        self.characters = "".join(sorted({*characters, "\0"}))
        code_points = np.frombuffer(self.characters.encode("utf-32-le"), np.uint32)
        # Maps a code point to id + 1; 0 stands for a character outside the vocabulary.
        self._table = np.zeros(int(code_points[-1]) + 1, np.uint32)
        self._table[code_points] = np.arange(1, len(code_points) + 1, dtype=np.uint32)

    @classmethod
    def from_texts(cls, texts: Iterable[str]) -> CorpusCharTokenizer:
        """Build the vocabulary from the pieces of a corpus. Each piece is read once and not kept."""
        characters: set[str] = set()
        for text in texts:
            characters.update(text)
        return cls(characters)

    @property
    def vocab_size(self) -> int:
        return len(self.characters)

    def encode_array(self, text: str) -> IdArray:
        code_points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
        known = code_points < len(self._table)
        ids = self._table[np.where(known, code_points, 0)]
        missing = ~known | (ids == 0)
        if missing.any():
            at = int(np.argmax(missing))
            raise DataError(
                f"character {text[at]!r} (U+{ord(text[at]):04X}) at position {at} is not among the "
                f"{self.vocab_size} characters of this tokenizer's corpus"
            )
        return ids - np.uint32(1)

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.encode_array(text).tolist()
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        tokens = list(ids)
        for token in tokens:
            check_id(token, self.vocab_size)
        return "".join(self.characters[token] for token in tokens)

    def spec(self) -> dict[str, Any]:
        return {"type": "chars", "characters": self.characters}

    def __repr__(self) -> str:
        return f"CorpusCharTokenizer({self.vocab_size} characters)"
