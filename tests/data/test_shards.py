from __future__ import annotations

import io
import json
import os
import pickle
import re
import shutil
import struct
import subprocess
import sys
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from speedtronic.data.file_array import array_in_file
from speedtronic.data.shard_writer import ShardWriter
from speedtronic.data.shards import ShardSet, is_prepared
from speedtronic.data.tokenizers.chars import CharTokenizer, CorpusCharTokenizer
from speedtronic.errors import DataError
from tests.support.shards import TEXT, make, read

EITHER_WAY = pytest.mark.usefixtures("either_way")


@pytest.fixture(params=["a set that is mapped", "a set too large for it"])
def either_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "a set too large for it":
        monkeypatch.setattr("speedtronic.data.shards.MOST_RESIDENT", 0)


@EITHER_WAY
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


def truncate(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:-1])


def spoil_header(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(b"X" + (folder / name).read_bytes()[1:])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "index.json").unlink(), "not a prepared folder"),
        (lambda folder: (folder / "index.json").write_text("{"), "not valid JSON"),
        (lambda folder: (folder / "index.json").write_text("[" * 200_000), "not valid JSON"),
        (lambda folder: (folder / "index.json").write_text("[]"), "not an index of"),
        (lambda folder: edit_index(folder, lambda index: index.update(version=1)), "format version 1"),
        (lambda folder: edit_index(folder, lambda index: index.update(format="other")), "not an index of"),
        (lambda folder: edit_index(folder, lambda index: index.pop("tokens")), "a field is missing or wrong"),
        (
            lambda folder: edit_index(folder, lambda index: index.update(tokens=float("inf"))),
            "a field is missing or wrong",
        ),
        (lambda folder: edit_index(folder, lambda index: index.update(shards=[3])), "a field is missing"),
        (lambda folder: edit_index(folder, lambda index: index.update(tokens=5)), "do not add up"),
        (lambda folder: edit_index(folder, lambda index: index.update(documents=5)), "documents do not add up"),
        (lambda folder: (folder / "tokenizer_spec.json").unlink(), r"tokenizer_spec\.json: the file is missing"),
        (lambda folder: (folder / "shard_00001.bin").unlink(), r"shard_00001\.bin: the file is missing"),
        (lambda folder: (folder / "shard_00001.idx").unlink(), r"shard_00001\.idx: the file is missing"),
        (truncate("shard_00001.bin"), r"shard_00001\.bin: the file has 63 bytes in place of 64"),
        (truncate("shard_00006.idx"), r"shard_00006\.idx: the file has 39 bytes in place of 40"),
        (spoil_header("shard_00001.bin"), r"shard_00001\.bin: the header does not agree"),
        (spoil_header("shard_00001.idx"), r"shard_00001\.idx: the header does not agree"),
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


def test_a_tokenizer_that_has_been_changed_is_refused(tmp_path: Path) -> None:
    folder = make(tmp_path / "s")
    spec = folder / "tokenizer_spec.json"
    spec.write_text(spec.read_text().replace("256", "9"))

    with pytest.raises(DataError, match=r"tokenizer_spec\.json: the tokenizer does not match its fingerprint"):
        _ = ShardSet(folder).tokenizer


@pytest.mark.parametrize("vocab_size", [120, 257])
def test_a_vocabulary_that_is_not_the_tokenizers_is_refused(tmp_path: Path, vocab_size: int) -> None:
    folder = make(tmp_path / "s")
    edit_index(folder, lambda index: index.update(vocab_size=vocab_size))

    with pytest.raises(DataError, match=rf"index\.json: a vocabulary of {vocab_size}, but its tokenizer has 256"):
        _ = ShardSet(folder).tokenizer


@pytest.mark.parametrize("name", ["index.json", "shard_00001.bin", "shard_00001.idx", "tokenizer_spec.json"])
def test_a_file_that_may_not_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    folder = make(tmp_path / "s")
    opened = io.open

    def as_nobody(path: Any, *rest: Any, **options: Any) -> Any:
        if str(path).endswith(name):
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, *rest, **options)

    monkeypatch.setattr(io, "open", as_nobody)  # as `Path` opens files

    with pytest.raises(DataError, match=rf"{re.escape(name)}: cannot be read: Permission denied"):
        _ = ShardSet(folder).tokenizer


def test_a_place_that_the_system_refuses_is_named() -> None:
    with pytest.raises(DataError, match="xxx: cannot be read: File name too long"):
        ShardSet("x" * 300)


def test_a_folder_of_text_says_the_command_that_prepares_it(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=re.escape(f"`speedtronic data prepare {tmp_path} --out DIR`")):
        ShardSet(tmp_path)


