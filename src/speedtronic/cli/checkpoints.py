"""`speedtronic checkpoints list`: what a run has saved."""

from __future__ import annotations

import argparse
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from speedtronic.cli import output
from speedtronic.cli.arguments import load_config_of_run

if TYPE_CHECKING:
    from speedtronic.checkpoint import CheckpointEntry


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("checkpoints", help="look at saved checkpoints")
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    listing = actions.add_parser(
        "list",
        help="list the checkpoints of a run",
        description="List the checkpoints in a folder: step, age, size, loss, run and whether all files are "
        "there in full. Damaged ones are listed with the reason.",
    )
    listing.add_argument("path", type=Path, help="a checkpoints folder, a run's output folder, or a config")
    listing.add_argument("--json", action="store_true", help="print a JSON array, one object per checkpoint")
    listing.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from speedtronic.checkpoint import CheckpointManager

    directory = _checkpoints_folder(args.path)
    entries = CheckpointManager(directory).entries()
    if args.json:
        output.write(json.dumps([_as_object(entry) for entry in entries], indent=2) + "\n")
    elif entries:
        output.write(_table([_as_row(entry, datetime.now(UTC)) for entry in entries]))
    else:
        output.write(f"no checkpoints in {directory}\n")
    return 0


def _checkpoints_folder(path: Path) -> Path:
    """The folder that a user means by a config file, an output folder or the folder itself."""
    from speedtronic.errors import CheckpointError

    if path.is_file():
        config = load_config_of_run(path)
        return Path(config.run.output_dir) / config.checkpoint.directory
    if not path.is_dir():
        raise CheckpointError(f"{path}: there is no such folder or config")
    inside = path / "checkpoints"
    return inside if inside.is_dir() else path


def _as_object(entry: CheckpointEntry) -> dict[str, Any]:
    manifest = entry.manifest
    return {
        "step": entry.step,
        "path": str(entry.path),
        "size_bytes": entry.size,
        "time": manifest and manifest.time,
        "run_id": manifest and manifest.run_id,
        "loss": manifest and manifest.loss,
        "problem": entry.problem,
    }


_HEADINGS = ("STEP", "AGE", "SIZE", "LOSS", "RUN", "STATUS", "FOLDER")


def _as_row(entry: CheckpointEntry, now: datetime) -> tuple[str, ...]:
    from speedtronic.metrics.lines import short_bytes

    manifest = entry.manifest
    return (
        str(entry.step),
        _age((now - datetime.fromisoformat(manifest.time)).total_seconds()) if manifest else "-",
        short_bytes(entry.size),
        f"{manifest.loss:.4f}" if manifest and manifest.loss is not None else "-",
        manifest.run_id[:8] if manifest else "-",
        f"damaged: {entry.problem}" if entry.problem else "complete",
        entry.path.name,
    )


def _age(seconds: float) -> str:
    for length, letter in ((86400, "d"), (3600, "h"), (60, "m")):
        if seconds >= length:
            return f"{int(seconds // length)}{letter}"
    return f"{max(0, int(seconds))}s"


def _table(rows: list[tuple[str, ...]]) -> str:
    table = [_HEADINGS, *rows]
    widths = [max(len(row[column]) for row in table) for column in range(len(_HEADINGS))]
    lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in table]
    return "\n".join(lines) + "\n"
