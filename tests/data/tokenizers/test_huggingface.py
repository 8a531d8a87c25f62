from __future__ import annotations

import json
import pickle
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from speedtronic.data.tokenizers.base import StreamDecoder
from speedtronic.data.tokenizers.from_file import tokenizer_from_spec
from speedtronic.data.tokenizers.huggingface import ByteLevelTokenizer, JsonTokenizer, json_tokenizer
from speedtronic.errors import DataError, MissingExtraError
from tests.support.tokenizers import END, bpe, byte_level_bpe, description, metaspace_bpe, wordpiece

unicode_text = st.text(st.characters(exclude_categories=["Cs"]))
WORD = {**END, "special": False}


@pytest.fixture(scope="module")
def trained() -> JsonTokenizer:
    return byte_level_bpe()


def changed(tokenizer: JsonTokenizer, **parts: Any) -> JsonTokenizer:
    return json_tokenizer(json.dumps({**json.loads(tokenizer.spec()["json"]), **parts}))


def words(*vocabulary: str, added: tuple[dict[str, Any], ...] = ()) -> JsonTokenizer:
    """Each word between white space is a token."""
    vocab = {word: at for at, word in enumerate(["<|endoftext|>", *vocabulary])}
    model = {"type": "WordLevel", "vocab": vocab, "unk_token": vocabulary[0]}
    return json_tokenizer(json.dumps(description(model, pre_tokenizer={"type": "WhitespaceSplit"}, added=list(added))))


@given(text=unicode_text)
def test_any_text_comes_back_from_a_byte_level_tokenizer(trained: JsonTokenizer, text: str) -> None:
    assert trained.decode(trained.encode(text)) == text


def test_the_ids_are_those_of_the_library(trained: JsonTokenizer) -> None:
    from tokenizers import Tokenizer

    text = "the cats' mats,\n it's 1234"
    library = Tokenizer.from_str(trained.spec()["json"])

    assert trained.encode(text) == library.encode(text).ids
    assert len(trained.encode(text)) < len(text)


def test_several_texts_have_the_ids_of_each(trained: JsonTokenizer) -> None:
    texts = ["the cat", "", "naïve café"]

    arrays = trained.encode_batch(texts)

    assert [ids.tolist() for ids in arrays] == [trained.encode(text) for text in texts]
    assert {ids.dtype for ids in arrays} == {np.dtype(np.uint32)}


@pytest.mark.parametrize("special", [True, False])
def test_a_text_cannot_forge_a_separator(trained: JsonTokenizer, special: bool) -> None:
    tokenizer = changed(trained, added_tokens=[{**END, "special": special}])

    ids = tokenizer.encode("one<|endoftext|>two")

    assert tokenizer.separator_id == 0
    assert 0 not in ids
    assert tokenizer.decode(ids) == "one<|endoftext|>two"


def test_text_that_encodes_to_the_separator_is_refused() -> None:
    tokenizer = words("[UNK]", "one")

    assert tokenizer.encode("one two one") == [2, 1, 2]
    with pytest.raises(DataError, match=r"encodes a part of the text as its separator '<\|endoftext\|>'"):
        tokenizer.encode("one <|endoftext|> one")


def test_added_words_that_are_not_special_are_looked_for_in_text(trained: JsonTokenizer) -> None:
    tokenizer = changed(trained, added_tokens=[END, {**WORD, "id": 290, "content": "<tool>"}])

    assert 290 in tokenizer.encode("a<tool>b")
    assert tokenizer.decode([290]) == "<tool>"


