from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from speedtronic.data.tokenizers.base import IdArray, StreamDecoder, encode_pieces, encode_texts, spec_fingerprint
from speedtronic.data.tokenizers.chars import CharTokenizer, CorpusCharTokenizer


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


def test_an_incomplete_character_comes_with_the_flush() -> None:
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
