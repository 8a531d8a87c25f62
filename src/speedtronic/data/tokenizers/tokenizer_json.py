"""Tokenizers as a `tokenizer.json`, the format of Hugging Face's `tokenizers` library.

In this form too, a text with a character that the vocabulary lacks is an error.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from speedtronic.data.tokenizers.chars import BYTE_VALUES
from speedtronic.data.tokenizers.huggingface import bytes_of_characters

_SEPARATOR = "\0"  # of bytes and of characters; its id is 0


def tokenizer_json(spec: Mapping[str, Any]) -> str | None:
    """The text of a `tokenizer.json` whose tokenizer gives the same ids, or None where none has been built.

    Args:
        spec: of the tokenizer, as `Tokenizer.spec` gives it.
    """
    match spec:
        case {"type": "tokenizers", "json": str(text)}:
            return text
        case {"type": "chars", "characters": str(characters)}:
            return _characterwise({character: id_ for id_, character in enumerate(characters)}, [], {"type": "Fuse"})
        case {"type": "bytes", "vocab_size": int(vocab_size)}:
            return _of_bytes(vocab_size)
    return None


def _of_bytes(vocab_size: int) -> str:
    names = {byte[0]: character for character, byte in bytes_of_characters().items()}
    # The separator is found before the text becomes byte characters, so its name must be the byte itself: the
    # character that stands for the byte is a letter in other texts.
    names[0] = _SEPARATOR
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    vocabulary = {names[byte]: byte for byte in range(min(vocab_size, BYTE_VALUES))}
    return _characterwise(vocabulary, [byte_level], byte_level)


def _characterwise(vocabulary: Mapping[str, int], before: list[dict[str, Any]], decoder: Mapping[str, Any]) -> str:
    """A tokenizer that looks each character up in a vocabulary, after the steps in `before`."""
    split = {"type": "Split", "pattern": {"Regex": "[\\s\\S]"}, "behavior": "Isolated", "invert": False}
    description = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": 0,
                "content": _SEPARATOR,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*before, split]},
        "post_processor": None,
        "decoder": decoder,
        # A name that is no single character, so it is not in the vocabulary: the library then refuses unknown ones.
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "[unknown]"},
    }
    return json.dumps(description, ensure_ascii=False, indent=2) + "\n"
