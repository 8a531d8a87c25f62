from __future__ import annotations

import os
import pickle
import re
from pathlib import Path

import numpy as np
import pytest

from speedtronic.data import text as text_module
from speedtronic.data.text import ByteText, check_text_file, content_checksum, read_pieces, read_text
from speedtronic.data.tokenizers.chars import CharTokenizer
from speedtronic.errors import DataError


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def read(data: ByteText, start: int, count: int) -> bytes:
    out = np.empty(count, np.int64)
    data.read(start, out)
    return bytes(out.tolist())


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"gone\.txt: no such text file"):
        check_text_file(tmp_path / "gone.txt")


def test_a_missing_file_with_a_relative_path_is_said_where_it_was_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    looked = re.escape(f"gone.txt: no such text file; looked for {tmp_path / 'gone.txt'}, since a relative path")
    with pytest.raises(DataError, match=f"^{looked}.*run it in the right folder, or give the whole path"):
        check_text_file(Path("gone.txt"))


def test_a_folder_is_not_a_text_file_and_the_error_says_what_reads_folders(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"{tmp_path}: is a folder.*speedtronic data prepare {tmp_path}"):
        check_text_file(tmp_path)


def test_an_empty_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"empty\.txt: the text file is empty"):
        check_text_file(write(tmp_path / "empty.txt", b""))


def test_a_file_that_may_not_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)

    with pytest.raises(DataError, match=r"secret\.txt: no permission to read"):
        check_text_file(write(tmp_path / "secret.txt", b"x"))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the platform has no named pipes")
def test_a_pipe_is_not_a_regular_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")

    with pytest.raises(DataError, match="pipe: not a regular file"):
        check_text_file(tmp_path / "pipe")


@pytest.mark.parametrize("piece", [1, 2, 3, 5, 100])
def test_pieces_are_whole_characters_and_make_up_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int
) -> None:
    monkeypatch.setattr(text_module, "_PIECE", piece)
    content = "aé€😀\0z" * 3
    path = write(tmp_path / "t.txt", content.encode())

    assert "".join(read_text(path)) == content


@pytest.mark.parametrize("piece", [1, 2, 7, 100])
@pytest.mark.parametrize(
    ("content", "offset"),
    [
        (b"abc\xffdef", 3),
        ("€€".encode() + b"\x80", 6),
        ("aé".encode() + b"\xe2\x82", 3),
        (b"\xc3", 0),
        (b"ab\xed\xa0\x80", 2),
    ],
)
def test_invalid_utf8_is_named_with_file_and_offset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int, content: bytes, offset: int
) -> None:
    monkeypatch.setattr(text_module, "_PIECE", piece)
    path = write(tmp_path / "bad.txt", content)

    with pytest.raises(DataError, match=rf"bad\.txt: byte 0x{content[offset]:02x} at offset {offset} is not"):
        list(read_pieces(path))


def test_a_limit_that_cuts_a_character_leaves_it_out(tmp_path: Path) -> None:
    path = write(tmp_path / "t.txt", "ab€".encode())

    assert list(read_pieces(path, limit=4)) == [b"ab"]


@pytest.fixture(params=["a file that is mapped", "a file too large for it"])
def either_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "a file too large for it":
        monkeypatch.setattr(text_module, "MOST_RESIDENT", 0)


@pytest.mark.usefixtures("either_way")
def test_bytes_are_read_at_any_position(tmp_path: Path) -> None:
    content = "some “text” 😀".encode()
    data = ByteText(write(tmp_path / "t.txt", content), CharTokenizer())

    assert len(data) == len(content)
    assert [read(data, start, 3) for start in range(len(content) - 2)] == [
        content[start : start + 3] for start in range(len(content) - 2)
    ]


def test_invalid_utf8_at_the_start_is_found_before_training(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="offset 4"):
        ByteText(write(tmp_path / "t.txt", b"good\xffgood"), CharTokenizer())


@pytest.mark.usefixtures("either_way")
def test_invalid_utf8_further_on_is_found_when_it_is_reached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_module, "CHECKED_BEFORE_TRAINING", 8)
    content = "é".encode() * 10 + b"\xff" + "é".encode() * 10
    data = ByteText(write(tmp_path / "t.txt", content), CharTokenizer())

    for start in range(18):  # also those in the middle of a character
        assert read(data, start, 2) == content[start : start + 2]
    with pytest.raises(DataError, match=r"t\.txt: byte 0xff at offset 20 is not valid UTF-8"):
        read(data, 17, 4)


@pytest.mark.usefixtures("either_way")
def test_a_character_cut_off_by_the_end_of_a_long_file_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_module, "CHECKED_BEFORE_TRAINING", 4)
    data = ByteText(write(tmp_path / "t.txt", b"abcdefgh\xe2\x82"), CharTokenizer())

    assert read(data, 5, 4) == b"fgh\xe2"
    with pytest.raises(DataError, match="offset 8"):
        read(data, 6, 4)


def test_a_byte_that_the_vocabulary_cannot_hold_is_found_before_training(tmp_path: Path) -> None:
    path = write(tmp_path / "t.txt", "cafés".encode())

    with pytest.raises(DataError, match=r"t\.txt: byte 0xc3 \(id 195\) at offset 3 .* vocabulary of 128"):
        ByteText(path, CharTokenizer(128))
    assert len(ByteText(path, CharTokenizer(196))) == 6


@pytest.mark.usefixtures("either_way")
def test_a_byte_further_on_that_the_vocabulary_cannot_hold_is_found_when_reached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_module, "CHECKED_BEFORE_TRAINING", 4)
    data = ByteText(write(tmp_path / "t.txt", "abcdefé".encode()), CharTokenizer(128))

    assert read(data, 0, 6) == b"abcdef"
    with pytest.raises(DataError, match="offset 6 does not fit"):
        read(data, 4, 4)


def test_content_is_recognised_wherever_it_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_module, "CHECKED_BEFORE_TRAINING", 8)
    monkeypatch.setattr(text_module, "_SAMPLE", 4)
    first = content_checksum(write(tmp_path / "a", b"0123456789abcdefghij"))

    assert content_checksum(write(tmp_path / "b", b"0123456789abcdefghij")) == first
    assert content_checksum(write(tmp_path / "c", b"x123456789abcdefghij")) != first
    assert content_checksum(write(tmp_path / "d", b"0123456789abcdefghijk")) != first
    assert content_checksum(write(tmp_path / "e", b"0123456789abcdefXhij")) != first


@pytest.mark.usefixtures("either_way")
def test_byte_text_pickles_without_its_open_file(tmp_path: Path) -> None:
    data = ByteText(write(tmp_path / "t.txt", b"x" * 100_000), CharTokenizer())
    read(data, 0, 10)

    pickled = pickle.dumps(data)

    assert len(pickled) < 2_000
    assert read(pickle.loads(pickled), 5, 3) == b"xxx"


def test_a_text_that_is_shortened_after_it_was_opened_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path / "t.txt", b"x" * 100)
    data = ByteText(path, CharTokenizer())
    os.truncate(path, 50)

    with pytest.raises(DataError, match=r"t\.txt: the text file has 50 bytes, and had 100 at the start"):
        read(data, 60, 3)
