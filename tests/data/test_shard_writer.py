from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from speedtronic.data.shard_writer import ShardFiles, ShardWriter
from speedtronic.data.shards import ShardSet
from speedtronic.data.tokenizers.chars import CharTokenizer
from speedtronic.errors import DataError
from tests.support.shards import TEXT, make, read

FILES = {
    "index.json": b"""{
 "format": "speedtronic-token-shards",
 "version": 2,
 "dtype": "uint16",
 "tokens": 7,
 "documents": 2,
 "vocab_size": 256,
 "tokenizer_fingerprint": "f766c7ab9d4dead69e79d6cfbdce73a0c0f058d226f62e0a2a6ef942c9ca24db",
 "source": {
  "origin": "h\\u00e9llo",
  "skipped": 0,
  "rate": 0.5,
  "names": [
   "a"
  ],
  "none": null
 },
 "shards": [
  {
   "file": "shard_00000.bin",
   "tokens": 4,
   "sha256": "1b8e648af1f8261d36d6722c6bc6df9b34ae425ac6b2566562c7716c50953248",
   "documents_file": "shard_00000.idx",
   "documents": 1,
   "documents_sha256": "35be322d094f9d154a8aba4733b8497f180353bd7ae7b0a15f90b586b549f28b"
  },
  {
   "file": "shard_00001.bin",
   "tokens": 3,
   "sha256": "b2814cdb33c24c1b581aa9e567c7139f5302ee29f7d3b5abb23b48b18f0dfecb",
   "documents_file": "shard_00001.idx",
   "documents": 1,
   "documents_sha256": "35be322d094f9d154a8aba4733b8497f180353bd7ae7b0a15f90b586b549f28b"
  }
 ]
}
""",
    "shard_00000.bin": bytes.fromhex(
        "53504454524e4300020000000200000004000000000000000000000000000000610062000000c300"
    ),
    "shard_00000.idx": bytes.fromhex(
        "53504454444f43000200000008000000010000000000000000000000000000000300000000000000"
    ),
    "shard_00001.bin": bytes.fromhex("53504454524e4300020000000200000003000000000000000000000000000000")
    + bytes.fromhex("a70064000000"),
    "shard_00001.idx": bytes.fromhex(
        "53504454444f43000200000008000000010000000000000000000000000000000300000000000000"
    ),
    "tokenizer_spec.json": b"""{
 "type": "bytes",
 "vocab_size": 256
}
""",
}


def test_the_files_of_a_folder_are_these_bytes(tmp_path: Path) -> None:
    """Folders of older versions must stay readable, so the bytes never change."""
    with ShardWriter(tmp_path / "s", tokenizer=CharTokenizer(), shard_tokens=4) as writer:
        for text in ("ab", "çd"):
            writer.write(CharTokenizer().encode_array(text))
            writer.end_document()
        writer.source = {"origin": "héllo", "skipped": 0, "rate": 0.5, "names": ["a"], "none": None}

    assert {path.name: path.read_bytes() for path in (tmp_path / "s").iterdir()} == FILES


def test_an_id_outside_the_tokenizers_vocabulary_is_not_written(tmp_path: Path) -> None:
    with (
        pytest.raises(DataError, match="token id 300 does not fit the tokenizer's vocabulary of 256"),
        ShardWriter(tmp_path / "s", tokenizer=CharTokenizer()) as writer,
    ):
        writer.write(np.array([1, 300], np.uint32))


def test_a_large_vocabulary_takes_four_bytes_per_token(tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "s", tokenizer=CharTokenizer(70_000)) as writer:
        writer.write(np.array([69_999], np.uint32))

    shards = ShardSet(tmp_path / "s")

    assert shards.dtype == np.uint32
    assert read(shards, 0, 1) == [69_999]


def test_tokens_of_any_width_are_written(tmp_path: Path) -> None:
    arrays: list[npt.NDArray[Any]] = [
        np.array([1], np.uint8),
        np.array([2], np.uint32),
        np.array([], np.uint8),
    ]
    with ShardWriter(tmp_path / "s", tokenizer=CharTokenizer()) as writer:
        for array in arrays:
            writer.write(array)

    assert read(ShardSet(tmp_path / "s"), 0, 2) == [1, 2]


