"""What a tokenizer is, and those that need no training: UTF-8 bytes, and the characters of a corpus."""

from __future__ import annotations

import codecs
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from speedtronic.data.tokenizers.huggingface import json_tokenizer
from speedtronic.data.tokenizers.tiktoken import RankTokenizer, tokens_of_rank_file
from speedtronic.data.tokenizers.token_ids import UNMAPPED, check_id, utf8
from speedtronic.data.tokenizers.token_ids import IdArray as IdArray
from speedtronic.errors import DataError

BYTE_VALUES = 256
REPLACEMENT_CHARACTER = "\ufffd"
LONGEST_CHARACTER = 4  # bytes in UTF-8


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


@runtime_checkable
class BatchTokenizer(Tokenizer, Protocol):
    """A tokenizer that encodes several texts faster than one by one."""

    def encode_batch(self, texts: Sequence[str]) -> Sequence[IdArray]:
        """The ids of each text. Raises DataError for text that the vocabulary cannot hold."""


@runtime_checkable
class BytewiseTokenizer(Tokenizer, Protocol):
    """A tokenizer whose every token stands for the same bytes wherever it occurs."""

    def token_bytes(self, token: int) -> bytes:
        """The bytes of one token, UTF-8 only together with others. Raises DataError for an id outside the
        vocabulary."""


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
        ids = np.frombuffer(utf8(text), np.uint8)
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
        check_id(token, self.vocab_size)
        return self.characters[token]

    def spec(self) -> dict[str, Any]:
        return {"type": "chars", "characters": self.characters}

    def __repr__(self) -> str:
        return f"CorpusCharTokenizer({self.vocab_size} characters)"


class StreamDecoder:
    """Text from tokens one at a time; a character whose bytes have not all come yet is held back.

    The pieces together are what the tokenizer makes of all tokens at once, except that one which decodes bytes that
    are not UTF-8 in a way of its own may show them otherwise.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._bytewise = tokenizer if isinstance(tokenizer, BytewiseTokenizer) else None
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        # Without bytes: tokens whose text has been given, and tokens whose text may not be complete.
        self._given: list[int] = []
        self._held: list[int] = []

    def push(self, token: int) -> str:
        """The text that `token` completes, maybe none. Raises DataError for an id outside the vocabulary."""
        if self._bytewise is not None:
            return self._utf8.decode(self._bytewise.token_bytes(token))
        self._held.append(token)
        text = self._text_of_held()
        # A token that is not whole characters is one byte, so that more than those of one character are none.
        if text.endswith(REPLACEMENT_CHARACTER) and len(self._held) < LONGEST_CHARACTER:
            return ""
        self._give_held()
        return text

    def flush(self) -> str:
        """The rest: bytes still held back, which no later token can complete, become U+FFFD."""
        text = self._utf8.decode(b"", final=True) + self._text_of_held()
        self._utf8.reset()
        self._give_held()
        return text

    def _text_of_held(self) -> str:
        """What the held tokens add to the text of those before them, which may decide about a space between."""
        if not self._held:
            return ""
        before = self._tokenizer.decode(self._given)
        return self._tokenizer.decode([*self._given, *self._held])[len(before) :]

    def _give_held(self) -> None:
        if self._held:
            self._given, self._held = self._held, []


def tokenizer_from_spec(spec: Mapping[str, Any]) -> Tokenizer:
    """Rebuild the tokenizer that wrote `spec`.

    Raises:
        DataError: a type that is not known, or a description that is not one.
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


def spec_fingerprint(spec: Mapping[str, Any]) -> str:
    """SHA-256 (hex) of a tokenizer's spec: equal for tokenizers that give equal ids."""
    canonical = json.dumps(spec, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def encode_texts(tokenizer: Tokenizer, texts: Sequence[str]) -> list[IdArray]:
    """The ids of each text, in the fastest way that the tokenizer has. Raises DataError as `encode` does."""
    match tokenizer:
        case CharacterwiseTokenizer():
            return [tokenizer.encode_array(text) for text in texts]
        case BatchTokenizer():
            return list(tokenizer.encode_batch(texts))
    return [np.asarray(tokenizer.encode(text), np.uint32) for text in texts]


def encode_pieces(tokenizer: Tokenizer, texts: Iterable[str]) -> Iterator[IdArray]:
    """The ids of one text that arrives in pieces.

    Only a characterwise tokenizer may see the pieces one by one; any other gets the whole text at once, since
    what it merges may lie across a cut.
    """
    if isinstance(tokenizer, CharacterwiseTokenizer):
        yield from map(tokenizer.encode_array, texts)
    else:
        yield from encode_texts(tokenizer, ["".join(texts)])
