from __future__ import annotations

import base64
import json
import pickle
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from speedtronic.data.tokenizers.base import StreamDecoder, Tokenizer
from speedtronic.data.tokenizers.from_file import load_tokenizer, tokenizer_from_spec
from speedtronic.data.tokenizers.tiktoken import RankTokenizer, tokens_of_rank_file
from speedtronic.errors import DataError, MissingExtraError
from tests.support.ranks import GPT2_RANKS, needs_gpt2_ranks
from tests.support.tokenizers import eager_ranks, lines_of_ranks

unicode_text = st.text(st.characters(exclude_categories=["Cs"]))
ALL_BYTES = [bytes([byte]) for byte in range(256)]


@pytest.fixture(scope="module")
def gpt2() -> Tokenizer:
    return load_tokenizer(str(GPT2_RANKS))


@needs_gpt2_ranks
@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("Hello world", [15496, 995]),
        ("hello world", [31373, 995]),
        ("Hello, world!", [15496, 11, 995, 0]),
        ("The quick brown fox jumps over the lazy dog.", [464, 2068, 7586, 21831, 18045, 625, 262, 16931, 3290, 13]),
        ("<|endoftext|>", [27, 91, 437, 1659, 5239, 91, 29]),
        ("\n\n", [628]),
        (" ", [220]),
        ("", []),
    ],
)
def test_gpt2_ids_are_the_published_ones(gpt2: Tokenizer, text: str, ids: list[int]) -> None:
    assert gpt2.encode(text) == ids
    assert gpt2.decode(ids) == text


@needs_gpt2_ranks
def test_gpt2_has_its_published_vocabulary(gpt2: Tokenizer) -> None:
    assert gpt2.vocab_size == 50257
    assert gpt2.separator_id == 50256
    assert gpt2.decode([50256]) == "<|endoftext|>"


@needs_gpt2_ranks
@given(text=unicode_text)
def test_any_text_comes_back(gpt2: Tokenizer, text: str) -> None:
    ids = gpt2.encode(text)
    decoder = StreamDecoder(gpt2)

    assert gpt2.decode(ids) == text
    assert "".join(map(decoder.push, ids)) + decoder.flush() == text


@needs_gpt2_ranks
def test_gpt2_is_rebuilt_from_its_spec(gpt2: Tokenizer) -> None:
    rebuilt = tokenizer_from_spec(json.loads(json.dumps(gpt2.spec())))

    assert rebuilt.spec() == gpt2.spec()
    assert rebuilt.encode("Hello world") == [15496, 995]
    assert pickle.loads(pickle.dumps(gpt2)).encode("Hello world") == [15496, 995]


@pytest.mark.parametrize(
    ("size", "separator_id", "vocab_size"),
    [
        (50256, 50256, 50257),
        (50257, 50257, 50258),
        (100256, 100257, 100277),
        (128000, 128001, 128256),
        (199998, 199999, 200019),
    ],
)
def test_the_number_of_ranks_tells_the_encoding(size: int, separator_id: int, vocab_size: int) -> None:
    fillers = [number.to_bytes(3) for number in range(size - 256)]
    tokenizer = RankTokenizer([*ALL_BYTES, *fillers])

    assert tokenizer.separator_id == separator_id
    assert tokenizer.vocab_size == vocab_size
    assert tokenizer.decode([separator_id]) == "<|endoftext|>"


@pytest.mark.parametrize(
    ("size", "text", "pieces"),
    [
        (50256, "it's 12345  ok", ["it", "'s", " 12345", " ", " ok"]),
        (100256, "it'S 12345\n\n ok", ["it", "'S", " ", "123", "45", "\n\n", " ok"]),
        (128000, "it'S 12345\n\n ok", ["it", "'S", " ", "123", "45", "\n\n", " ok"]),
        (199998, "it'S aB ./\n/ok", ["it'S", " a", "B", " ./\n/", "ok"]),
    ],
)
def test_each_encoding_splits_text_by_its_own_pattern(size: int, text: str, pieces: list[str]) -> None:
    tokenizer = eager_ranks(size)

    assert tokenizer.encode(text) == [token for piece in pieces for token in tokenizer.encode(piece)]
    assert all(tokenizer.encode(a + b) != tokenizer.encode(a) + tokenizer.encode(b) for a, b in ["ab", "  "])


