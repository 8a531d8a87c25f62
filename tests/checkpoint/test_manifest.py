from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

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
from speedtronic.durable.files import FileRecord, FileSystem
from speedtronic.errors import CheckpointError

GOOD = Manifest(
    step=500,
    sequence=1,
    run_id="0123456789abcdef",
    time="2030-01-01T00:00:00.000+00:00",
    loss=2.5,
    eval_loss=2.75,
    config_sha256=None,
    versions={"torch": "2.13.0"},
    files={name: FileRecord(10, "ab") for name in FILES},
)


MANIFEST_BYTES = b"""{
  "format": 1,
  "step": 500,
  "sequence": 1,
  "run_id": "0123456789abcdef",
  "time": "2030-01-01T00:00:00.000+00:00",
  "loss": 2.5,
  "eval_loss": 2.75,
  "config_sha256": null,
  "versions": {
    "torch": "2.13.0"
  },
  "files": {
    "model.safetensors": {
      "size": 10,
      "sha256": "ab"
    },
    "state.safetensors": {
      "size": 10,
      "sha256": "ab"
    },
    "state.json": {
      "size": 10,
      "sha256": "ab"
    }
  },
  "seal": "34922817a3d4125780c2d36037c79152a3d2d33b613f8b3fcf0b54d1e08d3f19"
}
"""
POINTER_BYTES = b"""{
  "format": 1,
  "checkpoint": "step_000000000500",
  "step": 500,
  "run_id": "0123456789abcdef",
  "seal": "26d55a9351409d64eb5511c74f5b248df6f6e986ad1cce25e3b9709987f836b7"
}
"""


def read(folder: Path) -> Manifest:
    return read_manifest(FileSystem(), folder)


def unsealed() -> dict[str, Any]:
    fields: dict[str, Any] = json.loads(GOOD.to_bytes())
    del fields["seal"]
    return fields


def write_sealed(path: Path, fields: dict[str, Any]) -> None:
    """With the right checksum, also of what our own writer refuses."""
    checksum = hashlib.sha256(json.dumps(fields, sort_keys=True).encode("ascii")).hexdigest()
    path.write_text(json.dumps({**fields, "seal": checksum}), encoding="ascii")


def test_a_manifest_comes_back(tmp_path: Path) -> None:
    assert GOOD.to_bytes() == MANIFEST_BYTES
    (tmp_path / MANIFEST).write_bytes(GOOD.to_bytes())
    assert read(tmp_path) == GOOD


def test_a_pointer_comes_back(tmp_path: Path) -> None:
    pointer = Pointer(checkpoint="step_000000000500", step=500, run_id="0123456789abcdef")
    assert pointer.to_bytes() == POINTER_BYTES
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
        {"step": 500.5},
        {"step": True},
        {"sequence": None},
        {"run_id": "../../etc"},
        {"run_id": 5},
        {"time": "yesterday"},
        {"time": "2030-01-01T00:00:00"},
        {"time": None},
        {"loss": "x"},
        {"loss": True},
        {"eval_loss": "x"},
        {"step": -1},
        {"step": 2**63},
        {"sequence": -1},
        {"sequence": 10**4000},
        {"versions": {"torch": 2}},
        {"config_sha256": 5},
        {"versions": "2.0"},
        {"files": {name: {"size": "ten", "sha256": "ab"} for name in FILES}},
        {"files": {name: {"size": 10, "sha256": None} for name in FILES}},
        {"files": {"../evil": {"size": 1, "sha256": "a"}}},
    ],
    ids=str,
)
def test_a_sealed_manifest_of_the_wrong_form_is_an_error(tmp_path: Path, change: dict[str, Any]) -> None:
    write_sealed(tmp_path / MANIFEST, {**unsealed(), **change})
    with pytest.raises(CheckpointError, match="not a manifest"):
        read(tmp_path)


def test_missing_and_unknown_fields_are_errors(tmp_path: Path) -> None:
    fields = unsealed()
    for changed in ({**fields, "extra": 1}, {key: fields[key] for key in fields if key != "step"}):
        (tmp_path / MANIFEST).write_bytes(seal(changed))
        with pytest.raises(CheckpointError, match="not a manifest"):
            read(tmp_path)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
@pytest.mark.parametrize("name", ["loss", "eval_loss"])
def test_a_sealed_loss_that_is_not_finite_is_an_error(tmp_path: Path, name: str, number: str) -> None:
    write_sealed(tmp_path / MANIFEST, {**unsealed(), name: float(number)})
    with pytest.raises(CheckpointError, match=rf"not a manifest: {name}: .* finite number$"):
        read(tmp_path)


@pytest.mark.parametrize("depth", [300, 900, 960, 980, 990, 1000, 5000])
def test_values_nested_to_any_depth_are_an_error(tmp_path: Path, depth: int) -> None:
    """Python reads deeper JSON than it writes, and the checksum is taken of what is written."""
    text = json.dumps({**unsealed(), "versions": 0})
    (tmp_path / MANIFEST).write_text(text.replace('"versions": 0', f'"versions": {"[" * depth}{"]" * depth}'))
    with pytest.raises(CheckpointError, match="damaged"):
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
    good = {"format": 1, "checkpoint": "step_000000000500", "step": 500, "run_id": "0123456789abcdef"}
    (tmp_path / "latest.json").write_bytes(seal({**good, **change}))
    with pytest.raises(CheckpointError, match="does not name a checkpoint"):
        read_pointer(FileSystem(), tmp_path / "latest.json")
