from __future__ import annotations

import builtins
import importlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from speedtronic.data.prepare.sources import Input, choose_inputs, find_inputs, hub_dataset, text_file, texts
from speedtronic.data.tokenizers.chunking import CutRule
from speedtronic.errors import DataError, MissingExtraError


def texts_of(each: Input, size: int, rule: CutRule = "characters", offset: int = 0) -> Iterator[tuple[str, bool, int]]:
    """Each text with whether it ends a document, and the offset behind its chunk."""
    for chunk, behind in each.chunks(offset, size, rule):
        for text in chunk.texts(chunk.raw()):
            yield text, chunk.ends_documents, behind


def documents_of(each: Input, size: int, rule: CutRule = "characters") -> list[str]:
    documents = [""]
    for text, ended, _ in texts_of(each, size, rule):
        documents[-1] += text
        if ended:
            documents.append("")
    assert documents.pop() == ""
    return documents


def json_lines(path: Path, records: Sequence[Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def parquet(path: Path, columns: dict[str, Any], **options: Any) -> Path:
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet").write_table(pyarrow.table(columns), path, **options)
    return path


# ---------------------------------------------------------------------- finding


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

    assert list(texts(find_inputs([tmp_path], text_field="body"))) == ["one", "two"]


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


def test_a_stamp_tells_a_changed_file(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("one")
    before = text_file(path, "a").stamp

    assert text_file(path, "a").stamp == before
    path.write_text("two two")
    assert text_file(path, "a").stamp != before


# ---------------------------------------------------------------------- text files


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_the_chunks_of_a_text_are_the_text(tmp_path: Path, size: int) -> None:
    text = "aé字😀 word\n" * 5
    path = tmp_path / "a.txt"
    path.write_text(text, encoding="utf-8")

    assert documents_of(text_file(path, "a"), size) == [text]


def test_a_text_is_cut_only_where_the_rule_allows(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("one two\nthree four\nfive", encoding="utf-8")
    file = text_file(path, "a")

    assert [text for text, _, _ in texts_of(file, 6, "words")] == ["one two\n", "three four\n", "five"]
    assert [text for text, _, _ in texts_of(file, 6, "never")] == [path.read_text()]


@pytest.mark.parametrize("size", [1, 5, 8, 30])
def test_chunks_can_start_at_any_offset(tmp_path: Path, size: int) -> None:
    (tmp_path / "a.txt").write_text("one two\nthree four\nfive", encoding="utf-8")
    json_lines(tmp_path / "b.jsonl", [{"text": word} for word in ["one", "two", "three", "four", "five", "six"]])
    parquet(tmp_path / "c.parquet", {"text": ["one", "", None, "two", "three", "four"] * 3}, row_group_size=4)

    for each in find_inputs([tmp_path]):
        every = list(texts_of(each, size, "words"))
        for _, _, offset in every:
            assert list(texts_of(each, size, "words", offset)) == [text for text in every if text[2] > offset]
        assert every[-1][2] == each.length


def test_what_is_not_utf8_is_named_with_its_offset(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"good good good \xff bad")

    with pytest.raises(DataError, match=r"a\.txt: byte 0xff at offset 15 is not valid UTF-8"):
        documents_of(text_file(path, "a"), 4)


def test_a_file_that_shrinks_while_it_is_read_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("0123456789")
    chunks = list(text_file(path, "a").chunks(0, 4, "characters"))
    path.write_text("0123456")

    with pytest.raises(DataError, match=r"a\.txt: has become shorter while it was read"):
        chunks[-1][0].raw()


# ---------------------------------------------------------------------- JSON lines


@pytest.mark.parametrize("size", [1, 10, 40, 1000])
def test_each_json_line_is_a_document(tmp_path: Path, size: int) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes('{"text": "é\\n"}\r\n\n{"text": "字", "id": 3}\n{"text": ""}\n  \n{"text": "end"}'.encode())

    assert documents_of(find_inputs([path])[0], size) == ["é\n", "字", "end"]


@pytest.mark.parametrize("size", [1, 1000])
def test_json_lines_may_begin_with_a_byte_order_mark_and_have_nulls(tmp_path: Path, size: int) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "one"}\n{"text": null}\n{"text": "two"}\n')

    assert documents_of(find_inputs([path])[0], size) == ["one", "two"]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"{", r"not valid JSON \(Expecting property name enclosed in double quotes at column 2\)"),
        (b"[" * 100_000, "recursion"),
        (b'"text"', "not an object with a text 'text'"),
        (b'{"body": "x"}', "not an object with a text 'text'; choose the field with --text-field"),
        (b'{"text": 3}', "not an object with a text 'text'"),
        (b'{"text": "\xff"}', "can't decode byte 0xff"),
        (b'{"text": "\\ud800"}', "surrogates not allowed"),
    ],
)
@pytest.mark.parametrize("size", [1, 1000])
def test_a_wrong_json_line_is_named_with_its_number(tmp_path: Path, line: bytes, reason: str, size: int) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "one"}\n\n{"text": "two"}\n' + line + b"\n")

    with pytest.raises(DataError, match=rf"a\.jsonl: line 4: .*{reason}"):
        documents_of(find_inputs([path])[0], size)


