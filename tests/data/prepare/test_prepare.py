from __future__ import annotations

import errno
import gzip
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from speedtronic.data.prepare.prepare import PreparedSummary, Progress, prepare
from speedtronic.data.prepare.records import PromptRecords, TextRecords
from speedtronic.data.prepare.staging import StagingFolder, is_resumable, staging_folder
from speedtronic.data.shard_writer import ShardWriter
from speedtronic.data.shards import ShardSet
from speedtronic.data.tokenizers.chars import CharTokenizer
from speedtronic.errors import DataError
from tests.support.tokenizers import byte_level_bpe


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
        text_bytes=26,
        encoded_bytes=26,
        vocab_size=256 if tokenizer == "bytes" else len(set("first\nsecond é\nthird = 3\n\0")),
        shards=1,
        skipped=0,
        bad_records=0,
        first_bad_records=(),
        targets=6 + 9 + 10 + 3 + (tokenizer == "bytes"),
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
    (corpus / "a.txt").write_text("First of all\n")
    with pytest.raises(DataError, match="with another files"):
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


@pytest.mark.skipif(sys.platform == "win32", reason="symbolic links")
@pytest.mark.parametrize("place", ["empty", "absent", "prepared"])
def test_the_folder_that_a_link_leads_to_is_written(tmp_path: Path, corpus: Path, place: str) -> None:
    (tmp_path / "disk").mkdir()
    folder = tmp_path / "disk" / "data"
    if place == "empty":
        folder.mkdir()
    elif place == "prepared":
        prepare([corpus / "a.txt"], folder)
    (tmp_path / "out").symlink_to(folder)

    assert prepare([corpus], tmp_path / "out", force=True).folder == folder
    assert prepare([corpus], tmp_path / "out").already_prepared

    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus", "disk", "out"]
    assert list((tmp_path / "disk").iterdir()) == [folder]
    assert len(documents(tmp_path / "out")) == 3