def test_special_tokens_are_not_added(trained: JsonTokenizer) -> None:
    template = {
        "type": "TemplateProcessing",
        "single": [{"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}],
        "pair": [],
        "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}},
    }

    assert changed(trained, post_processor=template).encode("the cat") == trained.encode("the cat")


def test_the_place_of_a_token_includes_its_spaces_whatever_the_file_trims(trained: JsonTokenizer) -> None:
    trimming = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    text = "the   cat\n\nsat<|endoftext|>"

    [(ids, begins, stops)] = changed(trained, post_processor=trimming).encode_with_special_tokens([text])

    assert begins.tolist() == [0, *stops[:-1].tolist()]
    assert stops[-1] == len(text)
    assert trained.decode(ids.tolist()) == text


def test_truncation_and_padding_in_the_file_are_ignored(trained: JsonTokenizer) -> None:
    truncation = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    padding = {
        "strategy": {"Fixed": 64},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "<|endoftext|>",
    }
    tokenizer = changed(trained, truncation=truncation, padding=padding)

    assert tokenizer.encode("the cats' mats, 1234") == trained.encode("the cats' mats, 1234")
    assert tokenizer.spec() == trained.spec()


@pytest.mark.parametrize(
    ("names", "separator"),
    [
        (["</s>", "<|endoftext|>"], "<|endoftext|>"),
        (["<s>", "</s>"], "</s>"),
        (["<pad>", "<eos>", "<bos>"], "<eos>"),
        (["<|im_start|>", "<|im_end|>"], "<|im_end|>"),
        (["[CLS]", "[SEP]"], "[SEP]"),
    ],
)
def test_the_separator_is_the_token_that_is_known_to_end_a_text(names: list[str], separator: str) -> None:
    added = [{**WORD, "special": True, "content": name, "id": at} for at, name in enumerate(names, 1)]
    raw = description({"type": "WordLevel", "vocab": {"[UNK]": 0}, "unk_token": "[UNK]"})

    tokenizer = json_tokenizer(json.dumps({**raw, "added_tokens": added}))

    assert tokenizer.separator_id == 1 + names.index(separator)


def test_without_a_token_that_ends_a_text_the_remedy_is_named(trained: JsonTokenizer) -> None:
    with pytest.raises(DataError, match=r"none of <\|endoftext\|>.*; add one .* `add_special_tokens`"):
        changed(trained, added_tokens=[{**END, "content": "<start>", "id": 290}])


def test_ids_may_have_gaps() -> None:
    raw = description(
        {"type": "WordLevel", "vocab": {"<|endoftext|>": 0, "[UNK]": 1, "a": 70000}, "unk_token": "[UNK]"}
    )
    raw["pre_tokenizer"] = {"type": "WhitespaceSplit"}

    tokenizer = json_tokenizer(json.dumps(raw))

    assert tokenizer.vocab_size == 70001
    assert tokenizer.encode("a a") == [70000, 70000]


def test_an_id_without_a_token_decodes_to_a_replacement_character() -> None:
    model = {**bpe([]), "vocab": {"<|endoftext|>": 0, "a": 2, "Ġ": 9, "é b": 4}}
    raw = description(model, decoder={"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True})
    raw["added_tokens"].append({**WORD, "id": 4, "content": "é b"})

    tokenizer = json_tokenizer(json.dumps(raw))

    assert tokenizer.decode([2, 3, 9, 4, 0]) == "a\ufffd é b<|endoftext|>"


@pytest.mark.parametrize("make", [byte_level_bpe, metaspace_bpe, wordpiece])
def test_decoding_an_id_outside_the_vocabulary_is_an_error(make: Any) -> None:
    tokenizer = make()

    for token in (-1, tokenizer.vocab_size):
        with pytest.raises(DataError, match=f"token id {token} is outside"):
            tokenizer.decode([token])


@pytest.mark.parametrize("make", [byte_level_bpe, metaspace_bpe, wordpiece])
def test_a_tokenizer_is_rebuilt_from_its_spec_and_from_a_pickle(make: Any) -> None:
    tokenizer = make()
    text = "the <|endoftext|> a ab"

    rebuilt = tokenizer_from_spec(json.loads(json.dumps(tokenizer.spec())))
    for other in (rebuilt, pickle.loads(pickle.dumps(tokenizer))):
        assert type(other) is type(tokenizer)
        assert other.spec() == tokenizer.spec()
        assert other.encode(text) == tokenizer.encode(text)
        assert (other.vocab_size, other.separator_id) == (tokenizer.vocab_size, tokenizer.separator_id)


def test_how_a_file_is_laid_out_does_not_matter(trained: JsonTokenizer) -> None:
    pretty = json.dumps(json.loads(trained.spec()["json"]), indent=2, ensure_ascii=True)

    assert json_tokenizer(pretty).spec() == trained.spec()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("{}", "must have a model"),
        ('{"model": {}, "added_tokens": [3]}', "must have a model and a list added_tokens"),
        ('{"model": {"type": "Magic"}, "added_tokens": [{"content": "</s>"}]}', "cannot read it"),
        ('{"model": {"type": "BPE", "vocab": {}, "merges": [["a", "b"]]}, "added_tokens": []}', "no token ends a text"),
    ],
)
def test_json_that_is_not_a_tokenizer_says_why(text: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        json_tokenizer(text)


def test_a_lone_surrogate_is_refused(trained: JsonTokenizer) -> None:
    with pytest.raises(DataError, match="lone surrogate at character 2"):
        trained.encode_batch(["fine", "ab\udcff"])


def test_text_that_the_model_cannot_encode_is_refused() -> None:
    raw = description({"type": "WordLevel", "vocab": {"<|endoftext|>": 0, "a": 1}, "unk_token": "[UNK]"})

    with pytest.raises(DataError, match="cannot encode the text: .*UNK"):
        json_tokenizer(json.dumps(raw)).encode("b")


def test_a_missing_library_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch, trained: JsonTokenizer) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)

    with pytest.raises(MissingExtraError, match=r"install speedtronic\[tokenizers\]"):
        tokenizer_from_spec(trained.spec())


@given(ids=st.lists(st.integers(0, 289)))
def test_a_stream_of_byte_level_tokens_decodes_to_what_the_whole_does(trained: JsonTokenizer, ids: list[int]) -> None:
    decoder = StreamDecoder(trained)

    assert isinstance(trained, ByteLevelTokenizer)
    assert "".join(map(decoder.push, ids)) + decoder.flush() == trained.decode(ids)


@given(text=st.text("the a.é😀 "))
@pytest.mark.parametrize("make", [metaspace_bpe, wordpiece])
def test_a_stream_of_words_decodes_to_what_the_whole_does(make: Any, text: str) -> None:
    tokenizer = make()
    ids = tokenizer.encode(text)
    decoder = StreamDecoder(tokenizer)

    assert "".join(map(decoder.push, ids)) + decoder.flush() == tokenizer.decode(ids)


def test_a_stream_of_words_keeps_the_spaces_between_them() -> None:
    tokenizer = metaspace_bpe()
    decoder = StreamDecoder(tokenizer)

    pieces = [decoder.push(token) for token in tokenizer.encode("the the é")]

    assert pieces == ["the", " the", " ", "", "é"]
