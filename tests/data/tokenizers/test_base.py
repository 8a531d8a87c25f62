from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from speedtronic.data.tokenizers.base import (
    CharTokenizer,
    CorpusCharTokenizer,
    IdArray,
    StreamDecoder,
    encode_pieces,
    encode_texts,
    spec_fingerprint,
    tokenizer_from_spec,
)
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


@pytest.mark.parametrize("tokenizer", [CharTokenizer(300), CorpusCharTokenizer("aé€😀\n")])
def test_a_tokenizer_is_rebuilt_from_its_spec(tokenizer: CharTokenizer | CorpusCharTokenizer) -> None:
    spec = json.loads(json.dumps(tokenizer.spec()))

    rebuilt = tokenizer_from_spec(spec)

    assert type(rebuilt) is type(tokenizer)
    assert rebuilt.spec() == tokenizer.spec()
    assert rebuilt.encode("a\n") == tokenizer.encode("a\n")
    assert spec_fingerprint(rebuilt.spec()) == spec_fingerprint(tokenizer.spec())


@pytest.mark.parametrize("spec", [{}, {"type": "words"}, {"type": "bytes", "vocab_size": "256"}])
def test_an_unknown_spec_is_an_error(spec: dict[str, object]) -> None:
    with pytest.raises(DataError, match="unknown tokenizer"):
        tokenizer_from_spec(spec)


def test_different_tokenizers_have_different_fingerprints() -> None:
    specs = [CharTokenizer(), CharTokenizer(300), CorpusCharTokenizer("ab"), CorpusCharTokenizer("abc")]

    assert len({spec_fingerprint(tokenizer.spec()) for tokenizer in specs}) == 4


@given(st.lists(st.integers(0, 299)))
def test_a_stream_decodes_to_what_the_whole_does(ids: list[int]) -> None:
    tokenizer = CharTokenizer(300)
    decoder = StreamDecoder(tokenizer)
    runs = "".join(chr(token) if token < 256 else "\u0100" for token in ids).split("\u0100")

    streamed = "".join(decoder.push(token) for token in ids) + decoder.flush()

    assert streamed == "\ufffd".join(run.encode("latin-1").decode(errors="replace") for run in runs)
    assert streamed == tokenizer.decode(ids)


def test_an_incomplete_character_is_held_back_until_it_is_complete() -> None:
    decoder = StreamDecoder(CharTokenizer())

    pieces = [decoder.push(token) for token in "a€b".encode()]

    assert pieces == ["a", "", "", "€", "b"]
    assert decoder.flush() == ""


def test_what_never_became_complete_comes_with_the_flush() -> None:
    decoder = StreamDecoder(CharTokenizer())
    decoder.push(0xE2)

    assert decoder.flush() == "\ufffd"
    assert decoder.push(65) == "A"


class PairTokenizer:
    """Each token is half of a character's UTF-16 code unit pair: only two together make text."""

    vocab_size = 1024
    separator_id = 0

    def encode(self, text: str) -> list[int]:
        return [part for character in text for part in divmod(ord(character), 512)]

    def decode(self, ids: Iterable[int]) -> str:
        tokens = list(ids)
        pairs = zip(tokens[::2], tokens[1::2], strict=False)
        return "".join(chr(512 * high + low) for high, low in pairs) + "\ufffd" * (len(tokens) % 2)

    def spec(self) -> dict[str, object]:
        return {"type": "pairs"}


def test_a_stream_holds_back_what_any_tokenizer_cannot_decode_yet() -> None:
    tokenizer = PairTokenizer()
    decoder = StreamDecoder(tokenizer)

    pieces = [decoder.push(token) for token in tokenizer.encode("añ")]

    assert pieces == ["", "a", "", "ñ"]
    decoder.push(0)
    assert decoder.flush() == "\ufffd"


def test_a_tail_that_never_becomes_a_character_is_not_held_back_forever() -> None:
    longest = 0

    class Counting(PairTokenizer):
        def decode(self, ids: Iterable[int]) -> str:
            nonlocal longest
            tokens = list(ids)
            longest = max(longest, len(tokens))
            return "\ufffd" * len(tokens)

    decoder = StreamDecoder(Counting())
    streamed = "".join(decoder.push(0) for _ in range(1000)) + decoder.flush()

    assert streamed == "\ufffd" * 1000
    assert longest <= 8


def test_texts_are_encoded_by_whichever_way_a_tokenizer_has() -> None:
    texts = ["ab", "", "ñ"]

    class InBatches(PairTokenizer):
        def encode_batch(self, texts: Sequence[str]) -> list[IdArray]:
            return [np.array([len(text)], np.uint32) for text in texts]

    assert [ids.tolist() for ids in encode_texts(CharTokenizer(), texts)] == [[97, 98], [], [0xC3, 0xB1]]
    assert [ids.tolist() for ids in encode_texts(PairTokenizer(), texts)] == [[0, 97, 0, 98], [], [0, 241]]
    assert [ids.tolist() for ids in encode_texts(InBatches(), texts)] == [[2], [0], [1]]


def test_only_a_characterwise_tokenizer_sees_text_in_pieces() -> None:
    seen: list[str] = []

    class Recording(PairTokenizer):
        def encode(self, text: str) -> list[int]:
            seen.append(text)
            return super().encode(text)

    whole = list(encode_pieces(Recording(), ["ab", "c"]))
    pieces = list(encode_pieces(CharTokenizer(), ["ab", "c"]))

    assert seen == ["abc"]
    assert len(whole) == 1
    assert [piece.tolist() for piece in pieces] == [[97, 98], [99]]
    assert np.concatenate(whole).tolist() == PairTokenizer().encode("abc")