def test_an_empty_folder_that_cannot_give_way_is_refused_before_the_work(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mount").mkdir()
    monkeypatch.chdir(tmp_path / "mount")

    with pytest.raises(DataError, match=r"\.: the finished folder cannot take the place of this empty one"):
        prepare([corpus], ".", on_progress=lambda progress: pytest.fail("it has begun"))


def test_a_folder_that_the_system_refuses_is_named(tmp_path: Path, corpus: Path) -> None:
    with pytest.raises(DataError, match="xxx: cannot be read: File name too long"):
        prepare([corpus], tmp_path / ("x" * 300))


def test_invalid_utf8_names_file_and_offset_and_leaves_nothing(tmp_path: Path, corpus: Path) -> None:
    (corpus / "bad.txt").write_bytes(b"good\xff")

    with pytest.raises(DataError, match=r"bad\.txt: byte 0xff at offset 4 is not valid UTF-8"):
        prepare([corpus], tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["corpus"]


def test_inputs_that_cannot_be_read_are_named(tmp_path: Path, corpus: Path) -> None:
    with pytest.raises(DataError, match=r"gone\.txt: no such text file"):
        prepare([tmp_path / "gone.txt"], tmp_path / "out")
    with pytest.raises(DataError, match=r"corpus: no file in this folder matches \*\.rst"):
        prepare([corpus], tmp_path / "out", patterns=["*.rst"])
    with pytest.raises(DataError, match="all files are empty"):
        prepare([corpus / "empty.txt"], tmp_path / "out")


def test_a_request_that_contradicts_itself_is_refused(tmp_path: Path, corpus: Path) -> None:
    with pytest.raises(DataError, match="name one thing to read: files and folders, the source"):
        prepare([], tmp_path / "out")
    with pytest.raises(DataError, match="name one thing to read: files and folders, the source"):
        prepare([corpus], tmp_path / "out", source="python-stdlib")
    with pytest.raises(DataError, match="source 'internet' is unknown"):
        prepare([], tmp_path / "out", source="internet")
    with pytest.raises(DataError, match="name one thing to read"):
        prepare([corpus], tmp_path / "out", hub="owner/name")
    with pytest.raises(DataError, match="words: no such tokenizer file"):
        prepare([corpus], tmp_path / "out", tokenizer="words")
    with pytest.raises(DataError, match="at least 1 process must prepare the data, not 0"):
        prepare([corpus], tmp_path / "out", processes=0)


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

    with pytest.raises(DataError, match="has no library sources there"):
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
    assert len(list(tmp_path.glob(".tmp-out-*"))) == 1

    assert prepare([corpus], tmp_path / "out").already_prepared

    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus", "out"]


# ---------------------------------------------------------------------- kinds of input


def test_files_of_several_kinds_become_one_set(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / "a.txt").write_text("plain")
    (folder / "b.jsonl").write_text('{"text": "one"}\n{"text": ""}\n{"text": "two"}\n')
    table = pyarrow.table({"text": ["three", None, "four"]})
    pytest.importorskip("pyarrow.parquet").write_table(table, folder / "c.parquet")

    summary = prepare([folder], tmp_path / "out", seed=1)

    found = documents(tmp_path / "out")
    assert sorted(found) == ["four", "one", "plain", "three", "two"]
    assert found.index("two") == found.index("one") + 1
    assert (summary.documents, summary.text_bytes) == (5, len("plainonetwothreefour"))
    assert prepare([folder], tmp_path / "out", seed=1).already_prepared


def test_nothing_but_empty_documents_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n')

    with pytest.raises(DataError, match="all documents are empty"):
        prepare([tmp_path / "a.jsonl"], tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


def test_compressed_lines_give_the_bytes_of_plain_ones(tmp_path: Path) -> None:
    lines = b"".join(b'{"text": "line %d"}\n' % number for number in range(300))
    (tmp_path / "a.jsonl").write_bytes(lines)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines))

    told: list[Progress] = []
    prepare([tmp_path / "a.jsonl"], tmp_path / "plain", processes=1, unit_bytes=500)
    prepare([tmp_path / "a.jsonl.gz"], tmp_path / "gz", processes=1, unit_bytes=500, on_progress=told.append)

    assert documents(tmp_path / "gz") == documents(tmp_path / "plain")
    assert all(0 < each.done <= each.total for each in told)
    assert prepare([tmp_path / "a.jsonl.gz"], tmp_path / "gz", processes=1, unit_bytes=500).already_prepared


def test_records_that_cannot_be_used_are_counted_where_they_may_be_skipped(tmp_path: Path) -> None:
    lines = [json.dumps({"text": f"line {number}"} if number % 5 else {"body": 1}) for number in range(1, 31)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    options: dict[str, Any] = {"processes": 1, "unit_bytes": 50, "tokenizer": "chars"}

    with pytest.raises(DataError, match=r"a\.jsonl: line 5: not an object with a text"):
        prepare([tmp_path / "a.jsonl"], tmp_path / "out", **options)
    summary = prepare([tmp_path / "a.jsonl"], tmp_path / "out", skip_bad_records=True, **options)

    assert (summary.documents, summary.bad_records, len(summary.first_bad_records)) == (24, 6, 3)
    assert "line 5: " in summary.first_bad_records[0]
    again = prepare([tmp_path / "a.jsonl"], tmp_path / "out", skip_bad_records=True, **options)
    assert again.already_prepared
    assert again.first_bad_records == summary.first_bad_records
    with pytest.raises(DataError, match="is prepared already, with another choice of --bad-lines"):
        prepare([tmp_path / "a.jsonl"], tmp_path / "out", **options)
    (tmp_path / "b.jsonl").write_text("{}\n[]\n")
    with pytest.raises(DataError, match=r"no record can be used; the first: .*b\.jsonl: line 1: "):
        prepare([tmp_path / "b.jsonl"], tmp_path / "none", skip_bad_records=True)


def test_targets_and_counts_survive_an_interruption(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("speedtronic.data.prepare.prepare._SECONDS_BETWEEN_JOURNALS", 0)
    lines = ['{"prompt": "p", "completion": "cc"}', "{}"] * 50
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    options: dict[str, Any] = {"records": PromptRecords(), "skip_bad_records": True, "processes": 1, "unit_bytes": 100}
    prepare([tmp_path / "a.jsonl"], tmp_path / "whole", shard_tokens=37, **options)

    def interrupt(told: Progress) -> None:
        if told.done > 900:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare([tmp_path / "a.jsonl"], tmp_path / "out", shard_tokens=37, on_progress=interrupt, **options)
    assert is_resumable(tmp_path / "out")
    summary = prepare([tmp_path / "a.jsonl"], tmp_path / "out", shard_tokens=37, **options)

    assert (summary.targets, summary.bad_records) == (150, 50)
    assert summary.encoded_bytes < 150
    for path in (tmp_path / "whole").iterdir():
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes()


@pytest.mark.slow
def test_a_dataset_of_the_datasets_library_is_prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub" / "train.jsonl").write_text("".join(f'{{"body": "row {row}"}}\n' for row in range(30)))

    summary = prepare([], tmp_path / "out", hub=str(tmp_path / "hub"), records=TextRecords("body"), unit_bytes=20)

    assert documents(tmp_path / "out") == [f"row {row}" for row in range(30)]
    assert ShardSet(tmp_path / "out").source["origin"] == str(tmp_path / "hub")
    assert summary.documents == 30


# ---------------------------------------------------------------------- several processes, and resuming


@pytest.fixture
def long_corpus(tmp_path: Path) -> Path:
    """Files smaller and larger than a unit of 200 bytes."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    for number in range(12):
        words = (f"word{number * step % 97}" for step in range(1, 5 + 11 * number))
        (folder / f"{number}.txt").write_text(" ".join(words) + "\n", encoding="utf-8")
    records = [json.dumps({"text": f"line {number} of many"}) for number in range(40)]
    (folder / "lines.jsonl").write_text("\n".join(records))
    return folder


@pytest.fixture
def bpe(tmp_path: Path) -> str:
    path = tmp_path / "bpe.json"
    path.write_text(byte_level_bpe().spec()["json"], encoding="utf-8")
    return str(path)


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


RECIPE: dict[str, Any] = {"shard_tokens": 500, "unit_bytes": 200}


def journal_every_unit() -> Callable[[], float]:
    return itertools.count(0, 1000).__next__


class Stop(KeyboardInterrupt):
    """Somebody's Ctrl-C."""


def stop_after(units: int) -> Callable[[Progress], None]:
    def told(progress: Progress) -> None:
        nonlocal units
        units -= progress.stage == "encoding"
        if not units:
            raise Stop

    return told


@pytest.mark.slow
@pytest.mark.parametrize("tokenizer", ["bytes", "chars", "bpe"])
def test_two_processes_write_what_one_writes(tmp_path: Path, long_corpus: Path, bpe: str, tokenizer: str) -> None:
    tokenizer = bpe if tokenizer == "bpe" else tokenizer
    one = prepare([long_corpus], tmp_path / "one", tokenizer=tokenizer, processes=1, **RECIPE)
    prepare([long_corpus], tmp_path / "two", tokenizer=tokenizer, processes=2, **RECIPE)

    assert one.shards > 3
    assert content(tmp_path / "one") == content(tmp_path / "two")
    ShardSet(tmp_path / "two").verify()


@pytest.mark.parametrize("units", [1, 2, 5, 9, 15, 20])
@pytest.mark.parametrize("tokenizer", ["chars", "bpe"])
def test_an_interrupted_preparation_continues_to_the_same_result(
    tmp_path: Path, long_corpus: Path, bpe: str, tokenizer: str, units: int
) -> None:
    recipe = {**RECIPE, "tokenizer": bpe if tokenizer == "bpe" else tokenizer, "processes": 1}
    whole = prepare([long_corpus], tmp_path / "whole", **recipe)
    with pytest.raises(Stop):
        prepare([long_corpus], tmp_path / "out", on_progress=stop_after(units), clock=journal_every_unit(), **recipe)
    assert not (tmp_path / "out").exists()
    stages = []

    resumed = prepare([long_corpus], tmp_path / "out", on_progress=lambda told: stages.append(told.stage), **recipe)

    assert content(tmp_path / "out") == content(tmp_path / "whole")
    assert set(stages) == {"encoding"}  # the characters are not collected again
    assert resumed.encoded_bytes < resumed.text_bytes - 200 * (units - 1)
    assert resumed.text_bytes == whole.text_bytes
    assert [path.name for path in tmp_path.glob(".*")] == []


@pytest.mark.skipif(sys.platform == "win32", reason="kill -9")
@pytest.mark.parametrize("place", ["unit 7", pytest.param("publish", marks=pytest.mark.slow)])
def test_a_killed_preparation_continues_to_the_same_result(
    tmp_path: Path, long_corpus: Path, bpe: str, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    prepare([long_corpus], tmp_path / "whole", tokenizer=bpe, processes=1, **RECIPE)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))
    request = json.dumps({"paths": [str(long_corpus)], "out": str(tmp_path / "out"), "tokenizer": bpe, **RECIPE})
    killed = subprocess.run([sys.executable, "-m", "tests.support.preparing", request, place], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert is_resumable(tmp_path / "out")

    resumed = prepare([long_corpus], tmp_path / "out", tokenizer=bpe, processes=2, **RECIPE)

    assert content(tmp_path / "out") == content(tmp_path / "whole")
    assert resumed.encoded_bytes < resumed.text_bytes
    assert not resumed.already_prepared


@pytest.mark.parametrize("then", ["again", "by force", "deleted"])
def test_a_journal_that_outlives_its_work_is_not_used(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch, then: str
) -> None:
    out = tmp_path / "out"
    with monkeypatch.context() as patched:  # as when it is killed after the folder has its name
        patched.setattr(StagingFolder, "remove_journal", lambda staging: None)
        # At the end of each unit a shard is full, so that the last notes need no file that is open.
        options: dict[str, Any] = {"unit_bytes": 1, "shard_tokens": 1, "processes": 1}
        prepare([corpus], out, clock=journal_every_unit(), **options)
    assert is_resumable(out)
    if then == "deleted":
        shutil.rmtree(out)

    made = prepare([corpus], out, force=then == "by force", **options)

    assert made.already_prepared == (then == "again")
    assert sorted(documents(out)) == ["first\n", "second é\n", "third = 3\n"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus", "out"]


def interrupted(folder: Path, corpus: Path, **options: Any) -> None:
    with pytest.raises(Stop):
        prepare(
            [corpus],
            folder,
            processes=1,
            on_progress=stop_after(6),
            clock=journal_every_unit(),
            **RECIPE | options,
        )
    assert is_resumable(folder)


def test_other_input_starts_over(tmp_path: Path, long_corpus: Path) -> None:
    interrupted(tmp_path / "out", long_corpus)
    with (long_corpus / "3.txt").open("a") as file:
        file.write("more")

    made = prepare([long_corpus], tmp_path / "out", processes=1, **RECIPE)

    assert made.encoded_bytes == made.text_bytes
    prepare([long_corpus], tmp_path / "whole", processes=1, **RECIPE)
    assert content(tmp_path / "out") == content(tmp_path / "whole")


@pytest.mark.parametrize("change", [{"seed": 3}, {"tokenizer": "chars"}, {"shard_tokens": 400}, {"unit_bytes": 201}])
def test_another_recipe_starts_over(tmp_path: Path, long_corpus: Path, change: dict[str, Any]) -> None:
    interrupted(tmp_path / "out", long_corpus)

    made = prepare([long_corpus], tmp_path / "out", processes=1, **RECIPE | change)

    assert made.encoded_bytes == made.text_bytes
    prepare([long_corpus], tmp_path / "whole", processes=1, **RECIPE | change)
    assert content(tmp_path / "out") == content(tmp_path / "whole")


def test_damaged_leftovers_start_over(tmp_path: Path, long_corpus: Path) -> None:
    interrupted(tmp_path / "out", long_corpus)
    files = staging_folder(tmp_path / "out") / "files"
    os.truncate(max(files.glob("*.bin")), 40)

    made = prepare([long_corpus], tmp_path / "out", processes=1, **RECIPE)

    assert made.encoded_bytes == made.text_bytes
    ShardSet(tmp_path / "out").verify()


def test_input_that_is_not_text_leaves_nothing_to_continue(tmp_path: Path, long_corpus: Path) -> None:
    (long_corpus / "0.txt").write_bytes(b"a" * 300 + b"\xff")

    with pytest.raises(DataError, match=r"0\.txt: byte 0xff at offset 300 is not valid UTF-8"):
        prepare([long_corpus], tmp_path / "out", processes=1, clock=journal_every_unit(), **RECIPE)

    assert [path.name for path in tmp_path.iterdir()] == ["corpus"]


def test_after_a_full_disk_the_work_continues(
    tmp_path: Path, long_corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare([long_corpus], tmp_path / "whole", processes=1, **RECIPE)
    fsync = os.fsync
    calls = itertools.count()

    def full(descriptor: int) -> None:
        if next(calls) > 20:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        with pytest.raises(DataError, match="out: cannot be written: .*No space left"):
            prepare([long_corpus], tmp_path / "out", processes=1, clock=journal_every_unit(), **RECIPE)

    resumed = prepare([long_corpus], tmp_path / "out", processes=1, **RECIPE)
    assert resumed.encoded_bytes < resumed.text_bytes
    assert content(tmp_path / "out") == content(tmp_path / "whole")


def test_a_second_process_at_the_same_folder_is_refused(tmp_path: Path, corpus: Path) -> None:
    with (
        StagingFolder(tmp_path / "out"),
        pytest.raises(DataError, match="this process is preparing this data"),
    ):
        prepare([corpus], tmp_path / "out")


def test_progress_is_reported_up_to_the_end(tmp_path: Path, long_corpus: Path) -> None:
    told: list[Progress] = []
    prepare([long_corpus], tmp_path / "out", tokenizer="chars", processes=1, on_progress=told.append, **RECIPE)
    prepare([long_corpus], tmp_path / "out", tokenizer="chars", processes=1, on_progress=told.append, **RECIPE)
    total = sum(path.stat().st_size for path in long_corpus.iterdir())

    stages = {stage: list(progress) for stage, progress in itertools.groupby(told, lambda each: each.stage)}

    assert list(stages) == ["characters", "encoding", "checking"]
    for progress in stages.values():
        done = [each.done for each in progress]
        assert done == sorted(done)
        assert 0 < done[0] < done[-1] == total
        assert {each.total for each in progress} == {total}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="/proc tells the memory")
def test_memory_does_not_grow_with_the_text(tmp_path: Path) -> None:
    def peak(name: str, size: int) -> int:
        (tmp_path / name).touch()
        os.truncate(tmp_path / name, size)  # NULs are text
        code = (
            "import sys\nfrom pathlib import Path\nfrom speedtronic.data.prepare.prepare import prepare\n"
            "prepare([sys.argv[1]], sys.argv[1] + '.out', processes=1)\n"
            "print(Path('/proc/self/status').read_text().split('VmHWM:')[1].split()[0])"
        )
        command = [sys.executable, "-c", code, str(tmp_path / name)]
        return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout) * 1024

    assert peak("large", 200 * 2**20) - peak("small", 10 * 2**20) <= 10 * 2**20
