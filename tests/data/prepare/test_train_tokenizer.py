from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from speedtronic.data.prepare.records import TextRecords
from speedtronic.data.prepare.train_tokenizer import _without_long_words, train_tokenizer
from speedtronic.data.tokenizers.chunking import cut_rule
from speedtronic.data.tokenizers.from_file import load_tokenizer
from speedtronic.data.tokenizers.huggingface import ByteLevelTokenizer
from speedtronic.errors import DataError, MissingExtraError

TEXT = "It was the best of times, it was the worst of times.\nÉtait-ce le meilleur des temps ?\n" * 20


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


def test_the_file_is_a_byte_level_tokenizer(tmp_path: Path, text: Path) -> None:
    trained = train_tokenizer([text], tmp_path / "new" / "tokenizer.json", vocab_size=280)

    tokenizer = load_tokenizer(str(trained.path))
    assert isinstance(tokenizer, ByteLevelTokenizer)
    assert (trained.vocab_size, tokenizer.vocab_size, tokenizer.separator_id) == (280, 280, 0)
    assert tokenizer.decode([0]) == "<|endoftext|>"
    assert cut_rule(tokenizer) == "words"
    for other in (TEXT, "漢字 \x00\r\n😀", ""):
        assert tokenizer.decode(tokenizer.encode(other)) == other


def test_the_summary_measures_what_the_file_does(tmp_path: Path, text: Path) -> None:
    trained = train_tokenizer([text], tmp_path / "tokenizer.json", vocab_size=300)

    tokens = load_tokenizer(str(trained.path)).encode(TEXT)
    assert trained.text_bytes == len(TEXT.encode())
    assert trained.bytes_per_token == len(TEXT.encode()) / len(tokens)
    assert trained.bytes_per_token > 1.5


def test_a_text_with_few_pairs_gives_fewer_ids(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("ab ab cd")

    assert train_tokenizer([tmp_path], tmp_path / "tokenizer.json", vocab_size=1000).vocab_size == 258


def test_json_lines_and_folders_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"body": "zq zq zq"}\n{"body": "zq"}\n')
    (tmp_path / "b.txt").write_text("xy xy")

    trained = train_tokenizer(
        [tmp_path], tmp_path / "tokenizer.json", vocab_size=300, patterns=["*.jsonl"], records=TextRecords("body")
    )

    vocabulary = json.loads(trained.path.read_text())["model"]["vocab"]
    assert "zq" in vocabulary
    assert "xy" not in vocabulary


def test_equal_text_gives_equal_bytes_whatever_the_number_of_threads(tmp_path: Path, text: Path) -> None:
    code = (
        "import sys\nfrom speedtronic.data.prepare.train_tokenizer import train_tokenizer\n"
        "train_tokenizer([sys.argv[1]], sys.argv[2], vocab_size=320)\n"
        "assert 'torch' not in sys.modules"
    )
    for run, threads in enumerate(["1", "2", "2"]):
        environment = {**os.environ, "RAYON_NUM_THREADS": threads}
        subprocess.run([sys.executable, "-c", code, text, tmp_path / f"{run}.json"], check=True, env=environment)

    assert len({(tmp_path / f"{run}.json").read_bytes() for run in range(3)}) == 1


def test_a_vocabulary_holds_at_least_the_bytes_and_the_separator(tmp_path: Path, text: Path) -> None:
    with pytest.raises(DataError, match="a vocabulary of 256 is too small: 257"):
        train_tokenizer([text], tmp_path / "tokenizer.json", vocab_size=256)

    assert train_tokenizer([text], tmp_path / "tokenizer.json", vocab_size=257).vocab_size == 257


def test_a_vocabulary_beyond_what_memory_holds_is_refused(tmp_path: Path, text: Path) -> None:
    with pytest.raises(DataError, match="a vocabulary of 999999999999 is too large: at most 4194304 are possible"):
        train_tokenizer([text], tmp_path / "tokenizer.json", vocab_size=999_999_999_999)


def test_nothing_but_empty_documents_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n')

    with pytest.raises(DataError, match="all documents are empty"):
        train_tokenizer([tmp_path], tmp_path / "tokenizer.json", vocab_size=300)
    assert not (tmp_path / "tokenizer.json").exists()


@pytest.mark.slow
@pytest.mark.timeout(60)
@pytest.mark.parametrize("long", ["ab" * 200_000, "\0" * 1_000_000, " " * 1_000_000])
def test_the_time_does_not_grow_with_the_square_of_a_word(tmp_path: Path, long: str) -> None:
    (tmp_path / "text.txt").write_text(f"word {long} word")

    trained = train_tokenizer([tmp_path], tmp_path / "tokenizer.json", vocab_size=300)

    assert trained.text_bytes == len(long) + 10
    assert trained.bytes_per_token > 20


@pytest.mark.parametrize("word", ["a" * 5000, " " * 2049, "ab " * 1000, "", "a" * 511, "漢" * 1025 + "\n" * 1025])
def test_no_text_is_lost_where_long_words_are_divided(word: str) -> None:
    text = f"one {word} two{word}"

    pieces = list(_without_long_words(text))

    assert "".join(pieces) == text
    longest = max(len(run) for piece in pieces for run in re.findall(r"\S+|\s+", piece))
    assert longest < 1024
    assert len(pieces) == 1 or len(max(re.findall(r"\S+|\s+", text), key=len)) > 1024


def test_a_file_is_replaced_only_by_force(tmp_path: Path, text: Path) -> None:
    out = tmp_path / "tokenizer.json"
    out.write_text("mine")

    with pytest.raises(DataError, match="--force"):
        train_tokenizer([text], out, vocab_size=257)
    assert out.read_text() == "mine"
    train_tokenizer([text], out, vocab_size=257, force=True)
    assert load_tokenizer(str(out)).vocab_size == 257


def test_a_folder_as_output_gets_a_suggestion(tmp_path: Path, text: Path) -> None:
    with pytest.raises(DataError, match=r"is a folder; name the file to write, such as .*tokenizer\.json"):
        train_tokenizer([text], tmp_path, vocab_size=257)


def test_text_that_is_not_utf8_leaves_no_file(tmp_path: Path, text: Path) -> None:
    (tmp_path / "bad.txt").write_bytes(b"ab\xff")

    with pytest.raises(DataError, match=r"bad\.txt.*byte 0xff"):
        train_tokenizer([text, tmp_path / "bad.txt"], tmp_path / "tokenizer.json", vocab_size=300)
    assert {path.name for path in tmp_path.iterdir()} == {"text.txt", "bad.txt"}


def test_a_file_that_cannot_be_written_leaves_the_old_one(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    out = tmp_path / "tokenizer.json"
    out.write_text("mine")
    monkeypatch.setattr("os.fsync", full)

    with pytest.raises(DataError, match="cannot be written: No space left on device"):
        train_tokenizer([text], out, vocab_size=257, force=True)
    assert out.read_text() == "mine"
    assert {path.name for path in tmp_path.iterdir()} == {"text.txt", "tokenizer.json"}


def test_a_missing_library_is_named_with_its_extra(tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)

    with pytest.raises(MissingExtraError, match=r"install speedtronic\[tokenizers\]"):
        train_tokenizer([text], tmp_path / "tokenizer.json", vocab_size=300)
