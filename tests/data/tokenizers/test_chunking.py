from __future__ import annotations

import io
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from speedtronic.data.tokenizers import chunking
from speedtronic.data.tokenizers.base import IdArray, Tokenizer, encode_texts
from speedtronic.data.tokenizers.chars import CharTokenizer, CorpusCharTokenizer
from speedtronic.data.tokenizers.chunking import CutRule, cut_rule, encode_long, find_cut
from speedtronic.data.tokenizers.from_file import load_tokenizer
from speedtronic.data.tokenizers.huggingface import JsonTokenizer, json_tokenizer
from tests.support.ranks import GPT2_RANKS, needs_gpt2_ranks
from tests.support.tokenizers import (
    CL100K_JSON,
    END,
    GPT2_JSON,
    O200K_JSON,
    QWEN2_JSON,
    TELLING_TEXTS,
    byte_level_bpe,
    eager_ranks,
    eager_split_bpe,
    metaspace_bpe,
    wordpiece,
)

texts = st.lists(st.sampled_from(TELLING_TEXTS), max_size=24).map("".join)


def split(pattern: str, behavior: str = "Isolated", invert: bool = False) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": behavior, "invert": invert}


NFKC = {"type": "NFKC"}
LOWER = {"type": "Sequence", "normalizers": [{"type": "NFD"}, {"type": "Lowercase"}]}
DIGITS = {"type": "Digits", "individual_digits": True}
THREE_DIGITS = split(r"\p{N}{1,3}")
PUNCTUATION = {"type": "Punctuation", "behavior": "MergedWithNext"}
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
WORD = {"content": "ab", "special": False, "lstrip": False, "rstrip": False, "normalized": True, "single_word": True}

MAKERS: dict[str, Callable[[], Tokenizer]] = {
    "cl100k_base ranks": lambda: eager_ranks(100256),
    "o200k_base ranks": lambda: eager_ranks(199998),
    "Llama 3 ranks": lambda: eager_ranks(128000),
    "GPT-2 ranks": lambda: eager_ranks(50256),
    "trained byte-level BPE": byte_level_bpe,
    "GPT-2 split": lambda: eager_split_bpe(GPT2_JSON),
    "cl100k split": lambda: eager_split_bpe(CL100K_JSON, NFKC),
    "Qwen 2 split": lambda: eager_split_bpe(QWEN2_JSON, {"type": "NFC"}),
    "o200k split": lambda: eager_split_bpe(O200K_JSON),
    "removed matches": lambda: eager_split_bpe(O200K_JSON, behavior="Removed", invert=True),
    "digits first": lambda: eager_split_bpe(CL100K_JSON, before=[DIGITS]),
    "three digits first": lambda: eager_split_bpe(CL100K_JSON, before=[THREE_DIGITS]),
    "punctuation first": lambda: eager_split_bpe(GPT2_JSON, LOWER, before=[PUNCTUATION]),
    "digits last": lambda: eager_split_bpe(GPT2_JSON, after=[DIGITS]),
    "an added word": lambda: eager_split_bpe(CL100K_JSON, added=[WORD]),
    "WordPiece": wordpiece,
    "WordPiece, split at spaces": lambda: wordpiece("WhitespaceSplit"),
    "WordPiece, as in BERT": lambda: wordpiece("BertPreTokenizer"),
}


@pytest.fixture(scope="module", params=MAKERS)
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return MAKERS[request.param]()


def all_cuts(text: str, rule: CutRule = "words") -> list[int]:
    file = io.BytesIO(text.encode())
    cuts = []
    position = 1
    while (cut := find_cut(file, position, rule)) is not None:
        cuts.append(cut)
        position = cut + 1
    return cuts


def check_cuts(tokenizer: Tokenizer, text: str) -> None:
    whole = tokenizer.encode(text)
    for cut in all_cuts(text):
        before, after = text.encode()[:cut].decode(), text.encode()[cut:].decode()
        assert tokenizer.encode(before) + tokenizer.encode(after) == whole, (before, after)


@settings(max_examples=60)
@given(text=texts)
@example(text="one.\n/two ab\nx")
@example(text="a\r\nb it's a\nb' s 12 345")
def test_the_parts_of_a_text_have_the_ids_of_the_whole(tokenizer: Tokenizer, text: str) -> None:
    check_cuts(tokenizer, text)


@needs_gpt2_ranks
@settings(max_examples=60)
@given(text=texts)
def test_the_parts_of_a_text_have_the_ids_of_the_whole_in_gpt2(gpt2: Tokenizer, text: str) -> None:
    check_cuts(gpt2, text)


@pytest.fixture(scope="module")
def gpt2() -> Tokenizer:
    return load_tokenizer(str(GPT2_RANKS))


@pytest.mark.parametrize(
    ("size", "text", "cut"),
    [(199998, ".\n/a", 2), (50256, "a\r\nb", 3), (50256, "a \nb", 3), (100256, "a.\nb", 2), (50256, "a b", 2)],
)
def test_other_cuts_are_told_by_the_ids(size: int, text: str, cut: int) -> None:
    tokenizer = eager_ranks(size)

    assert cut not in all_cuts(text)
    assert tokenizer.encode(text[:cut]) + tokenizer.encode(text[cut:]) != tokenizer.encode(text)


def test_characterwise_tokenizers_may_be_cut_anywhere() -> None:
    assert cut_rule(CharTokenizer()) == "characters"
    assert cut_rule(CorpusCharTokenizer("ab")) == "characters"
    assert all_cuts("aé😀b", "characters") == [1, 3, 7]


