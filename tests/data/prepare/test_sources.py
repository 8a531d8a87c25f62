from __future__ import annotations

import builtins
import gzip
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from speedtronic.data.prepare.records import PromptRecords, TextRecords
from speedtronic.data.prepare.sources import choose_inputs, find_inputs, texts
from speedtronic.data.prepare.tables import hub_dataset
from speedtronic.errors import DataError, MissingExtraError
from tests.support.sources import json_lines, parquet


def test_a_file_is_read_by_its_kind(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text('{"text": "as it stands"}')
    json_lines(tmp_path / "b.jsonl", [{"text": "one"}, {"text": "two"}])
    parquet(tmp_path / "c.parquet", {"text": ["three", "four"]})

    found = find_inputs([tmp_path])

    assert [each.name for each in found] == [f"{tmp_path.name}/{name}" for name in ("a.txt", "b.jsonl", "c.parquet")]
    assert list(texts(found)) == ['{"text": "as it stands"}', "one", "two", "three", "four"]


def test_the_field_that_holds_the_text_can_be_chosen(tmp_path: Path) -> None:
    json_lines(tmp_path / "b.jsonl", [{"body": "one", "text": 1}])
    parquet(tmp_path / "c.parquet", {"body": ["two"], "text": [2]})

    assert list(texts(find_inputs([tmp_path], records=TextRecords("body")))) == ["one", "two"]


def test_links_to_folders_are_followed_and_each_folder_is_read_once(tmp_path: Path) -> None:
    for name in ("corpus/a.txt", "corpus/deep/b.txt", "elsewhere/c.txt", "elsewhere/deep/d.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "corpus" / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "corpus" / "same").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "up").symlink_to(tmp_path / "corpus")  # and round again

    found = [each.name for each in find_inputs([tmp_path / "corpus"])]

    assert found == ["corpus/a.txt", "corpus/deep/b.txt", "corpus/link/c.txt", "corpus/link/deep/d.txt"]


def test_a_link_that_leads_in_a_circle_is_not_a_file(tmp_path: Path) -> None:
    (tmp_path / "a.txt").symlink_to(tmp_path / "b.txt")
    (tmp_path / "b.txt").symlink_to(tmp_path / "a.txt")

    with pytest.raises(DataError, match=r"a\.txt: no such text file"):
        find_inputs([tmp_path / "a.txt"])
    with pytest.raises(DataError, match="no file in this folder matches"):
        find_inputs([tmp_path])


def test_a_folder_that_cannot_be_read_is_named_and_not_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_text("readable")
    (tmp_path / "closed").mkdir()
    scandir = os.scandir

    def as_nobody(path: Any) -> Any:
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", as_nobody)

    with pytest.raises(DataError, match=r"closed: cannot be read: Permission denied"):
        choose_inputs([tmp_path])


def test_a_path_that_the_system_refuses_is_named() -> None:
    with pytest.raises(DataError, match="xxx: cannot be read: File name too long"):
        choose_inputs(["x" * 300])


def test_a_text_inside_another_object_is_found(tmp_path: Path) -> None:
    json_lines(tmp_path / "a.jsonl", [{"doc": {"body": {"text": "one"}}}, {"doc": None}, {"doc": {"body": None}}])
    rows = [{"body": {"text": "two", "id": 1}}, None, {"body": {"text": None, "id": 2}}]
    parquet(tmp_path / "b.parquet", {"doc": rows, "n": [1, 2, 3]})

    assert list(texts(find_inputs([tmp_path], records=TextRecords("doc.body.text")))) == ["one", "two"]
    for name, reason in (
        ("doc.body.id", "holds int64, not text"),
        ("doc.gone", "has no column"),
        ("n.x", "has no col"),
    ):
        with pytest.raises(DataError, match=rf"b\.parquet: .*{reason}"):
            find_inputs([tmp_path / "b.parquet"], records=TextRecords(name))


def test_a_text_file_is_no_source_of_records(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")

    with pytest.raises(DataError, match=r"a\.txt: a text, and no records with 'prompt' and 'completion'"):
        find_inputs([tmp_path / "a.txt"], records=PromptRecords())
    with pytest.raises(DataError, match="python-stdlib is text, and has no records"):
        choose_inputs([], source="python-stdlib", records=PromptRecords())


def test_other_compressed_files_are_refused_with_a_way_to_read_them(tmp_path: Path) -> None:
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"text"))

    with pytest.raises(DataError, match=r"a\.txt\.gz: .* `gzip -dc .* \| speedtronic data prepare --stdin text …`"):
        find_inputs([tmp_path / "a.txt.gz"])


def test_a_folder_is_searched_for_compressed_lines_and_empty_ones_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"text": "one"}'))
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b""))

    assert [each.name for each in find_inputs([tmp_path])] == [f"{tmp_path.name}/a.jsonl.gz"]


@pytest.mark.parametrize(
    ("library", "ask", "extra"),
    [
        ("pyarrow", lambda folder: find_inputs([folder / "a.parquet"]), "parquet"),
        ("datasets", lambda folder: hub_dataset(str(folder), split="train"), "datasets"),
        ("zstandard", lambda folder: find_inputs([folder / "a.jsonl.zst"]), "zstd"),
    ],
)
def test_a_missing_library_says_which_extra_brings_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: str, ask: Any, extra: str
) -> None:
    for name in ("a.parquet", "a.jsonl.zst"):
        (tmp_path / name).write_bytes(b"x")
    imported = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name.partition(".")[0] == library:
            raise ImportError(name)
        return imported(name, *rest)

    monkeypatch.delitem(sys.modules, library, raising=False)
    monkeypatch.setattr("builtins.__import__", without)

    with pytest.raises(MissingExtraError, match=rf"install speedtronic\[{extra}\]"):
        ask(tmp_path)