@pytest.mark.parametrize("name", ["shard_00003.bin", "shard_00006.idx"])
def test_a_flipped_bit_is_found_by_verify(tmp_path: Path, name: str) -> None:
    folder = make(tmp_path / "s")
    ShardSet(folder).verify()
    content = bytearray((folder / name).read_bytes())
    content[35] ^= 1
    (folder / name).write_bytes(content)

    with pytest.raises(DataError, match=rf"the content of {re.escape(name)} does not match its checksum"):
        ShardSet(folder).verify()


@EITHER_WAY
@pytest.mark.parametrize("damage", [lambda path: path.write_bytes(path.read_bytes()[:-2]), Path.unlink])
def test_a_file_that_is_damaged_after_the_set_was_opened_is_an_error(
    tmp_path: Path, damage: Callable[[Path], object]
) -> None:
    shards = ShardSet(make(tmp_path / "s"))
    damage(tmp_path / "s" / "shard_00002.bin")

    with pytest.raises(DataError, match=r"shard_00002\.bin: (the file has 62 bytes in place of 64|cannot be read)"):
        read(shards, 0, 106)


# Empty documents, documents as long as a shard, and ones that span several.
LENGTHS = [3, 1, 1, 4, 16, 1, 40, 2, 7]


def documents_of(folder: Path, lengths: Sequence[int], shard_tokens: int, *, unfinished: int = 0) -> ShardSet:
    with ShardWriter(folder, tokenizer=CharTokenizer(), shard_tokens=shard_tokens) as writer:
        for length in lengths:
            writer.write(np.full(length - 1, 7, np.uint8))
            writer.end_document()
        writer.write(np.full(unfinished, 7, np.uint8))
    return ShardSet(folder)


@EITHER_WAY
@pytest.mark.parametrize("shard_tokens", [1, 2, 4, 8, 16, 75, 1000])
@pytest.mark.parametrize("unfinished", [0, 5])
def test_the_starts_of_documents_are_known_in_any_range(tmp_path: Path, shard_tokens: int, unfinished: int) -> None:
    shards = documents_of(tmp_path / "s", LENGTHS, shard_tokens, unfinished=unfinished)
    total = sum(LENGTHS) + unfinished
    starts = [start for start in (0, *np.cumsum(LENGTHS).tolist()) if start < total]

    for start in range(total):
        for stop in (start, start + 1, start + 2, start + 9, total, total + 4):
            expected = [position for position in starts if start <= position < stop]
            found = shards.document_starts(start, stop)
            assert found.dtype == np.int64
            assert found.tolist() == expected, (start, stop)


@EITHER_WAY
@pytest.mark.parametrize("shard_tokens", [1, 4, 1000])
def test_the_lengths_of_documents_are_known(tmp_path: Path, shard_tokens: int) -> None:
    shards = documents_of(tmp_path / "s", LENGTHS, shard_tokens, unfinished=5)

    assert np.concatenate(list(shards.document_lengths())).tolist() == LENGTHS
    assert shards.documents == len(LENGTHS)


@EITHER_WAY
def test_a_set_of_one_unfinished_document_begins_once(tmp_path: Path) -> None:
    shards = documents_of(tmp_path / "s", [], 4, unfinished=9)

    assert shards.document_starts(0, 9).tolist() == [0]
    assert shards.document_starts(1, 9).tolist() == []


def test_a_folder_is_prepared_when_it_has_an_index(tmp_path: Path) -> None:
    assert not is_prepared(tmp_path)
    assert is_prepared(make(tmp_path / "s"))


@EITHER_WAY
def test_shards_pickle_without_their_open_files(tmp_path: Path) -> None:
    shards = ShardSet(make(tmp_path / "s", TEXT * 1000, shard_tokens=10**6))
    assert read(shards, 0, 3) == list(b"The")

    pickled = pickle.dumps(shards)

    assert len(pickled) < 3_000
    assert read(pickle.loads(pickled), 4, 5) == list(b"quick")


@pytest.mark.parametrize("largest_map", [0, 2**20])
def test_files_are_closed_before_there_are_too_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, largest_map: int
) -> None:
    monkeypatch.setattr("speedtronic.data.shards.MOST_RESIDENT", largest_map)
    monkeypatch.setattr("speedtronic.data.shards._MOST_OPEN", 5)
    opened: list[weakref.ref[Any]] = []

    def counted(*args: Any, **options: Any) -> Any:
        opened.append(weakref.ref(array := array_in_file(*args, **options)))
        return array

    monkeypatch.setattr("speedtronic.data.shards.array_in_file", counted)
    shards = ShardSet(make(tmp_path / "s", shard_tokens=1))

    assert read(shards, 0, 106) == [*TEXT.encode(), 0]
    assert len(opened) == 106
    assert sum(reference() is not None for reference in opened) <= 5


