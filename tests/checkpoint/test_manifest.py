from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from speedtronic.checkpoint.files import FileRecord, FileSystem
from speedtronic.checkpoint.manifest import (
    FILES,
    MANIFEST,
    Manifest,
    NewerFormatError,
    Pointer,
    read_manifest,
    read_pointer,
    seal,
)
from speedtronic.errors import CheckpointError

GOOD = Manifest(
    step=500,
    sequence=1,
    run_id="0123456789abcdef",
    time="2030-01-01T00:00:00.000+00:00",
    loss=2.5,
    config_sha256=None,
    versions={"torch": "2.13.0"},
    files={name: FileRecord(10, "ab") for name in FILES},
)


def read(folder: Path) -> Manifest:
    return read_manifest(FileSystem(), folder)


def test_a_manifest_comes_back(tmp_path: Path) -> None:
    (tmp_path / MANIFEST).write_bytes(GOOD.to_bytes())
    assert read(tmp_path) == GOOD


def test_a_pointer_comes_back(tmp_path: Path) -> None:
    pointer = Pointer("step_000000000500", 500, "0123456789abcdef")
    (tmp_path / "latest.json").write_bytes(pointer.to_bytes())
    assert read_pointer(FileSystem(), tmp_path / "latest.json") == pointer


def test_no_flipped_bit_goes_unnoticed(tmp_path: Path) -> None:
    good = GOOD.to_bytes()
    for position in range(len(good)):
        bad = bytearray(good)
        bad[position] ^= 1
        (tmp_path / MANIFEST).write_bytes(bad)
        try:
            assert read(tmp_path) == GOOD, "a change of what it says must be an error"
        except CheckpointError:
            continue


def test_missing_truncated_and_foreign_files_are_errors(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is missing"):
        read(tmp_path)
    for content in (b"", GOOD.to_bytes()[:-20], b"[]", b"\xff", b'{"step": 1}', b"[" * 100_000):
        (tmp_path / MANIFEST).write_bytes(content)
        with pytest.raises(CheckpointError, match="damaged"):
            read(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        {"step": "500"},
        {"step": True},
        {"sequence": None},
        {"run_id": "../../etc"},
        {"run_id": 5},
        {"time": "yesterday"},
        {"time": "2030-01-01T00:00:00"},
        {"time": None},
        {"loss": "x"},
        {"loss": True},
        {"config_sha256": 5},
        {"versions": "2.0"},
        {"files": {name: FileRecord("ten", "ab") for name in FILES}},  # type: ignore[arg-type]
        {"files": {name: FileRecord(10, None) for name in FILES}},  # type: ignore[arg-type]
        {"files": {"../evil": FileRecord(1, "a")}},
    ],
    ids=str,
)
def test_a_sealed_manifest_of_the_wrong_form_is_an_error(tmp_path: Path, change: dict[str, Any]) -> None:
    (tmp_path / MANIFEST).write_bytes(dataclasses.replace(GOOD, **change).to_bytes())
    with pytest.raises(CheckpointError, match="not a manifest"):
        read(tmp_path)


def test_missing_and_unknown_fields_are_errors(tmp_path: Path) -> None:
    fields = json.loads(GOOD.to_bytes())
    del fields["seal"]
    for changed in ({**fields, "extra": 1}, {key: fields[key] for key in fields if key != "step"}):
        (tmp_path / MANIFEST).write_bytes(seal(changed))
        with pytest.raises(CheckpointError, match="not a manifest"):
            read(tmp_path)


def test_a_newer_format_is_told_apart(tmp_path: Path) -> None:
    (tmp_path / MANIFEST).write_bytes(seal({"format": 99, "what": "ever"}))
    with pytest.raises(NewerFormatError, match="format 99.*update it"):
        read(tmp_path)


def test_a_manifest_of_an_absurd_size_is_not_read(tmp_path: Path) -> None:
    (tmp_path / MANIFEST).write_bytes(b" " * (2**20 + 1))
    with pytest.raises(CheckpointError, match="larger than"):
        read(tmp_path)


@pytest.mark.parametrize("change", [{"checkpoint": 5}, {"step": "x"}, {"run_id": None}], ids=str)
def test_a_sealed_pointer_of_the_wrong_form_is_an_error(tmp_path: Path, change: dict[str, Any]) -> None:
    pointer = dataclasses.replace(Pointer("step_000000000500", 500, "0123456789abcdef"), **change)
    (tmp_path / "latest.json").write_bytes(pointer.to_bytes())
    with pytest.raises(CheckpointError, match="does not name a checkpoint"):
        read_pointer(FileSystem(), tmp_path / "latest.json")
