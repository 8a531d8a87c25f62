from __future__ import annotations

from pathlib import Path

import pytest

from speedtronic.data.prepare.inputs import text_file
from speedtronic.data.prepare.sources import find_inputs
from speedtronic.errors import DataError
from tests.support.sources import documents_of, json_lines, parquet, texts_of


def test_a_stamp_tells_a_changed_file(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("one")
    before = text_file(path, "a").stamp

    assert text_file(path, "a").stamp == before
    path.write_text("two two")
    assert text_file(path, "a").stamp != before


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