# What a process has read and how much of files it holds, in bytes; and a set of shards whose files are all hole.
MEASURES = """
import json, os, sys
from pathlib import Path
import numpy as np
from speedtronic.data import shards as module
from speedtronic.data.shards import ShardSet

from speedtronic.data.text import ByteText
from speedtronic.data.tokenizers.chars import CharTokenizer

def read_bytes():
    return int(Path("/proc/self/io").read_text().split("rchar: ")[1].split()[0])

def resident(field="RssFile"):
    return int(Path("/proc/self/status").read_text().split(field + ":")[1].split()[0]) * 1024

row = np.empty(129, np.int64)
"""


def hollow(folder: Path, shards: int, shard_tokens: int) -> Path:
    """A set without a single document, whose files take no room on the disk."""
    make(folder, "", shard_tokens=shard_tokens)
    empty = "0" * 64

    def change(index: dict[str, Any]) -> None:
        entries = [
            {
                "file": f"shard_{number:05d}.bin",
                "tokens": shard_tokens,
                "sha256": empty,
                "documents_file": f"shard_{number:05d}.idx",
                "documents": 0,
                "documents_sha256": empty,
            }
            for number in range(shards)
        ]
        index.update(tokens=shards * shard_tokens, documents=0, shards=entries)

    edit_index(folder, change)
    for number in range(shards):
        tokens = folder / f"shard_{number:05d}.bin"
        tokens.write_bytes(struct.pack("<8sIIQ8x", b"SPDTRNC\0", 2, 2, shard_tokens))
        os.truncate(tokens, 32 + 2 * shard_tokens)
        tokens.with_suffix(".idx").write_bytes(struct.pack("<8sIIQ8x", b"SPDTDOC\0", 2, 8, 0))
    return folder


def measured(code: str, folder: Path) -> Any:
    found = subprocess.run(
        [sys.executable, "-c", MEASURES + code, str(folder)], check=True, capture_output=True, text=True
    )
    return json.loads(found.stdout)


on_linux = pytest.mark.skipif(sys.platform != "linux", reason="/proc tells what is measured")


@on_linux
def test_any_sample_costs_the_same_number_of_bytes(tmp_path: Path) -> None:
    code = """
costs = []
for sample in (1, 10**6):
    shards = ShardSet(sys.argv[1])
    before = read_bytes(), resident()
    shards.read(sample * 128, row)
    costs.append([read_bytes() - before[0], resident() - before[1]])
print(json.dumps(costs))
"""
    first, millionth = measured(code, hollow(tmp_path / "s", 5, 2**25))

    assert millionth[0] <= first[0]
    assert millionth[1] <= first[1] <= 256 * 2**10


@on_linux
def test_opening_a_thousand_shards_and_reading_a_sample_reads_headers_only(tmp_path: Path) -> None:
    code = """
before = read_bytes(), resident()
shards = ShardSet(sys.argv[1])
shards.read(500 * 2**20, row)
print(json.dumps([read_bytes() - before[0], resident() - before[1]]))
"""
    folder = hollow(tmp_path / "s", 1000, 2**20)
    read, grown = measured(code, folder)

    assert read <= (folder / "index.json").stat().st_size + 2 * 1000 * 32 + 4096
    assert grown <= 2**20


READ_ALL_OVER = """
import speedtronic.data.text as text_module
module.MOST_RESIDENT = text_module.MOST_RESIDENT = {limit} * 2**20
path = Path(sys.argv[1])
tokens = ShardSet(path) if path.is_dir() else ByteText(path, CharTokenizer())
step = {step}
for start in {order}:
    tokens.read(start * step, row)
print(resident("VmHWM"))
"""


def grown(path: Path, limit: int, step: int, order: str) -> int:
    """By how many bytes the most memory of a process that reads at multiples of `step` exceeds that of one read."""
    all_over, once = (
        measured(READ_ALL_OVER.format(limit=limit, step=step, order=which), path) for which in (order, "range(1)")
    )
    return int(all_over - once)


@on_linux
@pytest.mark.parametrize("order", ["range(2500)", "np.random.default_rng(0).permutation(2500).tolist()"])
def test_memory_does_not_grow_with_what_is_read(tmp_path: Path, order: str) -> None:
    folder = hollow(tmp_path / "s", 5, 2**24)

    assert grown(folder, 32, 2**15, order) <= 40 * 2**20  # of the 160 MB that were read