def test_several_texts_have_the_ids_of_each() -> None:
    tokenizer = eager_ranks(50256)
    texts = ["ab cd", "", "é"]

    arrays = tokenizer.encode_batch(texts)

    assert [ids.tolist() for ids in arrays] == [tokenizer.encode(text) for text in texts]
    assert {ids.dtype for ids in arrays} == {np.dtype(np.uint32)}


def test_a_text_cannot_forge_a_separator() -> None:
    tokenizer = eager_ranks(50256)

    assert tokenizer.separator_id not in tokenizer.encode("a<|endoftext|>b")
    assert tokenizer.decode(tokenizer.encode("a<|endoftext|>b")) == "a<|endoftext|>b"


def test_ids_between_the_ranks_and_the_end_have_no_meaning() -> None:
    tokenizer = eager_ranks(100256)

    assert tokenizer.decode([65, 100276, 66]) == "A\ufffdB"
    for token in (-1, 100277):
        with pytest.raises(DataError, match=f"token id {token} is outside"):
            tokenizer.decode([token])


@given(ids=st.lists(st.integers(0, 400)))
def test_a_stream_decodes_to_what_the_whole_does(ids: list[int]) -> None:
    tokenizer = STREAMED
    decoder = StreamDecoder(tokenizer)

    assert "".join(map(decoder.push, ids)) + decoder.flush() == tokenizer.decode(ids)


STREAMED = eager_ranks(50256)


def test_a_lone_surrogate_is_refused() -> None:
    with pytest.raises(DataError, match="lone surrogate at character 1"):
        eager_ranks(50256).encode("a\udcff")


def test_text_that_is_too_long_for_the_pattern_is_refused() -> None:
    with pytest.raises(DataError, match="cannot split the text .*; it fails on runs of about a million spaces"):
        eager_ranks(50256).encode(" " * 2_000_000 + "a")


def test_another_number_of_ranks_names_those_that_are_known() -> None:
    with pytest.raises(DataError, match=r"has 256 ranks, .*50256 \(gpt2\).*128000 \(Llama 3\); use the"):
        RankTokenizer(ALL_BYTES)


def test_a_token_that_repeats_and_a_byte_that_is_missing_are_named() -> None:
    fillers = [number.to_bytes(3) for number in range(50000)]

    with pytest.raises(DataError, match="rank 50255 repeats the token of rank 65"):
        RankTokenizer([*ALL_BYTES, *fillers[:49999], b"A"])
    with pytest.raises(DataError, match="the byte 0x41 is not among the 50256 tokens"):
        RankTokenizer([*ALL_BYTES[:65], b"AA", *ALL_BYTES[66:], *fillers])


def test_a_rank_file_is_tokens_in_base64_in_order_of_rank() -> None:
    assert tokens_of_rank_file("YQ== 0\nYmM= 1\r\n\n= 2\n") == [b"a", b"bc", b""]
    assert tokens_of_rank_file(lines_of_ranks(ALL_BYTES)) == ALL_BYTES


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("YQ== 0\nYQ 1", "line 2: 'YQ' is not base64"),
        ("YQ== 0\né 1", "line 2: 'é' is not base64"),
        ("YQ== 0\nYg== 2", "line 2: expected rank 1, found rank 2"),
        ("YQ== 0\nYg== 0", "line 2: expected rank 1, found rank 0"),
        ("YQ== 0\nYg==", "line 2: not a token in base64, a space and its rank"),
        ("YQ== 0 1", "line 1: not a token"),
        ("YQ== ²", "line 1: not a token"),
        ("YQ== -1", "line 1: not a token"),
    ],
)
def test_the_first_wrong_line_is_named(text: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        tokens_of_rank_file(text)


def test_the_spec_is_a_rank_file() -> None:
    tokenizer = eager_ranks(50256)

    first = tokenizer.spec()["ranks"].splitlines()[0]

    assert first == f"{base64.b64encode(bytes([0])).decode()} 0"


def test_a_missing_library_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tiktoken", None)

    with pytest.raises(MissingExtraError, match=r"install speedtronic\[tiktoken\]"):
        eager_ranks(50256)
