from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from speedtronic.data.prepare import PreparedSummary, prepare
from speedtronic.data.shards import ShardSet, ShardWriter
from speedtronic.data.tokenizers import CharTokenizer
from speedtronic.errors import DataError


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """A folder with text at several depths, and with what is not to be read."""
    folder = tmp_path / "corpus"
    files = {
        "a.txt": "first\n",
        "b.md": "second é\n",
        "deep/er/c.py": "third = 3\n",
        "empty.txt": "",
        "image.png": "not text",
        ".hidden.txt": "hidden",
        ".git/config.txt": "hidden too",
    }
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")
    return folder


def decoded(folder: Path, limit: int | None = None) -> str:
    shards = ShardSet(folder)
    ids = np.empty(limit or len(shards), np.int64)
    shards.read(0, ids)
    return shards.tokenizer.decode(ids.tolist())


def documents(folder: Path) -> list[str]:
    text = decoded(folder)
    assert text.endswith("\0")
    return text[:-1].split("\0")


@pytest.mark.parametrize("tokenizer", ["bytes", "chars"])
def test_text_files_of_a_folder_become_documents(tmp_path: Path, corpus: Path, tokenizer: str) -> None:
    summary = prepare([corpus], tmp_path / "out", tokenizer=tokenizer)

    assert sorted(documents(tmp_path / "out")) == ["first\n", "second é\n", "third = 3\n"]
    assert summary == PreparedSummary(
        folder=tmp_path / "out",
        tokens=6 + 9 + 10 + 3 + (tokenizer == "bytes"),
        documents=3,
        vocab_size=256 if tokenizer == "bytes" else len(set("first\nsecond é\nthird = 3\n\0")),
        shards=1,
        skipped=0,
        already_prepared=False,
    )


def test_patterns_choose_among_the_files_of_folders_only(tmp_path: Path, corpus: Path) -> None:
    prepare([corpus, corpus / "image.png"], tmp_path / "out", patterns=["*.py"])

    assert sorted(documents(tmp_path / "out")) == ["not text", "third = 3\n"]


def test_a_file_that_is_named_twice_is_read_once(tmp_path: Path, corpus: Path) -> None:
    prepare([corpus / "a.txt", corpus, corpus / "a.txt"], tmp_path / "out")

    assert len(documents(tmp_path / "out")) == 3


def test_the_order_of_documents_depends_on_names_and_seed_alone(tmp_path: Path) -> None:
    def order(place: str, names: list[int], seed: int) -> list[str]:
        folder = tmp_path / place / "texts"
        folder.mkdir(parents=True)
        for name in names:
            (folder / f"{name}.txt").write_text(str(name))
        prepare([folder], tmp_path / place / "out", seed=seed)
        return documents(tmp_path / place / "out")

    first = order("one", list(range(20)), seed=0)

    assert order("two", list(range(19, -1, -1)), seed=0) == first
    assert order("three", list(range(20)), seed=1) != first
    assert first != sorted(first, key=int)


def test_many_shards_hold_the_same_tokens(tmp_path: Path, corpus: Path) -> None:
    prepare([corpus], tmp_path / "one")
    summary = prepare([corpus], tmp_path / "many", shard_tokens=5)

    assert summary.shards == 6
    assert documents(tmp_path / "many") == documents(tmp_path / "one")


def test_a_finished_folder_of_the_same_content_is_kept(tmp_path: Path, corpus: Path) -> None:
    prepare([corpus], tmp_path / "out")
    index = (tmp_path / "out" / "index.json").stat().st_mtime_ns
    os.utime(corpus / "a.txt", (0, 0))

    summary = prepare([corpus], tmp_path / "out")

    assert summary.already_prepared
    assert summary.documents == 3
    assert (tmp_path / "out" / "index.json").stat().st_mtime_ns == index


@pytest.mark.parametrize(
    ("options", "differing"),
    [({"tokenizer": "chars"}, "tokenizer"), ({"seed": 7}, "seed"), ({"shard_tokens": 9}, "shard_tokens")],
)
def test_a_finished_folder_of_other_content_is_replaced_only_by_force(
    tmp_path: Path, corpus: Path, options: dict[str, object], differing: str
) -> None:
    prepare([corpus], tmp_path / "out")

    with pytest.raises(DataError, match=f"prepared already, with another .*{differing}.*--force"):
        prepare([corpus], tmp_path / "out", **options)  # type: ignore[arg-type]
    summary = prepare([corpus], tmp_path / "out", force=True, **options)  # type: ignore[arg-type]

    assert not summary.already_prepared
    assert ShardSet(tmp_path / "out").source[differing] == options[differing]