def filled(folder: Path, shards: int, shard_tokens: int) -> Path:
    """A set as `hollow` makes it, whose tokens take room on the disk: a kernel keeps them in large pieces."""
    hollow(folder, shards, shard_tokens)
    tokens = np.full(2**20, 7, np.uint16).tobytes()
    for path in folder.glob("*.bin"):
        with path.open("r+b") as file:
            file.seek(32)
            for _ in range(shard_tokens // 2**20):
                file.write(tokens)
    return folder


@on_linux
def test_memory_does_not_grow_where_one_byte_costs_a_megabyte(tmp_path: Path) -> None:
    folder = filled(tmp_path / "s", 3, 2**24)

    assert grown(folder, 16, 2**19, "range(95)") <= 16 * 2**20  # of 96 MiB, one row in each


@on_linux
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["shards", "text"])
def test_1200_mib_that_are_read_thinly_take_at_most_256(tmp_path: Path, kind: str) -> None:
    if kind == "shards":
        source = filled(tmp_path / "s", 3, 200 * 2**20)
        step = 2**19
    else:
        source = tmp_path / "text.txt"
        with source.open("wb") as file:
            for _ in range(1200):
                file.write(b"a" * 2**20)
        step = 2**20
    try:
        assert grown(source, 256, step, "np.random.default_rng(0).permutation(1199).tolist()") <= 256 * 2**20
    finally:
        shutil.rmtree(tmp_path)  # pytest would keep it


@on_linux
@pytest.mark.slow
def test_memory_does_not_grow_with_a_shard_of_gigabytes(tmp_path: Path) -> None:
    folder = hollow(tmp_path / "s", 1, 2**31)

    assert grown(folder, 256, 2**15, "range(len(tokens) // step)") <= 270 * 2**20


# ---------------------------------------------------------------------- targets


@pytest.fixture
def with_targets(tmp_path: Path) -> Path:
    with ShardWriter(tmp_path / "t", tokenizer=CharTokenizer(), shard_tokens=4, with_targets=True) as writer:
        writer.append(np.array([5, 6, 7, 0, 8, 0], np.uint8), np.array([4, 6]), np.array([0, 1, 1, 0, 0, 1], bool))
        writer.write(np.array([9], np.uint8))
    return tmp_path / "t"


def test_targets_are_read_across_shards(with_targets: Path) -> None:
    shards = ShardSet(with_targets)
    found = np.empty(5, np.bool_)
    shards.read_targets(2, found)

    assert shards.has_targets
    assert found.tolist() == [True, False, False, True, True]
    assert sorted(path.name for path in with_targets.glob("*.tgt")) == ["shard_00000.tgt", "shard_00001.tgt"]
    shards.verify()


def test_shards_without_targets_have_all_tokens_as_targets_and_the_old_format(tmp_path: Path) -> None:
    shards = ShardSet(make(tmp_path / "s"))
    found = np.zeros(3, np.bool_)
    shards.read_targets(0, found)

    assert found.all()
    assert not shards.has_targets
    index = json.loads((tmp_path / "s" / "index.json").read_bytes())
    assert index["version"] == 2
    assert not any("targets_file" in shard for shard in index["shards"])


def test_an_older_reader_refuses_shards_with_targets(with_targets: Path) -> None:
    assert json.loads((with_targets / "index.json").read_bytes())["version"] == 3


def test_the_fingerprint_tells_other_targets(with_targets: Path, tmp_path: Path) -> None:
    before = ShardSet(with_targets).fingerprint
    with ShardWriter(tmp_path / "u", tokenizer=CharTokenizer(), shard_tokens=4, with_targets=True) as writer:
        writer.append(np.array([5, 6, 7, 0, 8, 0], np.uint8), np.array([4, 6]))
        writer.write(np.array([9], np.uint8))
    assert ShardSet(tmp_path / "u").fingerprint != before


@pytest.mark.parametrize("damage", ["missing", "short", "changed", "unnamed"])
def test_damaged_targets_are_named(with_targets: Path, damage: str) -> None:
    path = with_targets / "shard_00001.tgt"
    content = bytearray(path.read_bytes())
    content[32] ^= 1
    reason = {
        "missing": "the file is missing",
        "short": "has 34 bytes in place of 35",
        "changed": r"the content of shard_00001\.tgt does not match its checksum",
        "unnamed": r"its version does not agree with the files of shard_00001\.bin",
    }[damage]
    match damage:
        case "missing":
            path.unlink()
        case "short":
            path.write_bytes(content[:-1])
        case "changed":
            path.write_bytes(content)
        case "unnamed":
            index = json.loads((with_targets / "index.json").read_bytes())
            del index["shards"][1]["targets_file"]
            (with_targets / "index.json").write_text(json.dumps(index))

    with pytest.raises(DataError, match=reason):
        ShardSet(with_targets).verify()


def test_targets_need_a_set_for_them(tmp_path: Path) -> None:
    with (
        pytest.raises(ValueError, match="with_targets"),
        ShardWriter(tmp_path / "s", tokenizer=CharTokenizer()) as writer,
    ):
        writer.append(np.array([5], np.uint8), np.array([], np.int64), np.array([False]))
