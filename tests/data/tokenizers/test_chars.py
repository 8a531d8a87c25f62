from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from speedtronic.data.tokenizers.chars import CharTokenizer, CorpusCharTokenizer
from speedtronic.errors import DataError

unicode_text = st.text(st.characters(exclude_categories=["Cs"]))


@given(unicode_text)
def test_bytes_come_back_as_the_text_they_were(text: str) -> None:
    tokenizer = CharTokenizer()

    ids = tokenizer.encode(text)

    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text


@given(unicode_text)
def test_corpus_characters_come_back_as_the_text_they_were(text: str) -> None:
    tokenizer = CorpusCharTokenizer.from_texts([text])

    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.vocab_size == len({*text, "\0"})


def test_a_larger_vocabulary_leaves_byte_ids_as_they_are() -> None:
    tokenizer = CharTokenizer(vocab_size=512)

    assert tokenizer.vocab_size == 512
    assert tokenizer.encode("é") == [0xC3, 0xA9]
    assert tokenizer.decode([65, 300, 66]) == "A\ufffdB"


def test_bytes_are_never_folded_into_a_smaller_vocabulary() -> None:
    tokenizer = CharTokenizer(vocab_size=128)

    assert tokenizer.encode("plain") == list(b"plain")
    with pytest.raises(DataError, match=r"byte 0xc3 \(id 195\) at offset 3 does not fit a vocabulary of 128"):
        tokenizer.encode("caféé")


def test_text_that_is_not_unicode_is_refused() -> None:
    with pytest.raises(DataError, match="lone surrogate at character 1"):
        CharTokenizer().encode("a\udcff")
    with pytest.raises(DataError, match="U\\+DCFF"):
        CorpusCharTokenizer("a").encode("a\udcff")


def test_the_separator_is_the_first_character_of_every_corpus() -> None:
    tokenizer = CorpusCharTokenizer("cab")

    assert tokenizer.encode("\0abc") == [0, 1, 2, 3]
    assert tokenizer.separator_id == 0
    assert CharTokenizer().encode("\0") == [CharTokenizer().separator_id]


@pytest.mark.parametrize("character", ["z", "b", "€"])
def test_a_character_outside_the_corpus_is_named(character: str) -> None:
    with pytest.raises(DataError, match=f"{character}.* at position 2 is not among the 4 characters"):
        CorpusCharTokenizer("acy").encode("ca" + character)


@pytest.mark.parametrize("tokenizer", [CharTokenizer(), CorpusCharTokenizer("ab")])
@pytest.mark.parametrize("token", [-1, 256])
def test_decoding_an_id_outside_the_vocabulary_is_an_error(
    tokenizer: CharTokenizer | CorpusCharTokenizer, token: int
) -> None:
    with pytest.raises(DataError, match=f"token id {token} is outside"):
        tokenizer.decode([token])