# ---------------------------------------------------------------------- Parquet


@pytest.mark.parametrize("size", [1, 10, 1000])
def test_each_row_of_a_parquet_file_is_a_document(tmp_path: Path, size: int) -> None:
    rows = ["é", None, "", "字\n", "end"] * 4
    path = parquet(tmp_path / "a.parquet", {"id": list(range(20)), "text": rows}, row_group_size=3)

    (found,) = find_inputs([path])

    assert found.length == 20
    assert documents_of(found, size) == [row for row in rows if row]


def test_text_in_a_dictionary_and_beside_nested_columns_is_read(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    columns = {"meta": [{"a": 1, "b": 2}] * 3, "text": pyarrow.array(["x", "y", "x"]).dictionary_encode()}
    (found,) = find_inputs([parquet(tmp_path / "a.parquet", columns)])

    assert documents_of(found, 1) == ["x", "y", "x"]
    assert found.size > 0


def test_a_parquet_file_without_such_text_is_refused(tmp_path: Path) -> None:
    path = parquet(tmp_path / "a.parquet", {"body": ["x"], "id": [1]})

    with pytest.raises(DataError, match=r"a\.parquet: has no column 'text', but body, id; choose one with --text-f"):
        find_inputs([path])
    with pytest.raises(DataError, match=r"a\.parquet: the column 'id' holds int64, not text"):
        find_inputs([path], text_field="id")


def test_a_parquet_file_with_two_such_columns_is_refused(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    table = pyarrow.table([pyarrow.array(["x"]), pyarrow.array(["y"])], names=["text", "text"])
    importlib.import_module("pyarrow.parquet").write_table(table, tmp_path / "a.parquet")

    with pytest.raises(DataError, match=r"a\.parquet: has several columns 'text'; choose another"):
        find_inputs([tmp_path / "a.parquet"])


def test_a_damaged_parquet_file_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    path = tmp_path / "a.parquet"
    path.write_bytes(b"PAR1 and no more")

    with pytest.raises(DataError, match=r"a\.parquet: cannot be read as Parquet"):
        find_inputs([path])


@pytest.mark.parametrize(
    ("library", "ask", "extra"),
    [
        ("pyarrow", lambda folder: find_inputs([folder / "a.parquet"]), "parquet"),
        ("datasets", lambda folder: hub_dataset(str(folder), split="train"), "datasets"),
    ],
)
def test_a_missing_library_says_which_extra_brings_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: str, ask: Any, extra: str
) -> None:
    (tmp_path / "a.parquet").write_bytes(b"x")
    imported = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name.partition(".")[0] == library:
            raise ImportError(name)
        return imported(name, *rest)

    monkeypatch.delitem(sys.modules, library, raising=False)
    monkeypatch.setattr("builtins.__import__", without)

    with pytest.raises(MissingExtraError, match=rf"install speedtronic\[{extra}\]"):
        ask(tmp_path)


# ---------------------------------------------------------------------- datasets


@pytest.fixture
def local_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    datasets.disable_progress_bars()
    folder = tmp_path / "hub"
    folder.mkdir()
    json_lines(folder / "train.jsonl", [{"text": f"row {row}" if row % 3 else "", "id": row} for row in range(2500)])
    json_lines(folder / "test.jsonl", [{"text": "held out", "id": 0}])
    return folder


@pytest.mark.slow
def test_a_local_folder_is_a_dataset(local_dataset: Path) -> None:
    found = hub_dataset(str(local_dataset), split="train")

    assert (found.name, found.length) == ("hub:train", 2500)
    assert found.size > 10_000
    assert documents_of(found, 100) == [f"row {row}" for row in range(2500) if row % 3]
    assert documents_of(hub_dataset(str(local_dataset), split="test"), 100) == ["held out"]
    for split, field, reason in (
        ("dev", "text", "split dev: .*dev"),
        ("train", "body", "has no column 'body'"),
        ("train", "id", "holds int64"),
        ("train[:0]", "text", "no data"),
    ):
        with pytest.raises(DataError, match=reason):
            hub_dataset(str(local_dataset), split=split, text_field=field)


@pytest.mark.slow
def test_a_dataset_that_cannot_be_loaded_is_named(local_dataset: Path) -> None:
    with pytest.raises(DataError, match="dataset nobody/nothing:small, split train: "):
        hub_dataset("nobody/nothing:small", split="train")
