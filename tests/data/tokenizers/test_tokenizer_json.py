"""A `tokenizer.json` of bytes or characters gives the ids of the tokenizer that it describes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from speedtronic.data.tokenizers.chars import CharTokenizer, CorpusCharTokenizer
from speedtronic.data.tokenizers.huggingface import json_tokenizer
from speedtronic.data.tokenizers.tokenizer_json import tokenizer_json
from speedtronic.errors import DataError

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
    assert text is not None
    again = json_tokenizer(text)
    assert again.separator_id == ours.separator_id == 0
    for part in TEXTS:
        assert again.encode(part) == ours.encode(part)
        assert again.decode(ours.encode(part)) == part
    assert tokenizer_json(again.spec()) == again.spec()["json"]
    assert json.loads(again.spec()["json"])["model"] == json.loads(text)["model"]


def test_ranks_of_tiktoken_have_none() -> None:
    assert tokenizer_json({"type": "tiktoken", "ranks": "YQ== 0"}) is None
