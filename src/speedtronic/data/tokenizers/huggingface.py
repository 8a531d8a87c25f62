"""Tokenizers of the `tokenizers` library, in its JSON format."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from speedtronic.data.tokenizers.base import UNMAPPED, check_id, utf8
from speedtronic.errors import DataError, MissingExtraError

if TYPE_CHECKING:
    import tokenizers

SEPARATORS = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|end▁of▁sentence|>",
    "<｜end▁of▁sentence｜>",
    "</s>",
    "<eos>",
    "[EOS]",
    "<|eos|>",
    "<|im_end|>",
    "[SEP]",
    "\0",
)
"""Names of the token that ends a text. The first one among a tokenizer's added tokens is its separator."""


class JsonTokenizer:
    """A tokenizer as the `tokenizers` library describes it.

    Text is always encoded as ordinary text: no special tokens are added, text that spells a special token does not
    get its id, and truncation and padding in the description are ignored.

    Args:
        description: the parsed JSON.

    Attributes:
        structure: the description without the model's vocabulary and merges.

    Raises:
        DataError: the library cannot read it, or no token ends a text.
        MissingExtraError: the library is not installed.
    """

    def __init__(self, description: Mapping[str, Any]) -> None:
        added = description["added_tokens"]
        self._separator = _separator(added)
        # The separator must be special, so that it is not found in text. Truncation and padding would change the ids.
        added = [{**token, "special": True} if token["content"] == self._separator else token for token in added]
        plain = {**description, "added_tokens": added, "truncation": None, "padding": None}
        model = {name: value for name, value in plain["model"].items() if name not in ("vocab", "merges")}
        self.structure: dict[str, Any] = {**plain, "model": model}
        self._text = json.dumps(plain, ensure_ascii=False, separators=(",", ":"))
        self._tokenizer = _library_tokenizer(self._text)
        # The JSON cannot say this: encode text that spells a special token as ordinary text.
        self._tokenizer.encode_special_tokens = True
        self._ids = self._tokenizer.get_vocab(with_added_tokens=True)
        self.separator_id = self._ids[self._separator]
        self.vocab_size = max(self._ids.values()) + 1

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.encode_batch([text])[0].tolist()
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[npt.NDArray[np.uint32]]:
        """The ids of each text, uint32. Raises DataError as `encode` does."""
        try:
            encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        except Exception as error:  # noqa: BLE001 - what the library raises for text that it cannot encode
            for text in texts:
                utf8(text)
            raise DataError(f"the `tokenizers` library cannot encode the text: {error}") from error
        arrays = [np.array(encoding.ids, np.uint32) for encoding in encodings]
        # Some models have the separator as a word, or use its id for unknown words.
        if any((ids == self.separator_id).any() for ids in arrays):
            raise DataError(
                f"this tokenizer encodes a part of the text as its separator {self._separator!r}, so the end of a "
                f"document could not be recognised; remove that part or choose another tokenizer"
            )
        return arrays

    def encode_with_special_tokens(
        self, texts: Sequence[str]
    ) -> Iterator[tuple[npt.NDArray[np.uint32], npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
        """The ids of each text in which special tokens are spelled, as in a chat template's.

        Returns:
            For each text the ids (T,), and for each of them where its characters begin and stop in the text.

        Raises:
            DataError: text that the vocabulary cannot hold.
        """
        try:
            encodings = self._with_special_tokens.encode_batch(texts, add_special_tokens=False)
        except Exception as error:  # noqa: BLE001 - what the library raises for text that it cannot encode
            raise DataError(f"the `tokenizers` library cannot encode the text: {error}") from error
        for encoding in encodings:
            places = np.array(encoding.offsets, np.int64).reshape(-1, 2)
            yield np.array(encoding.ids, np.uint32), places[:, 0], places[:, 1]

    @cached_property
    def _with_special_tokens(self) -> tokenizers.Tokenizer:
        # A post-processor adds tokens, which are not wanted here, or takes the spaces out of the places of tokens.
        return _library_tokenizer(json.dumps({**json.loads(self._text), "post_processor": None}))

    @property
    def special_tokens(self) -> tuple[str, ...]:
        """The names of its special tokens."""
        added = self.structure["added_tokens"]
        return tuple(token["content"] for token in added if token["special"])

    def decode(self, ids: Iterable[int]) -> str:
        tokens = list(ids)
        for token in tokens:
            check_id(token, self.vocab_size)
        return self._tokenizer.decode(tokens, skip_special_tokens=False)

    def spec(self) -> dict[str, Any]:
        return {"type": "tokenizers", "json": self._text}

    def __reduce__(self) -> tuple[Callable[[str], JsonTokenizer], tuple[str]]:
        return json_tokenizer, (self._text,)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(vocab_size={self.vocab_size})"


class ByteLevelTokenizer(JsonTokenizer):
    """A JSON tokenizer whose decoder is ByteLevel: each token stands for bytes."""

    def token_bytes(self, token: int) -> bytes:
        """The bytes of one token; DataError for an id outside the vocabulary."""
        check_id(token, self.vocab_size)
        return self._bytes.get(token, UNMAPPED)

    def decode(self, ids: Iterable[int]) -> str:
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", "replace")

    @cached_property
    def _bytes(self) -> dict[int, bytes]:
        bytes_of = bytes_of_characters()
        added = self._tokenizer.get_added_tokens_decoder()
        return {
            token: name.encode() if token in added else b"".join(bytes_of.get(c, c.encode()) for c in name)
            for name, token in self._ids.items()
        }


def json_tokenizer(text: str) -> JsonTokenizer:
    """The tokenizer of a JSON file's text. Raises as `JsonTokenizer` does."""
    try:
        description = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"not JSON: {error}") from error
    well_formed = (
        isinstance(description, dict)
        and isinstance(description.get("model"), dict)
        and isinstance(tokens := description.get("added_tokens"), list)
        and all(isinstance(token, dict) and isinstance(token.get("content"), str) for token in tokens)
    )
    if not well_formed:
        raise DataError("not a tokenizer of the `tokenizers` library: it must have a model and a list added_tokens")
    decoder = description.get("decoder")
    if isinstance(decoder, dict) and decoder.get("type") == "ByteLevel":
        return ByteLevelTokenizer(description)
    return JsonTokenizer(description)


def _separator(added_tokens: Sequence[Mapping[str, Any]]) -> str:
    """The name of the token that ends a text."""
    names = {token["content"] for token in added_tokens}
    for name in SEPARATORS:
        if name in names:
            return name
    raise DataError(
        f"no token ends a text: its added tokens have none of {', '.join(SEPARATORS)}; add one to the tokenizer with "
        f"`add_special_tokens` and save it again"
    )


def _library_tokenizer(text: str) -> tokenizers.Tokenizer:
    try:
        import tokenizers
    except ImportError as error:
        raise MissingExtraError("a tokenizer JSON file needs tokenizers; install speedtronic[tokenizers]") from error
    try:
        return tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # noqa: BLE001 - what the library raises for a description that it cannot read
        raise DataError(f"the `tokenizers` library cannot read it: {error}") from error


def bytes_of_characters() -> dict[str, bytes]:
    """The byte that each character of a byte-level vocabulary stands for, as in GPT-2's published `encoder.py`.

    Printable characters of Latin-1 stand for themselves; the others follow from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    characters = {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(others)}
    return {character: bytes([byte]) for character, byte in characters.items()}
