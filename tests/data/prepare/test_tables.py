from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from speedtronic.data.prepare.chat_template import ChatTemplate
from speedtronic.data.prepare.records import ChatRecords, Document, PromptRecords, Records, Sample, TextRecords
from speedtronic.data.prepare.sources import find_inputs
from speedtronic.data.prepare.tables import hub_dataset
from speedtronic.errors import DataError
from tests.support.sources import documents_of, json_lines, parquet


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
