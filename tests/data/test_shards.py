from __future__ import annotations

import json
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from speedtronic.data.shards import ShardSet, ShardWriter, is_prepared, remove_leftovers
from speedtronic.data.tokenizers import CharTokenizer, CorpusCharTokenizer
from speedtronic.errors import DataError

TEXT = "The quick brown fox. " * 5


def make(folder: Path, text: str = TEXT, shard_tokens: int = 16) -> Path:
    tokenizer = CharTokenizer()
    with ShardWriter(folder, tokenizer=tokenizer, shard_tokens=shard_tokens) as writer:
        writer.write(tokenizer.encode_array(text))
        writer.end_document()
    return folder


def read(shards: ShardSet, start: int, count: int) -> list[int]:
    out = np.empty(count, np.int64)
    shards.read(start, out)
    return out.tolist()


@pytest.mark.parametrize("shard_tokens", [1, 7, 16, 106, 10_000])
def test_tokens_are_read_at_any_position_across_shards(tmp_path: Path, shard_tokens: int) -> None:
    shards = ShardSet(make(tmp_path / "s", shard_tokens=shard_tokens))
    tokens = [*TEXT.encode(), 0]

    assert len(shards) == len(tokens) == 106
    assert all(shard.tokens <= shard_tokens for shard in shards.shards)
    for start in range(0, 106, 5):
        assert read(shards, start, 106 - start) == tokens[start:]
        assert read(shards, start, 1) == tokens[start : start + 1]


def test_the_index_says_what_the_folder_holds(tmp_path: Path) -> None:
    tokenizer = CorpusCharTokenizer("abc")
    with ShardWriter(tmp_path / "s", tokenizer=tokenizer) as writer:
        for text in ("ab", "c"):
            writer.write(tokenizer.encode_array(text))
            writer.end_document()
        writer.source = {"origin": "here"}

    shards = ShardSet(tmp_path / "s")

    assert (shards.tokens, shards.documents, shards.source) == (5, 2, {"origin": "here"})
    assert shards.tokenizer.spec() == tokenizer.spec()
    assert shards.dtype == np.uint16
    assert shards.tokenizer.decode(read(shards, 0, 5)) == "ab\0c\0"


def test_a_large_vocabulary_takes_four_bytes_per_token(tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "s", tokenizer=CharTokenizer(70_000)) as writer:
        writer.write(np.array([69_999], np.uint32))

    shards = ShardSet(tmp_path / "s")

    assert shards.dtype == np.uint32
    assert read(shards, 0, 1) == [69_999]


def test_an_id_outside_the_tokenizers_vocabulary_is_not_written(tmp_path: Path) -> None:
    with (
        pytest.raises(DataError, match="token id 300 does not fit the tokenizer's vocabulary of 256"),
        ShardWriter(tmp_path / "s", tokenizer=CharTokenizer()) as writer,
    ):
        writer.write(np.array([1, 300], np.uint32))


def test_a_block_that_fails_leaves_no_trace(tmp_path: Path) -> None:
    def failing() -> None:
        with ShardWriter(tmp_path / "s", tokenizer=CharTokenizer()) as writer:
            writer.write(np.array([1], np.uint8))
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        failing()

    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_there_is_kept_unless_it_is_to_be_replaced(tmp_path: Path) -> None:
    make(tmp_path / "s", "old text")
    with pytest.raises(OSError, match="s"):
        make(tmp_path / "s", "new text")
    assert ShardSet(tmp_path / "s").tokens == len("old text") + 1

    with ShardWriter(tmp_path / "s", tokenizer=CharTokenizer(), replace=True) as writer:
        writer.write(np.array([1], np.uint8))

    assert ShardSet(tmp_path / "s").tokens == 1
    assert [path.name for path in tmp_path.iterdir()] == ["s"]


def test_equal_tokens_have_equal_fingerprints_wherever_they_lie(tmp_path: Path) -> None:
    first = ShardSet(make(tmp_path / "a")).fingerprint

    assert ShardSet(make(tmp_path / "b")).fingerprint == first
    assert ShardSet(make(tmp_path / "c", TEXT.upper())).fingerprint != first


def test_a_missing_folder_says_the_command_that_makes_it(tmp_path: Path) -> None:
    command = f"speedtronic data prepare --source python-stdlib --out {tmp_path / 'gone'}"

    with pytest.raises(DataError, match=re.escape(command)):
        ShardSet(tmp_path / "gone")


