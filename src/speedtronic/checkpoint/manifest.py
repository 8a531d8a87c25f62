"""The manifest of a checkpoint, and `latest.json`: small sealed JSON files.

A seal is the SHA-256 of the file's own contents, so that a flipped bit in a run id or a step is noticed as
surely as one in a tensor.
"""

from __future__ import annotations

import hashlib
import json
import math
import platform
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from types import NoneType
from typing import Any

import torch

import speedtronic
from speedtronic.durable.files import DamagedFileError, FileRecord, FileSystem, read_small
from speedtronic.errors import CheckpointError

FORMAT = 1
MANIFEST = "manifest.json"
MODEL_TENSORS = "model.safetensors"
STATE_TENSORS = "state.safetensors"
STATE_TREE = "state.json"
FILES = (MODEL_TENSORS, STATE_TENSORS, STATE_TREE)

_LARGEST_MANIFEST = 2**20  # bytes
_COUNTS = range(2**63)
_MANIFEST_TYPES: Mapping[str, tuple[type, ...]] = {
    "step": (int,),
    "sequence": (int,),
    "run_id": (str,),
    "time": (str,),
    "loss": (float, NoneType),
    "eval_loss": (float, NoneType),
    "config_sha256": (str, NoneType),
    "versions": (dict,),
}
_RECORD_TYPES: Mapping[str, tuple[type, ...]] = {"size": (int,), "sha256": (str,)}
_POINTER_TYPES: Mapping[str, tuple[type, ...]] = {"checkpoint": (str,), "step": (int,), "run_id": (str,)}
_RUN_ID = re.compile("[0-9a-f]{8,64}")


class NewerFormatError(CheckpointError):
    """The checkpoint was written by a newer Speedtronic than this one."""


class UnreadableError(CheckpointError):
    """The disk would not let it be read; it may be sound, and readable the next time."""


