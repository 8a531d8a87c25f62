"""The manifest of a checkpoint, and `latest.json`: small sealed JSON files.

A seal is the SHA-256 of the file's own contents, so that a flipped bit in a run id or a step is noticed as surely as
one in a tensor.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

import torch
from pydantic import BaseModel, ConfigDict, Field, PlainSerializer, ValidationError, model_validator

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

_Count = Annotated[int, Field(ge=0, lt=2**63)]
_RunId = Annotated[str, Field(pattern="^[0-9a-f]{8,64}$")]
_File = Annotated[FileRecord, PlainSerializer(FileRecord._asdict)]


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


class _Sealed(BaseModel):
    # Types and bounds are checked although the file is sealed: a seal proves that nothing changed, not who wrote it.
    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)

    def to_bytes(self) -> bytes:
        # What is optional and absent is not written, so that versions which do not know it can read the rest.
        fields = self.model_dump()
        absent = {name for name, field in type(self).model_fields.items() if not field.is_required()}
        return seal({"format": FORMAT, **{k: v for k, v in fields.items() if v is not None or k not in absent}})


class Monitored(_Sealed):
    """The number by which a checkpoint is compared with others of its run.

    Attributes:
        name: that of `eval.monitor`.
        mode: which is better: min, the lower one, or max, the higher one.
        value: of the checkpoint's weights; None where it was not finite, so that the checkpoint is never the best.
    """

    name: str
    mode: Literal["min", "max"]
    value: float | None


class Manifest(_Sealed):
    """What a checkpoint is, and how to tell that it is whole.

    Attributes:
        step: the global step it was saved at.
        sequence: a count that grows with every save in the folder; the order of its checkpoints and of its runs.
        run_id: hex; the run it belongs to.
        time: when it was written, UTC, ISO 8601.
        loss: the loss of that step, if the state has a finite one.
        eval_loss: the loss of its weights on held-out data, likewise.
        monitored: what it is compared by, where that is another number and it was measured.
        config_sha256: fingerprint of the configuration in the state, or None.
        versions: of speedtronic, torch and python.
        files: size in bytes and SHA-256 of each file.
    """

    step: _Count
    sequence: _Count
    run_id: _RunId
    time: str
    loss: float | None
    eval_loss: float | None
    monitored: Monitored | None = None
    config_sha256: str | None
    versions: dict[str, str]
    files: dict[str, _File]

    @model_validator(mode="after")
    def _check(self) -> Self:
        if datetime.fromisoformat(self.time).tzinfo is None:
            raise ValueError("its time lacks a zone")
        if self.files.keys() != set(FILES):
            raise ValueError(f"it lists {sorted(self.files)}, not {sorted(FILES)}")
        return self


class Pointer(_Sealed):
    """What `latest.json` says: the newest checkpoint and the run it belongs to."""

    checkpoint: str
    step: int
    run_id: str


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
    return _validated(Manifest, fields, f"{MANIFEST} is not a manifest")


def manifest_of(text: bytes) -> Manifest:
    """The manifest in the bytes of a `manifest.json`.

    Raises:
        NewerFormatError: it was written by a newer version.
        CheckpointError: it is damaged, or not a manifest.
    """
    return _validated(Manifest, _unsealed(text, MANIFEST), f"{MANIFEST} is not a manifest")


def read_pointer(fs: FileSystem, path: Path) -> Pointer:
    """What `latest.json` says.

    Raises:
        UnreadableError: the disk failed.
        CheckpointError: it is missing, damaged, or not ours.
    """
    return _validated(Pointer, _read_sealed(fs, path), f"{path.name} does not name a checkpoint")


def seal(fields: Mapping[str, Any]) -> bytes:
    """JSON for people to read, with the checksum of its contents."""
    return json.dumps({**fields, "seal": _checksum(fields)}, indent=2, allow_nan=False).encode("ascii") + b"\n"


def _checksum(fields: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode("ascii")).hexdigest()


_T = TypeVar("_T", bound=_Sealed)


def _validated(kind: type[_T], fields: dict[str, Any], what: str) -> _T:
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        problems = [(".".join(map(str, problem["loc"])), problem["msg"]) for problem in error.errors()]
        reasons = "; ".join(f"{field}: {message}" if field else message for field, message in problems)
        raise CheckpointError(f"{what}: {reasons}") from error


def _read_sealed(fs: FileSystem, path: Path) -> dict[str, Any]:
    """The fields of a sealed file, after its format and its seal were checked."""
    try:
        text = read_small(fs, path, _LARGEST_MANIFEST)
    except FileNotFoundError:
        raise CheckpointError(f"{path.name} is missing") from None
    except OSError as error:
        raise UnreadableError(f"{path.name} cannot be read: {error.strerror or error}") from error
    except DamagedFileError as error:
        raise CheckpointError(f"{path.name} is damaged: {error}") from error
    return _unsealed(text, path.name)


def _unsealed(text: bytes, name: str) -> dict[str, Any]:
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{name} is damaged: {error}") from error
    if not isinstance(fields, dict):
        raise CheckpointError(f"{name} is damaged: it does not hold an object")

    if isinstance(fields.get("format"), int) and fields["format"] > FORMAT:
        raise NewerFormatError(
            f"{name} has format {fields['format']}, this Speedtronic knows up to {FORMAT}; update it"
        )
    try:
        is_sealed = fields.pop("seal", None) == _checksum(fields)
    except RecursionError:  # nested more deeply than can be written again, so we did not write it
        is_sealed = False
    if not is_sealed or fields.pop("format", None) != FORMAT:
        raise CheckpointError(f"{name} is damaged: its contents do not match their checksum")
    return fields