def test_changed_text_is_noticed(tmp_path: Path, corpus: Path) -> None:
    prepare([corpus], tmp_path / "out")
    (corpus / "a.txt").write_text("First\n")

    with pytest.raises(DataError, match="with another content"):
        prepare([corpus], tmp_path / "out")


def test_force_replaces_a_damaged_folder(tmp_path: Path, corpus: Path) -> None:
    prepare([corpus], tmp_path / "out")
    (tmp_path / "out" / "shard_00000.bin").unlink()

    prepare([corpus], tmp_path / "out", force=True)

    assert len(documents(tmp_path / "out")) == 3


def test_not_even_force_replaces_a_folder_with_other_things_in_it(tmp_path: Path, corpus: Path) -> None:
    with pytest.raises(DataError, match="exists and is not a prepared folder"):
        prepare([corpus / "a.txt"], corpus, force=True)

    assert (corpus / "a.txt").exists()


def test_an_empty_folder_is_filled(tmp_path: Path, corpus: Path) -> None:
    (tmp_path / "out").mkdir()

    assert prepare([corpus], tmp_path / "out").documents == 3


def test_invalid_utf8_names_file_and_offset_and_leaves_nothing(tmp_path: Path, corpus: Path) -> None:
    (corpus / "bad.txt").write_bytes(b"good\xff")

    with pytest.raises(DataError, match=r"bad\.txt: byte 0xff at offset 4 is not valid UTF-8"):
        prepare([corpus], tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["corpus"]


def test_what_cannot_be_read_is_named(tmp_path: Path, corpus: Path) -> None:
    with pytest.raises(DataError, match=r"gone\.txt: no such text file"):
        prepare([tmp_path / "gone.txt"], tmp_path / "out")
    with pytest.raises(DataError, match=r"corpus: no file in this folder matches \*\.rst"):
        prepare([corpus], tmp_path / "out", patterns=["*.rst"])
    with pytest.raises(DataError, match="all files are empty"):
        prepare([corpus / "empty.txt"], tmp_path / "out")


def test_a_request_that_contradicts_itself_is_refused(tmp_path: Path, corpus: Path) -> None:
    with pytest.raises(DataError, match="either files and folders to read or the source"):
        prepare([], tmp_path / "out")
    with pytest.raises(DataError, match="either files and folders to read or the source"):
        prepare([corpus], tmp_path / "out", source="python-stdlib")
    with pytest.raises(DataError, match="source 'internet' is unknown"):
        prepare([], tmp_path / "out", source="internet")
    with pytest.raises(DataError, match="tokenizer 'words' is unknown"):
        prepare([corpus], tmp_path / "out", tokenizer="words")


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path, corpus: Path) -> None:
    with pytest.raises(DataError, match="out: cannot be written"):
        prepare([corpus], corpus / "a.txt" / "out")


def library(folder: Path) -> None:
    for name, content in {
        "module.py": b"x = 1\n",
        "package/__init__.py": b"",
        "package/part.py": b"y = 2\n",
        "test/latin.py": b"# \xe9\n",
        "site-packages/other.py": b"z = 3\n",
        "__pycache__/module.py": b"w = 4\n",
        "notes.txt": b"no source",
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def test_the_library_of_the_running_python_is_a_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library(tmp_path / "lib")
    monkeypatch.setattr("sysconfig.get_path", {"stdlib": str(tmp_path / "lib")}.__getitem__)

    summary = prepare([], tmp_path / "out", source="python-stdlib")

    assert sorted(documents(tmp_path / "out")) == ["x = 1\n", "y = 2\n"]
    assert summary.skipped == 1
    assert prepare([], tmp_path / "out", source="python-stdlib").already_prepared


def test_a_python_without_library_sources_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path / "nothing"))

    with pytest.raises(DataError, match="keeps no library sources there"):
        prepare([], tmp_path / "out", source="python-stdlib")


@pytest.mark.slow
def test_the_library_gives_tens_of_megabytes_of_text(tmp_path: Path) -> None:
    summary = prepare([], tmp_path / "out", source="python-stdlib")

    assert summary.tokens > 10_000_000
    assert "def " in decoded(tmp_path / "out", limit=100_000)


def test_the_next_preparation_removes_what_a_killed_one_left(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed = subprocess.Popen([sys.executable, "-S", "-c", ""])
    killed.wait()
    prepare([corpus], tmp_path / "out")
    with monkeypatch.context() as patch:
        patch.setattr("os.getpid", lambda: killed.pid)
        ShardWriter(tmp_path / "out", tokenizer=CharTokenizer()).__enter__()
    assert len(list(tmp_path.glob(".out.partial-*"))) == 1

    assert prepare([corpus], tmp_path / "out").already_prepared

    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus", "out"]
