from __future__ import annotations

import gc
import tempfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

from speedtronic.data.prepare.text_cache import cache_folder, cached_tokens
from speedtronic.data.shards import ShardSet
from speedtronic.data.tokenizers.chars import CorpusCharTokenizer
from speedtronic.errors import DataError
from tests.support.tokenizers import byte_level_bpe


class Words:
    """A user's own tokenizer: one token per word of a fixed list. Counts how often it encodes."""

    separator_id = 0

    def __init__(self, words: str) -> None:
        self.words = words.split()
        self.encoded = 0

    @property
    def vocab_size(self) -> int:
        return len(self.words) + 1

    def encode(self, text: str) -> list[int]:
        self.encoded += 1
        return [1 + self.words.index(word) for word in text.split()]

    def decode(self, ids: Iterable[int]) -> str:
        return " ".join(self.words[token - 1] for token in ids)

    def spec(self) -> dict[str, object]:
        return {"type": "words", "words": self.words}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPEEDTRONIC_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def text_file(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def tokens(shards: ShardSet) -> list[int]:
    out = np.empty(len(shards), np.int64)
    shards.read(0, out)
    return out.tolist()


def test_a_text_is_encoded_once_and_found_again_by_content(tmp_path: Path, cache: Path) -> None:
    tokenizer = Words("b a")

    first = cached_tokens(text_file(tmp_path / "one.txt", "a b a"), tokenizer)
    again = cached_tokens(text_file(tmp_path / "two.txt", "a b a"), tokenizer)

    assert tokens(first) == tokens(again) == [2, 1, 2]
    assert tokenizer.encoded == 1
    assert [path.name for path in cache.iterdir()] == [first.folder.name]


def test_other_text_and_other_tokenizers_have_entries_of_their_own(tmp_path: Path, cache: Path) -> None:
    path = text_file(tmp_path / "t.txt", "a b a")

    assert tokens(cached_tokens(path, Words("b a"))) == [2, 1, 2]
    assert tokens(cached_tokens(path, Words("a b"))) == [1, 2, 1]
    assert tokens(cached_tokens(text_file(path, "b"), Words("a b"))) == [2]
    assert len(list(cache.iterdir())) == 3


@pytest.mark.parametrize("unit_bytes", [1, 17, 300])
def test_a_text_in_pieces_is_encoded_as_if_whole(tmp_path: Path, unit_bytes: int) -> None:
    tokenizer = byte_level_bpe()
    text = "the cat  sat on\r\nthe mat,\n\nit's café 字字 12345 …\tthe cats' mats! " * 12
    path = tmp_path / "t.txt"
    path.write_bytes(text.encode())

    found = cached_tokens(path, tokenizer, unit_bytes=unit_bytes)

    assert tokens(found) == tokenizer.encode(text)
    assert found.documents == 0


def test_a_damaged_entry_is_made_again(tmp_path: Path) -> None:
    path = text_file(tmp_path / "t.txt", "a b a")
    tokenizer = Words("a b")
    entry = cached_tokens(path, tokenizer).folder
    (entry / "shard_00000.bin").write_bytes(b"")

    assert tokens(cached_tokens(path, tokenizer)) == [1, 2, 1]
    assert tokenizer.encoded == 2


def test_an_entry_that_another_process_publishes_meanwhile_is_used(tmp_path: Path, cache: Path) -> None:
    path = text_file(tmp_path / "t.txt", "a b a")

    class Racing(Words):
        def encode(self, text: str) -> list[int]:
            cached_tokens(path, Words("a b"))
            return super().encode(text)

    assert tokens(cached_tokens(path, Racing("a b"))) == [1, 2, 1]
    assert len(list(cache.iterdir())) == 1


def test_a_cache_that_cannot_be_written_says_which_variable_moves_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = text_file(tmp_path / "a-file", "in the way")
    monkeypatch.setenv("SPEEDTRONIC_CACHE", str(blocked))

    with pytest.raises(DataError, match="set SPEEDTRONIC_CACHE to a folder that can be written"):
        cached_tokens(text_file(tmp_path / "t.txt", "a"), Words("a"))


@pytest.mark.parametrize("home", ["a file in the way", "no home at all"])
def test_without_a_home_that_can_be_written_the_text_is_encoded_for_this_run_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: str
) -> None:
    monkeypatch.delenv("SPEEDTRONIC_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    if home == "no home at all":

        def unknown() -> Path:
            raise RuntimeError("Could not determine home directory.")

        monkeypatch.setattr(Path, "home", unknown)
    else:
        monkeypatch.setenv("HOME", str(text_file(tmp_path / "home", "in the way")))

    said: list[str] = []
    found = cached_tokens(text_file(tmp_path / "t.txt", "a b a"), Words("a b"), warn=said.append)
    assert tokens(found) == [1, 2, 1]
    (warning,) = said
    assert "t.txt" in warning
    assert "set SPEEDTRONIC_CACHE to a folder that can be written" in warning
    assert list((tmp_path / "temporary").iterdir())

    del found
    gc.collect()
    assert not list((tmp_path / "temporary").iterdir())


def test_text_that_is_not_utf8_or_not_in_the_corpus_is_refused(tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "t.txt"
    path.write_bytes(b"ab\xff")
    with pytest.raises(DataError, match="offset 2"):
        cached_tokens(path, CorpusCharTokenizer("ab"))

    with pytest.raises(DataError, match="'c'"):
        cached_tokens(text_file(path, "abc"), CorpusCharTokenizer("ab"))
    assert not cache.exists() or list(cache.iterdir()) == []


def test_the_cache_lies_where_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPEEDTRONIC_CACHE", "/own")
    monkeypatch.setenv("XDG_CACHE_HOME", "/general")
    assert cache_folder() == Path("/own")

    monkeypatch.delenv("SPEEDTRONIC_CACHE")
    assert cache_folder() == Path("/general/speedtronic")

    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "speedtronic"