def edit_index(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = folder / "index.json"
    index = json.loads(path.read_text())
    change(index)
    path.write_text(json.dumps(index))


def rename_shard(name: str) -> Callable[[Path], None]:
    return lambda folder: edit_index(folder, lambda index: index["shards"][0].update(file=name))


def truncate(folder: Path) -> None:
    path = folder / "shard_00001.bin"
    path.write_bytes(path.read_bytes()[:-1])


def spoil_header(folder: Path) -> None:
    path = folder / "shard_00001.bin"
    path.write_bytes(b"X" + path.read_bytes()[1:])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "index.json").unlink(), "not a prepared folder"),
        (lambda folder: (folder / "index.json").write_text("{"), "not valid JSON"),
        (lambda folder: (folder / "index.json").write_text("[" * 200_000), "not valid JSON"),
        (lambda folder: (folder / "index.json").write_text("[]"), "not an index of"),
        (lambda folder: edit_index(folder, lambda index: index.update(version=2)), "format version 2"),
        (lambda folder: edit_index(folder, lambda index: index.update(format="other")), "not an index of"),
        (lambda folder: edit_index(folder, lambda index: index.pop("tokens")), "a field is missing or wrong"),
        (
            lambda folder: edit_index(folder, lambda index: index.update(tokens=float("inf"))),
            "a field is missing or wrong",
        ),
        (lambda folder: edit_index(folder, lambda index: index.update(shards=[3])), "a field is missing"),
        (lambda folder: edit_index(folder, lambda index: index.update(tokens=5)), "do not add up"),
        (
            lambda folder: edit_index(folder, lambda index: index["tokenizer"].update(vocab_size=9)),
            "does not match its fingerprint",
        ),
        (lambda folder: (folder / "shard_00001.bin").unlink(), r"shard_00001\.bin: the file is missing"),
        (truncate, r"shard_00001\.bin: the file has 63 bytes in place of 64"),
        (spoil_header, r"shard_00001\.bin: the header does not agree"),
        (rename_shard("../s/shard_00000.bin"), "is not a plain file name"),
        (rename_shard("/etc/hostname"), "is not a plain file name"),
        (rename_shard("..\\shard_00000.bin"), "is not a plain file name"),
        (rename_shard(".."), "is not a plain file name"),
    ],
)
def test_a_damaged_folder_is_refused(tmp_path: Path, damage: Callable[[Path], object], message: str) -> None:
    folder = make(tmp_path / "s")
    damage(folder)

    with pytest.raises(DataError, match=message) as refusal:
        ShardSet(folder)
    assert str(folder) in str(refusal.value)
    assert "speedtronic data prepare" in str(refusal.value) or "prepare the data again" in str(refusal.value)


def test_a_flipped_bit_is_found_by_verify(tmp_path: Path) -> None:
    folder = make(tmp_path / "s")
    ShardSet(folder).verify()
    content = bytearray((folder / "shard_00003.bin").read_bytes())
    content[40] ^= 1
    (folder / "shard_00003.bin").write_bytes(content)

    with pytest.raises(DataError, match=r"the content of shard_00003\.bin does not match its checksum"):
        ShardSet(folder).verify()


def test_a_folder_is_prepared_when_it_has_an_index(tmp_path: Path) -> None:
    assert not is_prepared(tmp_path)
    assert is_prepared(make(tmp_path / "s"))


def test_shards_pickle_without_their_maps(tmp_path: Path) -> None:
    shards = ShardSet(make(tmp_path / "s", TEXT * 1000, shard_tokens=10**6))
    assert read(shards, 0, 3) == list(b"The")

    pickled = pickle.dumps(shards)

    assert len(pickled) < 3_000
    assert read(pickle.loads(pickled), 4, 5) == list(b"quick")


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


@pytest.fixture(scope="module")
def dead_process() -> int:
    process = subprocess.Popen([sys.executable, "-S", "-c", ""])
    process.wait()
    return process.pid


def begin(folder: Path, monkeypatch: pytest.MonkeyPatch, *, pid: int | None = None, host: str | None = None) -> Path:
    """What a process that is writing `folder`, or was killed at it, has beside it."""
    before = set(folder.parent.iterdir())
    with monkeypatch.context() as patch:
        if pid is not None:
            patch.setattr("os.getpid", lambda: pid)
        if host is not None:
            patch.setattr("socket.gethostname", lambda: host)
        ShardWriter(folder, tokenizer=CharTokenizer()).__enter__()
    (partial,) = set(folder.parent.iterdir()) - before
    return partial


def test_leftovers_of_dead_processes_of_this_host_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dead_process: int
) -> None:
    dead = begin(tmp_path / "s", monkeypatch, pid=dead_process)
    kept = {
        begin(tmp_path / "s", monkeypatch),
        begin(tmp_path / "s", monkeypatch, pid=dead_process, host="elsewhere"),
        begin(tmp_path / "other", monkeypatch, pid=dead_process),
    }

    remove_leftovers(tmp_path / "s")

    assert not dead.exists()
    assert set(tmp_path.iterdir()) == kept


def test_leftovers_are_looked_for_where_there_is_no_folder_yet(tmp_path: Path) -> None:
    remove_leftovers(tmp_path / "none" / "s")

    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_replacement_moved_aside_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dead_process: int
) -> None:
    partial = begin(tmp_path / "s", monkeypatch, pid=dead_process)
    make(tmp_path / "s", "old text").rename(partial.with_name(partial.name.replace("partial", "old")))

    remove_leftovers(tmp_path / "s")

    assert ShardSet(tmp_path / "s").tokens == len("old text") + 1
    assert [path.name for path in tmp_path.iterdir()] == ["s"]


def test_a_replacement_that_is_interrupted_keeps_the_old_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path / "s", "old text")
    rename = Path.rename

    def interrupted(path: Path, target: Path) -> Path:
        if "partial" in path.name:
            raise KeyboardInterrupt
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", interrupted)
    with (
        pytest.raises(KeyboardInterrupt),
        ShardWriter(tmp_path / "s", tokenizer=CharTokenizer(), replace=True) as writer,
    ):
        writer.write(np.array([1], np.uint8))

    assert ShardSet(tmp_path / "s").tokens == len("old text") + 1
    assert [path.name for path in tmp_path.iterdir()] == ["s"]