def test_a_shard_of_no_tokens_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="at least 1 token, not 0"):
        ShardWriter(tmp_path / "s", tokenizer=CharTokenizer(), shard_tokens=0)


def test_a_block_that_fails_leaves_no_trace(tmp_path: Path) -> None:
    def failing() -> None:
        with ShardWriter(tmp_path / "s", tokenizer=CharTokenizer()) as writer:
            writer.write(np.array([1], np.uint8))
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        failing()

    assert list(tmp_path.iterdir()) == []


def test_an_existing_folder_is_kept_unless_it_is_to_be_replaced(tmp_path: Path) -> None:
    make(tmp_path / "s", "old text")
    with pytest.raises(OSError, match="s"):
        make(tmp_path / "s", "new text")
    assert ShardSet(tmp_path / "s").tokens == len("old text") + 1

    with ShardWriter(tmp_path / "s", tokenizer=CharTokenizer(), replace=True) as writer:
        writer.write(np.array([1], np.uint8))

    assert ShardSet(tmp_path / "s").tokens == 1
    assert [path.name for path in tmp_path.iterdir()] == ["s"]


@pytest.mark.parametrize("cut", [0, 1, 5, 16, 17, 50])
def test_writing_continues_from_any_saved_state_to_the_same_files(tmp_path: Path, cut: int) -> None:
    tokens = np.frombuffer((TEXT * 2).encode(), np.uint8)

    def write(files: ShardFiles, part: npt.NDArray[np.uint8]) -> None:
        for token in part:
            files.write(np.array([token]))
            if token == ord("."):
                files.end_document()

    contents = []
    for name, left in (("whole", None), ("resumed", cut)):
        folder = tmp_path / name
        folder.mkdir()
        files = ShardFiles(folder, tokenizer=CharTokenizer(), shard_tokens=16)
        if left is not None:
            write(files, tokens[:left])
            state = json.loads(json.dumps(files.state_dict()))
            write(files, tokens[left : left + 40])  # lost, as after a kill
            files.close()
            files = ShardFiles(folder, tokenizer=CharTokenizer(), shard_tokens=16, state=state)
        write(files, tokens[left or 0 :])
        files.finish({})
        contents.append({path.name: path.read_bytes() for path in folder.iterdir()})

    assert contents[0] == contents[1]
    ShardSet(tmp_path / "resumed").verify()


def test_writing_does_not_continue_with_shortened_files(tmp_path: Path) -> None:
    files = ShardFiles(tmp_path, tokenizer=CharTokenizer())
    files.write(np.ones(100, np.uint8))
    state = files.state_dict()
    files.close()
    os.truncate(tmp_path / "shard_00000.bin", 99)

    with pytest.raises(OSError, match="shorter than it was"):
        ShardFiles(tmp_path, tokenizer=CharTokenizer(), state=state)


@pytest.mark.parametrize("name", ["shard_00001.bin", "shard_00000.idx"])
@pytest.mark.parametrize("damage", [Path.unlink, lambda path: os.truncate(path, 33)])
def test_writing_does_not_continue_without_a_finished_shard(
    tmp_path: Path, name: str, damage: Callable[[Path], object]
) -> None:
    files = ShardFiles(tmp_path, tokenizer=CharTokenizer(), shard_tokens=50)
    for _ in range(10):
        files.write(np.ones(9, np.uint8))
        files.end_document()
    state = files.state_dict()
    files.close()
    assert state["open"] is None  # nothing else would be missed
    damage(tmp_path / name)

    with pytest.raises(OSError, match=re.escape(name)):
        ShardFiles(tmp_path, tokenizer=CharTokenizer(), shard_tokens=50, state=state)


def test_a_replacement_that_is_interrupted_keeps_the_old_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path / "s", "old text")
    replace = os.replace

    def interrupted(path: Path, target: Path) -> None:
        if target.name == "s":
            monkeypatch.undo()
            raise KeyboardInterrupt
        replace(path, target)

    monkeypatch.setattr("os.replace", interrupted)
    with (
        pytest.raises(KeyboardInterrupt),
        ShardWriter(tmp_path / "s", tokenizer=CharTokenizer(), replace=True) as writer,
    ):
        writer.write(np.array([1], np.uint8))

    assert ShardSet(tmp_path / "s").tokens == len("old text") + 1
    assert [path.name for path in tmp_path.iterdir()] == ["s"]
