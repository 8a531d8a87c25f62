"""The checkpoints in a folder, by a quick look: names, manifests and sizes, not contents."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from speedtronic.checkpoint.manifest import MANIFEST, Manifest, Monitored, read_manifest
from speedtronic.durable.files import FileSystem
from speedtronic.errors import CheckpointError

_MOST_LISTINGS = 20
_NAME = re.compile(r"step_(?P<step>[0-9]{12,})(?:-(?P<run>[0-9a-f]{8})(?:-new)?)?")


@dataclass(frozen=True, slots=True)
class CheckpointEntry:
    """One checkpoint in a folder.

    Attributes:
        path: its folder.
        step: the global step, from its name.
        size: bytes of the files in it.
        manifest: None when it cannot be read.
        problem: what is wrong with it, or None when all its files are there in full size.
    """

    path: Path
    step: int
    size: int
    manifest: Manifest | None
    problem: str | None

    @property
    def run_id(self) -> str:
        """The run it belongs to; empty when the manifest cannot be read."""
        return self.manifest.run_id if self.manifest else ""

    @property
    def sequence(self) -> int:
        """Its place among the saves of its run; 0 when the manifest cannot be read."""
        return self.manifest.sequence if self.manifest else 0

    @property
    def eval_loss(self) -> float | None:
        """The loss on held-out data; None when it was not measured, or the manifest cannot be read."""
        return self.manifest.eval_loss if self.manifest else None

    @property
    def monitored(self) -> Monitored | None:
        """What it is compared by with others of its run; None when it was not measured."""
        if self.manifest is not None and self.manifest.monitored is not None:
            return self.manifest.monitored
        return None if self.eval_loss is None else Monitored(name="loss", mode="min", value=self.eval_loss)

    def may_belong_to(self, run_id: str) -> bool:
        """Whether it belongs to this run, as far as can be told."""
        if self.manifest is not None:
            return self.manifest.run_id == run_id
        match = _NAME.fullmatch(self.path.name)
        return match is None or match["run"] is None or run_id.startswith(match["run"])


def checkpoint_name(step: int) -> str:
    return f"step_{step:012d}"


def scan(fs: FileSystem, directory: Path) -> list[CheckpointEntry]:
    """All checkpoints in a folder, of every run, sorted by step. Without such a folder there are none.

    If a run removes one of them in the meantime, it has just saved another, so the folder is listed again.

    Raises:
        CheckpointError: the folder cannot be read.
    """
    still_there: list[CheckpointEntry] = []
    for _ in range(_MOST_LISTINGS):
        try:
            paths = [path for path in directory.iterdir() if _NAME.fullmatch(path.name)] if directory.is_dir() else []
        except OSError as error:
            raise CheckpointError(f"{directory}: cannot be read: {error.strerror or error}") from error
        found = [inspect(fs, path) for path in paths]
        still_there = [entry for entry in found if os.path.lexists(entry.path)]
        if len(still_there) == len(found):
            break
    return sorted(still_there, key=lambda entry: (entry.step, entry.path.name))


def inspect(fs: FileSystem, path: Path) -> CheckpointEntry:
    """Look at one checkpoint. What is wrong with it stands in the entry and is not raised."""
    match = _NAME.fullmatch(path.name)
    step = int(match["step"]) if match else 0
    try:
        if match is None or path.is_symlink() or not path.is_dir():
            raise CheckpointError("it is not a folder named as checkpoints are")
        manifest = read_manifest(fs, path)
        if manifest.step != step:
            raise CheckpointError(f"{MANIFEST} says step {manifest.step}")
    except CheckpointError as error:
        return CheckpointEntry(path, step, _size_of(path), None, str(error))
    except OSError as error:
        return CheckpointEntry(path, step, 0, None, f"it cannot be read: {error.strerror or error}")
    return CheckpointEntry(path, step, _size_of(path), manifest, _missing_or_cut(path, manifest))


def of_run(entries: Sequence[CheckpointEntry], run_id: str) -> list[CheckpointEntry]:
    """One run's readable checkpoints, the last saved first."""
    return [entry for entry in newest_first(entries) if entry.run_id == run_id]


def newest_first(entries: Sequence[CheckpointEntry]) -> list[CheckpointEntry]:
    """Readable checkpoints, newest first, run by run. The count of saves decides, which no clock can take back.

    Only between runs that were saved equally often the clock decides: an earlier version counted each run by itself.
    """
    last_saved: dict[str, tuple[int, str]] = {}
    for entry in entries:
        if entry.manifest is not None:
            saved = (entry.sequence, entry.manifest.time)
            last_saved[entry.run_id] = max(saved, last_saved.get(entry.run_id, saved))
    readable = [entry for entry in entries if entry.manifest is not None]
    return sorted(readable, key=lambda entry: (last_saved[entry.run_id], entry.run_id, entry.sequence), reverse=True)


def surplus(own: Sequence[CheckpointEntry], keep_last: int | None, keep_every: int | None) -> list[CheckpointEntry]:
    """Those of a run's checkpoints, the newest first, that neither `keep_last` nor `keep_every` covers."""
    if keep_last is None:
        return []
    return [entry for entry in own[keep_last:] if keep_every is None or entry.step % keep_every != 0]


def best_first(newest_first: Sequence[CheckpointEntry]) -> list[CheckpointEntry]:
    """Those that were evaluated, the best first; of equal ones the newer first.

    They are compared by the number that the newest of them has: that of `eval.monitor`, or the loss. One of a run that
    monitored another number before cannot be compared, and is left out.
    """
    compared = [(found, entry) for entry in newest_first if (found := entry.monitored) is not None]
    if not compared:
        return []
    newest = compared[0][0]
    sign = 1.0 if newest.mode == "min" else -1.0
    ranked = [
        (sign * found.value, age, entry)
        for age, (found, entry) in enumerate(compared)
        if (found.name, found.mode) == (newest.name, newest.mode) and found.value is not None
    ]
    return [entry for _, _, entry in sorted(ranked, key=lambda one: one[:2])]


def _missing_or_cut(path: Path, manifest: Manifest) -> str | None:
    for name, record in manifest.files.items():
        try:
            status = (path / name).lstat()
        except OSError as error:
            return f"{name} is missing" if isinstance(error, FileNotFoundError) else f"{name}: {error.strerror}"
        if not stat.S_ISREG(status.st_mode):
            return f"{name} is not a plain file"
        if status.st_size != record.size:
            return f"{name} has {status.st_size} bytes instead of {record.size}"
    return None


def _size_of(path: Path) -> int:
    try:
        return 0 if path.is_symlink() else sum(file.lstat().st_size for file in path.iterdir())
    except OSError:
        return 0
