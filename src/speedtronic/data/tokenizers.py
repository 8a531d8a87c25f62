"""Tokenizers that need no training: UTF-8 bytes, and the characters of a corpus."""

from __future__ import annotations

import codecs
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from speedtronic.errors import DataError

BYTE_VALUES = 256
REPLACEMENT_CHARACTER = "\ufffd"

IdArray = npt.NDArray[np.unsignedinteger[Any]]


class Tokenizer(Protocol):
    """Text to token ids and back."""

    @property
    def vocab_size(self) -> int:
        """Number of ids; every id is in [0, vocab_size)."""

    @property
    def separator_id(self) -> int:
        """The id that ends a document in a stream of documents."""

    def encode(self, text: str) -> list[int]:
        """The ids of `text`. Raises DataError for text that the vocabulary cannot hold."""

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`; bytes that are not valid UTF-8 become U+FFFD."""

    def spec(self) -> dict[str, Any]:
        """A JSON-able description from which `tokenizer_from_spec` builds an equal tokenizer."""


@runtime_checkable
class CharacterwiseTokenizer(Tokenizer, Protocol):
    """A tokenizer that encodes each character by itself, so that text may be cut between any two of them."""

    def encode_array(self, text: str) -> IdArray:
        """The ids of `text` as an array: `encode` without a Python integer per token."""


class CharTokenizer:
    """One token per UTF-8 byte; ids are the byte values 0 to 255, in a vocabulary of any size.

    A vocabulary larger than 256 leaves ids without a meaning, which decode to U+FFFD. In a smaller one, text
    with a byte that does not fit is refused when it is encoded: bytes are never folded together.
    """

    separator_id = 0

    def __init__(self, vocab_size: int = BYTE_VALUES) -> None:
        if vocab_size < 1:
            raise DataError(f"vocab_size must be at least 1, not {vocab_size}")
        self.vocab_size = vocab_size

    def encode_array(self, text: str) -> IdArray:
        try:
            ids = np.frombuffer(text.encode("utf-8"), np.uint8)
        except UnicodeEncodeError as error:
            raise DataError(f"the text has a lone surrogate at character {error.start}: not Unicode") from error
        self.check_bytes(ids, where="the text")
        return ids

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.encode_array(text).tolist()
        return ids

    def check_bytes(self, values: IdArray, *, where: str, offset: int = 0) -> None:
        """Raise DataError for the first byte that is no id of this vocabulary; `values[0]` is at `offset`."""
        if self.vocab_size >= BYTE_VALUES or not len(values) or int(values.max()) < self.vocab_size:
            return
        at = int(np.argmax(values >= self.vocab_size))
        raise DataError(
            f"{where}: byte 0x{int(values[at]):02x} (id {int(values[at])}) at offset {offset + at} does not "
            f"fit a vocabulary of {self.vocab_size} (ids 0 to {self.vocab_size - 1}); "
            f"a vocab_size of {BYTE_VALUES} holds every byte"
        )

    def decode(self, ids: Iterable[int]) -> str:
        decoder = StreamDecoder(self)
        return "".join(decoder.push(token) for token in ids) + decoder.flush()

    def spec(self) -> dict[str, Any]:
        return {"type": "bytes", "vocab_size": self.vocab_size}

    def __repr__(self) -> str:
        return f"CharTokenizer(vocab_size={self.vocab_size})"


class CorpusCharTokenizer:
    """One token per Unicode character of a corpus; ids follow the order of the code points.

    The vocabulary is the corpus's characters and NUL, which separates documents and so has id 0.
    """

    separator_id = 0

    def __init__(self, characters: Iterable[str]) -> None:
        self.characters = "".join(sorted({*characters, "\0"}))
        code_points = np.frombuffer(self.characters.encode("utf-32-le"), np.uint32)
        # Code point -> id + 1; 0 stands for a character outside the vocabulary.
        self._table = np.zeros(int(code_points[-1]) + 1, np.uint32)
        self._table[code_points] = np.arange(1, len(code_points) + 1, dtype=np.uint32)

    @classmethod
    def from_texts(cls, texts: Iterable[str]) -> CorpusCharTokenizer:
        """Build the vocabulary from the pieces of a corpus, which are read once and not kept."""
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
        return "".join(self._character(token) for token in ids)

    def _character(self, token: int) -> str:
        _check_id(token, self.vocab_size)
        return self.characters[token]

    def spec(self) -> dict[str, Any]:
        return {"type": "chars", "characters": self.characters}

    def __repr__(self) -> str:
        return f"CorpusCharTokenizer({self.vocab_size} characters)"


def _check_id(token: int, vocab_size: int) -> None:
    if not 0 <= token < vocab_size:
        raise DataError(f"token id {token} is outside the tokenizer's vocabulary of {vocab_size}")


class StreamDecoder:
    """Text from tokens one at a time; a character whose bytes have not all come yet is held back."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._held: list[int] = []

    def push(self, token: int) -> str:
        """The text that `token` completes, maybe none. Raises DataError for an id outside the vocabulary."""
        if isinstance(self._tokenizer, CharTokenizer):
            return self._push_byte(token)
        self._held.append(token)
        text = self._tokenizer.decode(self._held)
        if text.endswith(REPLACEMENT_CHARACTER):
            return ""
        self._held.clear()
        return text

    def _push_byte(self, token: int) -> str:
        _check_id(token, self._tokenizer.vocab_size)
        if token < BYTE_VALUES:
            return self._utf8.decode(bytes([token]))
        return self.flush() + REPLACEMENT_CHARACTER

    def flush(self) -> str:
        """The rest: bytes still held back, which no later token can complete, become U+FFFD."""
        text = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        if self._held:
            text += self._tokenizer.decode(self._held)
            self._held.clear()
        return text


def tokenizer_from_spec(spec: Mapping[str, Any]) -> Tokenizer:
    """Rebuild the tokenizer that wrote `spec`. Raises DataError for a type that is not known."""
    match spec:
        case {"type": "bytes", "vocab_size": int(vocab_size)}:
            return CharTokenizer(vocab_size)
        case {"type": "chars", "characters": str(characters)}:
            return CorpusCharTokenizer(characters)
    raise DataError(f"unknown tokenizer type {spec.get('type')!r}; this version knows 'bytes' and 'chars'")


def spec_fingerprint(spec: Mapping[str, Any]) -> str:
    """SHA-256 (hex) of a tokenizer's spec: equal for tokenizers that give equal ids."""
    canonical = json.dumps(spec, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def encode_pieces(tokenizer: Tokenizer, texts: Iterable[str]) -> Iterator[IdArray]:
    """The ids of one text that arrives in pieces.

    Only a characterwise tokenizer may see the pieces one by one; any other gets the whole text at once, since
    what it merges may lie across a cut.
    """
    if isinstance(tokenizer, CharacterwiseTokenizer):
        yield from map(tokenizer.encode_array, texts)
    else:
        yield np.asarray(tokenizer.encode("".join(texts)), np.uint32)
