"""Tokenizers of the `tokenizers` library, in its JSON format."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from speedtronic.data.tokenizers.token_ids import UNMAPPED, check_id, utf8
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
)
"""Names of the token that ends a text; of those that a tokenizer has among its added tokens, the first is taken."""


class JsonTokenizer:
    """A tokenizer as the `tokenizers` library describes it.

    Text is always encoded as ordinary text: no special tokens are added, one that spells a special token does not
    get its id, and truncation and padding that the description asks for are left out.

    Args:
        description: the parsed JSON.

    Attributes:
        structure: the description without the model's vocabulary and merges.

    Raises:
        DataError: the library cannot read it, or no token ends a text.
        MissingExtraError: the library is not installed.
    """

    def __init__(self, description: Mapping[str, Any]) -> None:
        self._separator = _separator(description["added_tokens"])
        plain = _plain(description, self._separator)
        self.structure = _structure(plain)
        self._text = json.dumps(plain, ensure_ascii=False, separators=(",", ":"))
        self._tokenizer = _built(self._text)
        # Not part of the JSON: special tokens are not looked for in text.
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
        return [self._without_separators(np.array(encoding.ids, np.uint32)) for encoding in encodings]

    def _without_separators(self, ids: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
        """Some models know the separator as a word, or give its id to what they do not know."""
        if (ids == self.separator_id).any():
            raise DataError(
                f"the text has what this tokenizer takes for its separator {self._separator!r}, so that where a "
                f"document ends could not be told; take it out of the text or choose another tokenizer"
            )
        return ids

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
    if not _is_description(description):
        raise DataError("not a tokenizer of the `tokenizers` library: it must have a model and a list added_tokens")
    decoder = description.get("decoder")
    if isinstance(decoder, dict) and decoder.get("type") == "ByteLevel":
        return ByteLevelTokenizer(description)
    return JsonTokenizer(description)


def _is_description(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and isinstance(value.get("model"), dict)
        and isinstance(tokens := value.get("added_tokens"), list)
        and all(isinstance(token, dict) and isinstance(token.get("content"), str) for token in tokens)
    )


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


def _plain(description: Mapping[str, Any], separator: str) -> dict[str, Any]:
    """The description without what shortens and fills texts, and with a separator that is not looked for in text."""
    tokens = description["added_tokens"]
    marked = [{**token, "special": True} if token["content"] == separator else token for token in tokens]
    return {**description, "added_tokens": marked, "truncation": None, "padding": None}


def _structure(description: Mapping[str, Any]) -> dict[str, Any]:
    small = {name: value for name, value in description["model"].items() if name not in ("vocab", "merges")}
    return {**description, "model": small}


def _built(text: str) -> tokenizers.Tokenizer:
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
