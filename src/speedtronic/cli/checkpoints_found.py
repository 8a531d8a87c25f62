"""What the `checkpoints` commands have in common: which checkpoints a path means, and how one is told of."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from speedtronic.cli.arguments import load_config_of_run

if TYPE_CHECKING:
    from speedtronic.checkpoint import CheckpointEntry, CheckpointManager
    from speedtronic.durable.files import FileSystem

FIELDS = """\
fields of the JSON objects:
  step, run_id, time, loss, eval_loss    as the checkpoint's manifest.json has them; null when it cannot be read
  path        the checkpoint's folder
  size_bytes  of all its files
  newest      whether it is the one that is loaded next
  problem     what is wrong with it, or null
"""

_CHECKPOINT_NAME = re.compile(r"step_\d{12}")
_WORTH_SHOWING = 256 * 10**6  # bytes; less is read before a person wonders


def add_path_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "path",
        type=Path,
        metavar="PATH",
        help="a run's output folder, its checkpoints folder, one checkpoint, or the run's YAML",
    )


@dataclass(frozen=True)
class Found:
    """The checkpoints that a path means.

    Attributes:
        manager: of the folder that they are in.
        entries: all of them, by step; or the one that was named.
        is_one: whether one was named.
    """

    manager: CheckpointManager
    entries: list[CheckpointEntry]
    is_one: bool


def find(path: Path) -> Found:
    """Look for the checkpoints that a user means by a path.

    Raises:
        CheckpointError: there is no such path, it cannot be read, there are none, or only those of version 2.0.
        ConfigError: the path is a file that is not a configuration.
    """
    from speedtronic.errors import CheckpointError

    try:
        return _find(path)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error


def _find(path: Path) -> Found:
    from speedtronic.checkpoint import CheckpointManager
    from speedtronic.checkpoint.entries import inspect
    from speedtronic.durable.files import FileSystem
    from speedtronic.errors import CheckpointError

    path = path if path.name not in ("", "..") else path.resolve()
    if _is_one(path):
        return Found(CheckpointManager(path.parent), [inspect(FileSystem(), path)], is_one=True)
    manager = CheckpointManager(_folder(path), warn=warn)
    entries = manager.entries()
    if not entries:
        manager.verified_path()  # says what is wrong with checkpoints of version 2.0
        raise CheckpointError(f"{manager.directory}: there are no checkpoints")
    return Found(manager, entries, is_one=False)


def as_object(entry: CheckpointEntry, newest: Path | None) -> dict[str, Any]:
    """An entry as JSON has it: see `FIELDS`."""
    manifest = entry.manifest
    return {
        "step": entry.step,
        "path": str(entry.path),
        "size_bytes": entry.size,
        "time": manifest and manifest.time,
        "run_id": manifest and manifest.run_id,
        "loss": manifest and manifest.loss,
        "eval_loss": manifest and manifest.eval_loss,
        "newest": entry.path == newest,
        "problem": entry.problem,
    }


def warn(message: str) -> None:
    print(f"warning: {message}", file=sys.stderr)


def printable(text: str) -> str:
    """What a file holds must not steer the terminal."""
    return "".join(character if character.isprintable() else "\ufffd" for character in text)


@contextmanager
def reading_progress(label: str, size: int) -> Iterator[FileSystem]:
    """Files to read through, at whose reading a bar moves, on a terminal and when it takes a while.

    Args:
        label: what stands before the bar.
        size: how much will be read, in bytes.
    """
    from speedtronic.durable.files import FileSystem

    if size < _WORTH_SHOWING or sys.stderr is None or not sys.stderr.isatty():
        yield FileSystem()
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    from speedtronic.cli.counted import CountedFileSystem

    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    text = TextColumn("{task.description}", markup=False)
    same_terminal = sys.stdout.isatty()
    console = Console(stderr=True)
    with Progress(text, *columns, console=console, transient=True, redirect_stdout=same_terminal) as progress:
        task = progress.add_task(label, total=size)
        yield CountedFileSystem(lambda count: progress.advance(task, count))


def _is_one(path: Path) -> bool:
    return path.is_dir() and (_CHECKPOINT_NAME.match(path.name) is not None or (path / "manifest.json").is_file())


def _folder(path: Path) -> Path:
    """The folder of checkpoints that a user means by a config file, an output folder or the folder itself."""
    from speedtronic.checkpoint import CheckpointManager
    from speedtronic.errors import CheckpointError

    if path.is_file():
        beside = CheckpointManager(path.parent)
        if path.suffix == ".pt" and not beside.entries():
            beside.verified_path()  # says what is wrong with checkpoints of version 2.0
        config = load_config_of_run(path)
        return Path(config.run.output_dir) / config.checkpoint.directory
    if not path.is_dir():
        raise CheckpointError(f"{path}: there is no such folder or config")
    inside = path / "checkpoints"
    return inside if inside.is_dir() else path