@contextmanager
def damage_is_checkpoint_error() -> Iterator[None]:
    """Report a damaged file as a CheckpointError, which is what callers of this room expect."""
    try:
        yield
    except DamagedFileError as error:
        raise CheckpointError(str(error)) from error


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Report whatever goes wrong with a file or folder as a CheckpointError that names it."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (CheckpointError, DamagedFileError) as error:
        raise CheckpointError(f"{path}: {error}") from error


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a checkpoint is, and how to tell that it is whole.

    Attributes:
        step: the global step it was saved at.
        sequence: a count that grows with every save of a run; the order of its checkpoints.
        run_id: hex; the run it belongs to.
        time: when it was written, UTC, ISO 8601.
        loss: the loss of that step, when the state told and it was finite.
        eval_loss: the loss of its weights on held-out data, likewise.
        config_sha256: fingerprint of the configuration in the state, or None.
        versions: of speedtronic, torch and python.
        files: size in bytes and SHA-256 of each file.
    """

    step: int
    sequence: int
    run_id: str
    time: str
    loss: float | None
    eval_loss: float | None
    config_sha256: str | None
    versions: dict[str, str]
    files: dict[str, FileRecord]

    def to_bytes(self) -> bytes:
        fields = asdict(self)
        fields["files"] = {name: record._asdict() for name, record in self.files.items()}
        return seal({"format": FORMAT, **fields})


@dataclass(frozen=True, slots=True)
class Pointer:
    """What `latest.json` says: the newest checkpoint and the run it belongs to."""

    checkpoint: str
    step: int
    run_id: str

    def to_bytes(self) -> bytes:
        return seal({"format": FORMAT, **asdict(self)})


def current_versions() -> dict[str, str]:
    return {
        "speedtronic": speedtronic.__version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }


def read_manifest(fs: FileSystem, checkpoint: Path) -> Manifest:
    """The manifest in a checkpoint's folder.

    Raises:
        NewerFormatError: it was written by a newer version.
        CheckpointError: it is missing, damaged, or not a manifest.
    """
    fields = _read_sealed(fs, checkpoint / MANIFEST)
    try:
        files = {name: FileRecord(**record) for name, record in fields.pop("files").items()}
        manifest = Manifest(**fields, files=files)
        _validate(manifest)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{MANIFEST} is not a manifest: {error}") from error
    return manifest


def read_pointer(fs: FileSystem, path: Path) -> Pointer:
    """What `latest.json` says.

    Raises:
        UnreadableError: the disk failed.
        CheckpointError: it is missing, damaged, or not ours.
    """
    try:
        pointer = Pointer(**_read_sealed(fs, path))
        _check_types(pointer, _POINTER_TYPES)
    except TypeError as error:
        raise CheckpointError(f"{path.name} does not name a checkpoint: {error}") from error
    return pointer


def seal(fields: Mapping[str, Any]) -> bytes:
    """JSON for people to read, with the checksum of its contents."""
    return json.dumps({**fields, "seal": _checksum(fields)}, indent=2, allow_nan=False).encode("ascii") + b"\n"


def _validate(manifest: Manifest) -> None:
    """Hold what is acted upon to its form: a seal proves that nothing changed, not who wrote it."""
    _check_types(manifest, _MANIFEST_TYPES)
    for record in manifest.files.values():
        _check_types(record, _RECORD_TYPES)
    for name, count in {"step": manifest.step, "sequence": manifest.sequence}.items():
        if count not in _COUNTS:
            raise ValueError(f"its {name} is not a count")
    for name, loss in {"loss": manifest.loss, "eval_loss": manifest.eval_loss}.items():
        if loss is not None and not math.isfinite(loss):
            raise ValueError(f"its {name} is not finite")
    if not all(type(version) is str for version in manifest.versions.values()):
        raise ValueError("its versions are not text")
    if datetime.fromisoformat(manifest.time).tzinfo is None:
        raise ValueError("its time lacks a zone")
    if not _RUN_ID.fullmatch(manifest.run_id):
        raise ValueError("its run id is malformed")
    if set(manifest.files) != set(FILES):
        raise ValueError(f"it lists {sorted(manifest.files)}, not {sorted(FILES)}")


def _check_types(record: object, types: Mapping[str, tuple[type, ...]]) -> None:
    for name, allowed in types.items():
        # Not isinstance: true is not a count.
        if type(getattr(record, name)) not in allowed:
            raise TypeError(f"its {name} is a {type(getattr(record, name)).__name__}")


def _read_sealed(fs: FileSystem, path: Path) -> dict[str, Any]:
    fields = _parse(path.name, _read(fs, path))
    if isinstance(fields.get("format"), int) and fields["format"] > FORMAT:
        raise NewerFormatError(
            f"{path.name} has format {fields['format']}, this Speedtronic knows up to {FORMAT}; update it"
        )
    if not _is_sealed(fields) or fields.pop("format", None) != FORMAT:
        raise CheckpointError(f"{path.name} is damaged: its contents do not match its checksum")
    return fields


def _is_sealed(fields: dict[str, Any]) -> bool:
    """Whether the checksum in `fields`, which is taken out, is that of the rest."""
    try:
        return bool(fields.pop("seal", None) == _checksum(fields))
    except RecursionError:  # nested more deeply than can be written again, which nothing of ours is
        return False


def _read(fs: FileSystem, path: Path) -> bytes:
    try:
        return read_small(fs, path, _LARGEST_MANIFEST)
    except FileNotFoundError:
        raise CheckpointError(f"{path.name} is missing") from None
    except DamagedFileError as error:
        raise CheckpointError(f"{path.name} is damaged: {error}") from error
    except OSError as error:
        raise UnreadableError(f"{path.name} cannot be read: {error.strerror or error}") from error


def _parse(name: str, data: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{name} is damaged: {error}") from error
    if not isinstance(fields, dict):
        raise CheckpointError(f"{name} is damaged: it does not hold an object")
    return fields


def _checksum(fields: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode("ascii")).hexdigest()