def changed(tokenizer: JsonTokenizer, **parts: Any) -> JsonTokenizer:
    """The tokenizer with parts of its description, or with options of its model, set otherwise."""
    description = json.loads(tokenizer.spec()["json"])
    description["model"].update(parts.pop("model", {}))
    return json_tokenizer(json.dumps({**description, **parts}))


@pytest.mark.parametrize(
    "parts",
    [
        {"pre_tokenizer": None},
        {"pre_tokenizer": {**BYTE_LEVEL, "add_prefix_space": True}},
        {"pre_tokenizer": {**BYTE_LEVEL, "use_regex": False}},
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [{**BYTE_LEVEL, "use_regex": False}, BYTE_LEVEL]}},
        {"pre_tokenizer": DIGITS},
        {"normalizer": ["a"]},
        {"pre_tokenizer": split(r"\S+|\s+")},
        {"pre_tokenizer": split(GPT2_JSON, behavior="MergedWithPrevious")},
        {"pre_tokenizer": split(GPT2_JSON, invert=True)},
        {"pre_tokenizer": {"type": "CharDelimiterSplit", "delimiter": " "}},
        {"normalizer": {"type": "Strip", "strip_left": True, "strip_right": True}},
        {"normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "_"}},
        {"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Prepend", "prepend": "▁"}]}},
        {"model": {"dropout": 0.1}},
        {"added_tokens": [END, {**WORD, "id": 290, "content": "a b"}]},
        {"added_tokens": [END, {**WORD, "id": 290, "content": "a\xa8"}]},
        {"added_tokens": [END, {**WORD, "id": 290, "lstrip": True}]},
        {"added_tokens": [END, {**WORD, "id": 290, "rstrip": True}]},
        {"added_tokens": [END, {**WORD, "id": 290, "content": "a b", "special": True}]},
    ],
    ids=str,
)
def test_text_for_an_unknown_tokenizer_is_never_cut(parts: dict[str, Any]) -> None:
    assert cut_rule(byte_level_bpe()) == "words"
    assert cut_rule(changed(byte_level_bpe(), **parts)) == "never"


def test_words_that_carry_their_spaces_are_never_cut() -> None:
    assert cut_rule(metaspace_bpe()) == "never"
    assert find_cut(io.BytesIO(b"one two"), 1, "never") is None


@pytest.mark.parametrize(
    ("text", "cuts"),
    [
        ("one two", [3]),
        ("one\ntwo", [4]),
        ("a 1\n2 é", [1, 4, 5]),
        ("one  two", []),
        ("one\n\ntwo", []),
        ("one\r\ntwo", []),
        ("one \ntwo", []),
        ("one\n two", []),
        ("one\ttwo", []),
        ("one\n/two -three", []),
        ("one\x85\ntwo\u2028 three\u200b four", []),
        (" one", []),
        ("one ", []),
        ("é字 字\nΣ", [5, 10]),
        ("a \ufc5e", []),
    ],
)
def test_cuts_lie_beside_the_only_white_space_between_two_words(text: str, cuts: list[int]) -> None:
    assert all_cuts(text) == cuts


@pytest.mark.parametrize("block", [1, 2, 3, 5, 16])
@given(text=texts)
def test_cuts_do_not_depend_on_how_the_file_is_read(block: int, text: str) -> None:
    whole = all_cuts(text)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunking, "_BLOCK", block)
        assert all_cuts(text) == whole


def test_bytes_that_are_not_utf8_are_skipped() -> None:
    text = b"\xff\xfe one\xc3 two three"

    assert find_cut(io.BytesIO(text), 1, "words") == text.index(b" three")
    assert find_cut(io.BytesIO(b"\x80\x80\x80\x80"), 0, "characters") is None


def test_a_file_is_read_once_up_to_the_cut() -> None:
    class Counting(io.BytesIO):
        total = 0

        def read(self, size: int | None = -1) -> bytes:
            found = super().read(size)
            self.total += len(found)
            return found

    file = Counting(b"-" * 100_000 + b"a b" + b"c" * 1_000_000)

    assert find_cut(file, 10, "words") == 100_001
    assert file.total <= 100_000 + 2 * chunking._BLOCK


@pytest.mark.parametrize("make", [byte_level_bpe, metaspace_bpe, CharTokenizer])
def test_a_long_text_has_the_ids_of_the_whole(monkeypatch: pytest.MonkeyPatch, make: Callable[[], Tokenizer]) -> None:
    monkeypatch.setattr(chunking, "_ENCODED_AT_ONCE", 20)
    tokenizer = make()
    text = "the cat sat.\nThe mat  is here\r\n and there   and" * 9

    assert encode_long(tokenizer, text).tolist() == tokenizer.encode(text)
    assert encode_long(tokenizer, "").tolist() == []


def test_a_long_text_is_encoded_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def noted(tokenizer: Tokenizer, texts: list[str]) -> list[IdArray]:
        seen.extend(texts)
        return encode_texts(tokenizer, texts)

    monkeypatch.setattr(chunking, "encode_texts", noted)
    monkeypatch.setattr(chunking, "_ENCODED_AT_ONCE", 10)

    encode_long(byte_level_bpe(), "one two three four-and-twenty blackbirds")

    assert seen == ["one two three", " four-and-twenty", " blackbirds"]
