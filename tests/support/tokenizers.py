"""Small tokenizers of every kind, made in place."""

from __future__ import annotations

import base64
import itertools
import json
from collections.abc import Sequence
from typing import Any

import pytest

from speedtronic.data.tokenizers import tiktoken
from speedtronic.data.tokenizers.huggingface import JsonTokenizer, bytes_of_characters, json_tokenizer
from speedtronic.data.tokenizers.tiktoken import RankTokenizer

# The patterns as the published tokenizer.json files of GPT-2-like, Llama 3, Qwen 2 and GPT-4o-like models write them.
GPT2_JSON = r"""'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
CL100K_JSON = (
    r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"""
    r"""|\s*[\r\n]+|\s+(?!\S)|\s+"""
)
QWEN2_JSON = CL100K_JSON.replace("{1,3}", "")
O200K_JSON = (
    r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"""
    r"""|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"""
    r"""|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"""
)
END = {
    "id": 0,
    "content": "<|endoftext|>",
    "special": True,
    "lstrip": False,
    "rstrip": False,
    "normalized": False,
    "single_word": False,
}

# What regular expressions of tokenizers treat unlike: kinds of white space, letters in both cases and in none, marks,
# numbers, punctuation, contractions, characters outside the first plane, invisible ones, and letters that decompose
# into a space and a mark.
TELLING_TEXTS = [
    *" \n\r\t\x0b\x0c\x1c\x85\xa0\u2028\u2029\u3000\u200b\ufeff",
    *"aBsé字かΣ\u0301\u0e33\ufc5e٣1²",
    *"'’.,/-_!(",
    *"😀🇩\x00",
    *["'s", "'LL", "\r\n", "\n\n", " a", "\nb", ".\n/", "ab cd", "12 345", "...\n\n"],
]
MERGED = sorted(set("".join(TELLING_TEXTS).encode()))

_TEXT = "the cat sat on the mat, the cats' mats\nit's 12 34 and 5678. naïve café 字字 字\n\n" * 4


def description(model: dict[str, Any], **parts: Any) -> dict[str, Any]:
    """What a tokenizer.json holds; the library gives its added tokens the ids behind the model's."""
    added = parts.pop("added", [])
    first = max(model["vocab"].values()) + 1
    empty = dict.fromkeys(("normalizer", "pre_tokenizer", "post_processor", "decoder", "truncation", "padding"))
    tokens = [END, *({**token, "id": first + at} for at, token in enumerate(added))]
    return {"version": "1.0", **empty, "added_tokens": tokens, "model": model, **parts}


def bpe(vocabulary: Sequence[str], merges: Sequence[tuple[str, str]] = (), **options: Any) -> dict[str, Any]:
    """A BPE model whose first id is the end of a text."""
    vocab = {token: at for at, token in enumerate(dict.fromkeys([END["content"], *vocabulary]))}
    return {"type": "BPE", "vocab": vocab, "merges": [list(pair) for pair in merges], **options}


def byte_level_bpe(size: int = 290) -> JsonTokenizer:
    """A byte-level BPE that the library has trained on a little text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=[END["content"]], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([_TEXT], trainer)
    return json_tokenizer(tokenizer.to_str())


def eager_split_bpe(
    pattern: str,
    normalizer: dict[str, Any] | None = None,
    *,
    before: Sequence[dict[str, Any]] = (),
    after: Sequence[dict[str, Any]] = (),
    added: Sequence[dict[str, Any]] = (),
    behavior: str = "Isolated",
    invert: bool = False,
) -> JsonTokenizer:
    """A byte-level BPE that merges any two bytes of `MERGED` inside a piece, so that its ids show where pieces end."""
    spelling_of = {byte: spelled for spelled, byte in bytes_of_characters().items()}
    alphabet = [spelling_of[bytes([byte])] for byte in range(256)]
    pairs = list(itertools.product([alphabet[byte] for byte in MERGED], repeat=2))
    model = bpe([*alphabet, *map("".join, pairs)], pairs)
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": behavior, "invert": invert}
    spelling = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    steps = [*before, split, spelling, *after]
    decoder = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    parts = {"pre_tokenizer": {"type": "Sequence", "pretokenizers": steps}, "decoder": decoder}
    return json_tokenizer(json.dumps(description(model, normalizer=normalizer, added=added, **parts)))


def eager_ranks(size: int) -> RankTokenizer:
    """Ranks that merge any two bytes of `MERGED` inside a piece, under the pattern of the encoding of `size` ranks."""
    single = [bytes([byte]) for byte in range(256)]
    tokens = [*single, *(bytes(pair) for pair in itertools.product(MERGED, repeat=2))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(tiktoken.ENCODINGS, len(tokens), tiktoken.ENCODINGS[size])
        return RankTokenizer(tokens)


def wordpiece(pre_tokenizer: str = "Whitespace") -> JsonTokenizer:
    """WordPiece over the words between white space."""
    words = ["[UNK]", "a", "b", "ab", "cd", "s", "##b", "##s", "##1", "1", "12", ".", ",", "/", "'", "字", "é", "B"]
    model = {
        "type": "WordPiece",
        "vocab": {token: at for at, token in enumerate([END["content"], *words])},
        "unk_token": "[UNK]",
        "continuing_subword_prefix": "##",
        "max_input_chars_per_word": 100,
    }
    decoder = {"type": "WordPiece", "prefix": "##", "cleanup": False}
    return json_tokenizer(json.dumps(description(model, pre_tokenizer={"type": pre_tokenizer}, decoder=decoder)))


def metaspace_bpe() -> JsonTokenizer:
    """Like a SentencePiece model: spaces are part of the words, and one is put before the first."""
    letters = [*"▁abcdefghijklmnopqrstuvwxyz.", *(f"<0x{byte:02X}>" for byte in range(256)), "▁t", "▁th", "▁the"]
    merges = [("▁", "t"), ("▁t", "h"), ("▁th", "e")]
    metaspace = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": True}
    model = bpe(letters, merges, byte_fallback=True, fuse_unk=True)
    steps = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ]
    decoder = {"type": "Sequence", "decoders": steps}
    return json_tokenizer(json.dumps(description(model, pre_tokenizer=metaspace, decoder=decoder)))


def lines_of_ranks(tokens: Sequence[bytes]) -> str:
    """What a rank file with these tokens holds."""
    return "".join(f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(tokens))
