"""Tokenizers as a `tokenizer.json`, the format of Hugging Face's `tokenizers` library.

In this form too, a text with a character that the vocabulary lacks is an error.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from speedtronic.data.tokenizers.chars import BYTE_VALUES
from speedtronic.data.tokenizers.huggingface import bytes_of_characters
from speedtronic.data.tokenizers.tiktoken import ENCODINGS, SEPARATOR, tokens_of_rank_file
from speedtronic.errors import DataError

_SEPARATOR = "\0"  # of bytes and of characters; its id is 0


def tokenizer_json(spec: Mapping[str, Any]) -> str:
    """The text of a `tokenizer.json` whose tokenizer gives the same ids.

    Args:
        spec: of the tokenizer, as `Tokenizer.spec` gives it.

    Raises:
        DataError: its type is unknown, or one of its tokens is spelled like the separator.
    """
    match spec:
        case {"type": "tokenizers", "json": str(text)}:
            return text
        case {"type": "chars", "characters": str(characters)}:
            return _characterwise({character: id_ for id_, character in enumerate(characters)}, [], {"type": "Fuse"})
        case {"type": "bytes", "vocab_size": int(vocab_size)}:
            return _of_bytes(vocab_size)
        case {"type": "tiktoken", "ranks": str(ranks)}:
            return _of_ranks(tokens_of_rank_file(ranks))
    raise DataError(f"no tokenizer.json can be made of a tokenizer of type {spec.get('type')!r}")


def _of_ranks(tokens: Sequence[bytes]) -> str:
    """Byte-pair encoding by ranks as merges of pairs: a pair of tokens that together are a token has its rank.

    The ids are the same except in a text that spells the separator, which is a token of its own here.
    """
    encoding = ENCODINGS[len(tokens)]
    names = {byte: character for character, byte in bytes_of_characters().items()}
    spelled = {token: "".join(names[bytes([byte])] for byte in token) for token in tokens}
    merges = [
        (spelled[token[:cut]], spelled[token[cut:]])
        for token in tokens
        for cut in range(1, len(token))
        if token[:cut] in spelled and token[cut:] in spelled
    ]
    # To Oniguruma, which the library uses, `{1,3}+` repeats the three digits, and `$` is the end of any line.
    # No alternative goes on after those digits, so it does not matter that it may give some back.
    pattern = encoding.pattern.replace("{1,3}+", "{1,3}").replace("$", "\\z")
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    vocabulary = {spelled[token]: rank for rank, token in enumerate(tokens)}
    if SEPARATOR in vocabulary:
        raise DataError(f"no tokenizer.json can be made of ranks with a token {SEPARATOR!r}, which would be two tokens")
    return _description(
        SEPARATOR,
        encoding.separator_id,
        [split, byte_level],
        byte_level,
        {
            "type": "BPE",
            "vocab": {**vocabulary, SEPARATOR: encoding.separator_id},
            "merges": merges,
            "ignore_merges": True,  # a piece that is a token is not merged
        },
    )


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
    # A name that is no single character, so it is not in the vocabulary: the library then refuses unknown ones.
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "[unknown]"}
    return _description(_SEPARATOR, 0, [*before, split], decoder, model)


def _description(
    separator: str,
    separator_id: int,
    steps: list[dict[str, Any]],
    decoder: Mapping[str, Any],
    model: Mapping[str, Any],
) -> str:
    description = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": separator_id,
                "content": separator,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "post_processor": None,
        "decoder": decoder,
        "model": model,
    }
    return json.dumps(description, ensure_ascii=False, indent=2) + "\n"
