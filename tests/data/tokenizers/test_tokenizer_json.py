"""A `tokenizer.json` of bytes, characters or ranks gives the ids of the tokenizer that it describes."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from speedtronic.data.tokenizers import tiktoken
from speedtronic.data.tokenizers.chars import CharTokenizer, CorpusCharTokenizer
from speedtronic.data.tokenizers.from_file import load_tokenizer
from speedtronic.data.tokenizers.huggingface import json_tokenizer
from speedtronic.data.tokenizers.tiktoken import SEPARATOR, RankTokenizer
from speedtronic.data.tokenizers.tokenizer_json import tokenizer_json
from speedtronic.errors import DataError
from tests.support.ranks import GPT2_RANKS, needs_gpt2_ranks
from tests.support.tokenizers import MERGED, TELLING_TEXTS, eager_ranks

TEXTS = ["", "a", "The quick\n\t brown  fox.\r\n", "Ārose é ⟨𝄞⟩ \u00a0\u200d👩‍👧", "[unknown] <s> </s>", " \n "]
CHARACTERS = CorpusCharTokenizer("".join(TEXTS) + "onetwo")
SMALL = CharTokenizer(128)

tokenizers = pytest.importorskip("tokenizers")


def made(tokenizer: Any) -> Any:
    return tokenizers.Tokenizer.from_str(tokenizer_json(tokenizer.spec()))


@pytest.mark.parametrize("ours", [CharTokenizer(), CharTokenizer(1000), CHARACTERS], ids=repr)
def test_ids_and_text_are_the_same(ours: Any) -> None:
    theirs = made(ours)
    for text in [*TEXTS, "one\0two\0", "\0"]:
        ids = theirs.encode(text).ids
        assert ids == ours.encode(text)
        assert theirs.decode(ids, skip_special_tokens=False) == text == ours.decode(ids)


def test_every_byte_has_its_value() -> None:
    theirs = made(CharTokenizer())
    text = "".join(map(chr, range(0x80)))
    assert theirs.encode(text).ids == list(range(0x80))
    assert theirs.get_vocab_size() == 256


@pytest.mark.parametrize(("ours", "text"), [(CHARACTERS, "Z"), (SMALL, "é")], ids=["characters", "bytes"])
def test_what_the_vocabulary_lacks_is_an_error_there_too(ours: Any, text: str) -> None:
    with pytest.raises(DataError):
        ours.encode(text)
    with pytest.raises(Exception, match="WordLevel"):  # the library has no class of its own for it
        made(ours).encode(text)


@pytest.mark.parametrize("ours", [CharTokenizer(), CHARACTERS], ids=repr)
def test_it_is_a_tokenizer_for_our_data_too(ours: Any) -> None:
    text = tokenizer_json(ours.spec())
    again = json_tokenizer(text)
    assert again.separator_id == ours.separator_id == 0
    for part in TEXTS:
        assert again.encode(part) == ours.encode(part)
        assert again.decode(ours.encode(part)) == part
    assert tokenizer_json(again.spec()) == again.spec()["json"]
    assert json.loads(again.spec()["json"])["model"] == json.loads(text)["model"]


# Ranks of tiktoken.


def ranks(monkeypatch: pytest.MonkeyPatch, tokens: Sequence[bytes], separator_id: int) -> RankTokenizer:
    """All bytes and then `tokens`, under GPT-2's pattern."""
    every = [*(bytes([byte]) for byte in range(256)), *tokens]
    pattern = tiktoken.ENCODINGS[50256].pattern
    monkeypatch.setitem(
        tiktoken.ENCODINGS, len(every), tiktoken.RankEncoding("some", pattern, separator_id, separator_id + 9)
    )
    return RankTokenizer(every)


@needs_gpt2_ranks
def test_gpt2_has_the_same_ids_for_any_text() -> None:
    ours = load_tokenizer(str(GPT2_RANKS))
    theirs = made(ours)

    @given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
    def check(text: str) -> None:
        assert theirs.encode(text).ids == ours.encode(text)

    check()
    for page in sorted(Path(__file__).parents[3].glob("docs/*.md")):
        text = page.read_text(encoding="utf-8").replace(SEPARATOR, "")
        assert theirs.encode(text).ids == ours.encode(text)
        assert theirs.decode(ours.encode(text)) == text


@pytest.mark.parametrize("size", sorted(tiktoken.ENCODINGS))
def test_every_encoding_splits_text_at_the_same_places(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks merge any two bytes inside a piece, so the ids show where pieces end."""
    ours = eager_ranks(size)
    monkeypatch.setitem(tiktoken.ENCODINGS, len(MERGED) ** 2 + 256, tiktoken.ENCODINGS[size])
    theirs = made(ours)
    choose = random.Random(size)
    longer = ["".join(choose.choices(TELLING_TEXTS, k=choose.randint(3, 12))) for _ in range(2000)]
    for text in [*map("".join, itertools.product(TELLING_TEXTS, repeat=2)), *longer, "1234567", "a \n  ", "\n \n"]:
        assert theirs.encode(text).ids == ours.encode(text), repr(text)


def test_ranks_that_no_training_gives_merge_in_the_same_order(monkeypatch: pytest.MonkeyPatch) -> None:
    choose = random.Random(5)
    for _ in range(20):
        letters = {"".join(choose.choices("ab", k=choose.randint(2, 6))).encode() for _ in range(12)}
        ours = ranks(monkeypatch, choose.sample(sorted(letters), len(letters)), 300)
        theirs = made(ours)
        for _ in range(100):
            text = "".join(choose.choices("ab", k=30))
            assert theirs.encode(text).ids == ours.encode(text), (letters, text)


def test_a_separator_behind_a_gap_and_an_empty_token_keep_their_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = made(ranks(monkeypatch, [b"ab", b""], 261))
    assert theirs.encode("ab").ids == [256]
    assert theirs.encode(f"ab{SEPARATOR}").ids == [256, 261]
    assert theirs.decode([256, 257, 261, 97], skip_special_tokens=False) == f"ab{SEPARATOR}a"


def test_ranks_are_a_tokenizer_for_our_data_too(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = ranks(monkeypatch, [b"ab", b"abc"], 258)
    again = json_tokenizer(tokenizer_json(ours.spec()))
    assert again.separator_id == ours.separator_id
    assert again.encode("abcab, c") == ours.encode("abcab, c")


def test_ranks_that_spell_the_separator_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = ranks(monkeypatch, [SEPARATOR.encode()], 257)
    with pytest.raises(DataError, match="which would be two tokens"):
        tokenizer_json(ours.spec())


def test_an_unknown_type_is_named() -> None:
    with pytest.raises(DataError, match="'runes'"):
        tokenizer_json({"type": "runes"})
