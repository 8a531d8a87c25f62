"""What a tokenizer is, what all kinds of tokenizers share, and text from a stream of tokens."""

from __future__ import annotations

import codecs
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from speedtronic.errors import DataError

IdArray = npt.NDArray[np.unsignedinteger[Any]]

UNMAPPED = b"\xff"
"""Stands for an id without a meaning. UTF-8 never has this byte, so it decodes to U+FFFD."""

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
    """A tokenizer in which each token always stands for the same bytes."""

    def token_bytes(self, token: int) -> bytes:
        """The bytes of one token; they may be only a part of a character. Raises DataError for an id outside the
        vocabulary."""


def check_id(token: int, vocab_size: int) -> None:
    """Raise DataError for an id outside the vocabulary."""
    if not 0 <= token < vocab_size:
        raise DataError(f"token id {token} is outside the tokenizer's vocabulary of {vocab_size}")


def utf8(text: str) -> bytes:
    """The text in UTF-8. Raises DataError for a lone surrogate, which UTF-8 cannot encode."""
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(f"the text has a lone surrogate at character {error.start}: not Unicode") from error


class StreamDecoder:
    """Text from tokens, one token at a time. A character is given out when all of its bytes have come.

    The pieces together equal what the tokenizer decodes from all tokens at once. Only bytes that are not UTF-8 may
    look different, where the tokenizer has its own way to show them.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._bytewise = tokenizer if isinstance(tokenizer, BytewiseTokenizer) else None
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        # For a tokenizer without `token_bytes`: the tokens given out last, and those that may be incomplete.
        self._given: list[int] = []
        self._held: list[int] = []

    def push(self, token: int) -> str:
        """The text that `token` completes, maybe none. Raises DataError for an id outside the vocabulary."""
        if self._bytewise is not None:
            return self._utf8.decode(self._bytewise.token_bytes(token))
        self._held.append(token)
        text = self._text_of_held()
        # A token that is not whole characters is one byte, and no character has more bytes than this.
        if text.endswith(REPLACEMENT_CHARACTER) and len(self._held) < LONGEST_CHARACTER:
            return ""
        self._give_held()
        return text

    def flush(self) -> str:
        """The text of the tokens that are still held; incomplete characters become U+FFFD."""
        text = self._utf8.decode(b"", final=True) + self._text_of_held()
        self._utf8.reset()
        self._give_held()
        return text

    def _text_of_held(self) -> str:
        """What the held tokens add to the text of the tokens before them: some tokenizers put a space between."""
        if not self._held:
            return ""
        before = self._tokenizer.decode(self._given)
        return self._tokenizer.decode([*self._given, *self._held])[len(before) :]

    def _give_held(self) -> None:
        if self._held:
            self._given, self._held = self._held, []


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

    Only a characterwise tokenizer may see the pieces one by one. Any other gets the whole text at once, because it
    may merge characters across two pieces.
    """
    if isinstance(tokenizer, CharacterwiseTokenizer):
        yield from map(tokenizer.encode_array, texts)
    else:
        yield from encode_texts(tokenizer, ["".join(texts)])
