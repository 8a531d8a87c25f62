from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from speedtronic.data.tokenizers import from_file
from speedtronic.data.tokenizers.base import spec_fingerprint
from speedtronic.data.tokenizers.chars import CharTokenizer, CorpusCharTokenizer
from speedtronic.data.tokenizers.from_file import load_tokenizer, tokenizer_from_spec
from speedtronic.data.tokenizers.huggingface import ByteLevelTokenizer
from speedtronic.data.tokenizers.tiktoken import RankTokenizer
from speedtronic.errors import DataError
from tests.support.ranks import GPT2_RANKS, needs_gpt2_ranks
from tests.support.tokenizers import byte_level_bpe


@pytest.fixture
def json_file(tmp_path: Path) -> Path:
    path = tmp_path / "tokenizer.json"
    path.write_text(byte_level_bpe().spec()["json"], encoding="utf-8")
    return path


def test_bytes_need_no_file() -> None:
    tokenizer = load_tokenizer("bytes")

    assert isinstance(tokenizer, CharTokenizer)
    assert tokenizer.vocab_size == 256


def test_a_json_file_is_read_by_its_name_and_by_that_of_its_folder(json_file: Path) -> None:
    for name in (json_file, json_file.parent):
        tokenizer = load_tokenizer(str(name))

        assert isinstance(tokenizer, ByteLevelTokenizer)
        assert tokenizer.spec() == byte_level_bpe().spec()


def test_a_path_is_relative_to_the_working_folder(json_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(json_file.parent)

    assert load_tokenizer("tokenizer.json").vocab_size == 290


@needs_gpt2_ranks
def test_a_rank_file_is_known_by_its_content_whatever_its_name(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.model"
    path.write_bytes(GPT2_RANKS.read_bytes())

    assert isinstance(load_tokenizer(str(path)), RankTokenizer)


@pytest.mark.parametrize("name", ["none.json", "chars", "gpt2", "a\x00b"])
def test_a_missing_file_says_what_a_tokenizer_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)

    with pytest.raises(DataError, match=f"^{name}: no such tokenizer file; a tokenizer is `bytes`, a JSON file"):
        load_tokenizer(name)


def test_a_folder_without_a_tokenizer_names_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"this folder has no tokenizer\.json; .*save_pretrained"):
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no known encoding has 0 ranks"),
        (b"{}", "must have a model"),
        (b"YQ== 0\nYg== 1\n", "no known encoding has 2 ranks"),
        (b"YQ== 0\nYg== 7\n", "line 2: expected rank 1, found rank 7"),
        (b"\x80\x04K\x01.", "not text, so not a tokenizer file"),
        (b"just some words\n", "line 1: not a token in base64"),
    ],
)
def test_a_file_that_is_not_a_tokenizer_is_named_with_the_reason(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)

    with pytest.raises(DataError, match=f"^{re.escape(str(path))}: .*{message}"):
        load_tokenizer(str(path))


def test_a_file_that_is_too_large_is_not_read(json_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(from_file, "LARGEST_FILE", 1000)

    with pytest.raises(DataError, match="bytes are more than a tokenizer file may have"):
        load_tokenizer(str(json_file))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="named pipes are a thing of POSIX")
def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")

    with pytest.raises(DataError, match="not a regular file"):
        load_tokenizer(str(tmp_path / "pipe"))


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
