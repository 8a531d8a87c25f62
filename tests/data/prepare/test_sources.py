from __future__ import annotations

import builtins
import gzip
import importlib
import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from speedtronic.data.prepare.chat_template import ChatTemplate
from speedtronic.data.prepare.records import ChatRecords, Document, PromptRecords, Records, Sample, TextRecords
from speedtronic.data.prepare.sources import Input, choose_inputs, find_inputs, hub_dataset, text_file, texts
from speedtronic.data.tokenizers.chunking import CutRule
from speedtronic.errors import DataError, MissingExtraError


def texts_of(each: Input, size: int, rule: CutRule = "characters", offset: int = 0) -> Iterator[tuple[str, bool, int]]:
    """Each text with whether it ends a document, and the offset behind its chunk."""
    for chunk, behind in each.chunks(offset, size, rule):
        for text in chunk.documents(chunk.raw()):
            assert isinstance(text, str)
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


# ---------------------------------------------------------------------- compressed lines


def compressed(path: Path, content: bytes) -> Path:
    """The content in two members or frames, as concatenated files have."""
    middle = len(content) // 2
    if path.suffix == ".gz":
        compress: Any = gzip.compress
    else:
        compress = pytest.importorskip("zstandard").ZstdCompressor().compress
    path.write_bytes(compress(content[:middle]) + compress(content[middle:]))
    return path


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst"])
@pytest.mark.parametrize("size", [1, 40, 100_000])
def test_compressed_lines_are_read_like_others_from_any_offset(tmp_path: Path, name: str, size: int) -> None:
    lines = b"\xef\xbb\xbf" + b"".join(b'{"text": "line %d"}\n' % number for number in range(200)) + b'{"text": "end"}'
    (found,) = find_inputs([compressed(tmp_path / name, lines)])

    every = list(texts_of(found, size))
    assert [text for text, _, _ in every] == [*(f"line {number}" for number in range(200)), "end"]
    for _, _, offset in [every[0], every[len(every) // 2], every[-1]]:
        assert list(texts_of(found, size, offset=offset)) == [text for text in every if text[2] > offset]


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst"])
def test_a_wrong_line_in_a_compressed_file_has_its_number(tmp_path: Path, name: str) -> None:
    (found,) = find_inputs([compressed(tmp_path / name, b'{"text": "x"}\n' * 30 + b"{}\n")])

    for size in (1, 50, 10_000):
        with pytest.raises(DataError, match=rf"{name}: line 31: not an object with a text"):
            documents_of(found, size)


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst"])
@pytest.mark.parametrize("damage", ["cut off", "changed"])
def test_a_damaged_compressed_file_is_named(tmp_path: Path, name: str, damage: str) -> None:
    path = compressed(tmp_path / name, b"".join(b'{"text": "line %d"}\n' % number for number in range(2000)))
    content = bytearray(path.read_bytes())
    if damage == "changed":
        content[1] ^= 0xFF
    path.write_bytes(content if damage == "changed" else content[:-20])

    with pytest.raises(DataError, match=rf"{name}: cannot be decompressed: .*; the file may be damaged"):
        documents_of(find_inputs([path])[0], 100)


def test_other_compressed_files_are_refused_with_a_way_to_read_them(tmp_path: Path) -> None:
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"text"))

    with pytest.raises(DataError, match=r"a\.txt\.gz: .* `gzip -dc .* \| speedtronic data prepare --stdin text …`"):
        find_inputs([tmp_path / "a.txt.gz"])


def test_a_folder_is_searched_for_compressed_lines_and_empty_ones_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"text": "one"}'))
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b""))

    assert [each.name for each in find_inputs([tmp_path])] == [f"{tmp_path.name}/a.jsonl.gz"]


# ---------------------------------------------------------------------- records


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


@pytest.mark.parametrize("size", [1, 1000])
def test_what_cannot_be_used_is_left_out_where_that_is_asked_for(tmp_path: Path, size: int) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "one"}\n{"text": 2}\n\xff\n\n{"text": "five"}\n{')
    left_out: list[str] = []

    (found,) = find_inputs([path])
    documents = [each for chunk, _ in found.chunks(0, size, "never") for each in chunk.documents(chunk.raw(), left_out)]

    assert documents == ["one", "five"]
    assert [re.sub(r".*a\.jsonl: (line \d+): .*", r"\1", problem) for problem in left_out] == [
        "line 2",
        "line 3",
        "line 6",
    ]


def test_rows_have_prompts_or_chats(tmp_path: Path) -> None:
    messages = [[{"role": "assistant", "content": "x"}], [{"role": "user", "content": "no answer"}], None]
    path = parquet(
        tmp_path / "a.parquet", {"prompt": ["p", "q", None], "completion": ["c", "", "d"], "messages": messages}
    )
    left_out: list[str] = []

    def documents(records: Records) -> list[Document]:
        (found,) = find_inputs([path], records=records)
        return [each for chunk, _ in found.chunks(0, 30, "never") for each in chunk.documents(chunk.raw(), left_out)]

    assert [sample.parts for sample in documents(PromptRecords()) if isinstance(sample, Sample)] == [
        (("p", False), ("c", True)),
        (("", False), ("d", True)),
    ]
    assert not left_out
    template = ChatTemplate("{% generation %}{{ messages[0].content }}{% endgeneration %}")
    assert [sample.parts for sample in documents(ChatRecords(template)) if isinstance(sample, Sample)] == [
        (("x", True),)
    ]
    assert left_out == ["a.parquet: row 1: no message has the role 'assistant', so there is nothing to learn"]


def test_a_text_file_is_no_source_of_records(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")

    with pytest.raises(DataError, match=r"a\.txt: a text, and no records with 'prompt' and 'completion'"):
        find_inputs([tmp_path / "a.txt"], records=PromptRecords())
    with pytest.raises(DataError, match="python-stdlib is text, and has no records"):
        choose_inputs([], source="python-stdlib", records=PromptRecords())


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
        find_inputs([path], records=TextRecords("id"))


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
            hub_dataset(str(local_dataset), split=split, records=TextRecords(field))


@pytest.mark.slow
def test_a_saved_dataset_is_read_with_its_splits(local_dataset: Path, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = [{"role": "assistant", "content": "x"}]
    split = datasets.Dataset.from_dict({"messages": [rows] * 3, "meta": [{"text": "a"}, {"text": "b"}, None]})
    split.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": split, "test": split.select([1])}).save_to_disk(tmp_path / "both")

    assert documents_of(hub_dataset(str(tmp_path / "one"), split="train", records=TextRecords("meta.text")), 1) == [
        "a",
        "b",
    ]
    assert documents_of(hub_dataset(str(tmp_path / "both"), split="test", records=TextRecords("meta.text")), 1) == ["b"]
    with pytest.raises(DataError, match="split dev: it has the splits train, test; choose one with --split"):
        hub_dataset(str(tmp_path / "both"), split="dev", records=TextRecords("meta.text"))
    records = ChatRecords(ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}"))
    chunks = list(hub_dataset(str(tmp_path / "one"), split="train", records=records).chunks(0, 1, "never"))
    assert [chunk.documents(chunk.raw()) for chunk, _ in chunks] == [[Sample((("x", True),), True, False)]] * 3


@pytest.mark.slow
def test_a_dataset_that_cannot_be_loaded_is_named(local_dataset: Path) -> None:
    with pytest.raises(DataError, match="dataset nobody/nothing:small, split train: "):
        hub_dataset("nobody/nothing:small", split="train")
