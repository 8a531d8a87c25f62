from __future__ import annotations

import gzip
import re
from pathlib import Path
from typing import Any

import pytest

from speedtronic.data.prepare.sources import find_inputs
from speedtronic.errors import DataError
from tests.support.sources import documents_of, texts_of


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
