"""`speedtronic checkpoints list`: what a run has saved, by a quick look."""

from __future__ import annotations

import argparse
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from speedtronic.cli import output
from speedtronic.cli.checkpoints_found import FIELDS, add_path_argument, as_object, find, printable
from speedtronic.cli.tables import age, write_table

if TYPE_CHECKING:
    from speedtronic.checkpoint import CheckpointEntry


def add_parser(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = actions.add_parser(
        "list",
        help="list the checkpoints of a run",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="List checkpoints: step, age, size, losses, run, and whether all files are there in full.\n"
        "Damaged ones are listed with the reason; * stands before the one that is loaded next.\n"
        "Contents are not read: `speedtronic checkpoints verify` does that.",
        epilog="exit code: 0 at least one is complete, 1 all are damaged, 2 there is none\n\n" + FIELDS,
    )
    add_path_argument(parser)
    parser.add_argument("--json", action="store_true", help="print a JSON array, one object per checkpoint")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    found = find(args.path)
    newest = found.manager.latest_path()
    if args.json:
        output.write(json.dumps([as_object(entry, newest) for entry in found.entries], indent=2) + "\n")
    else:
        now = datetime.now(UTC)
        write_table(_HEADINGS, [_as_row(entry, newest, now) for entry in found.entries])
    return 0 if any(entry.problem is None for entry in found.entries) else 1


_HEADINGS = ("", "STEP", "AGE", "SIZE", "LOSS", "EVAL LOSS", "RUN", "STATUS", "FOLDER")


def _as_row(entry: CheckpointEntry, newest: Path | None, now: datetime) -> tuple[str, ...]:
    from speedtronic.metrics.lines import short_bytes

    manifest = entry.manifest
    return (
        "*" if entry.path == newest else "",
        str(entry.step),
        age((now - datetime.fromisoformat(manifest.time)).total_seconds()) if manifest else "-",
        short_bytes(entry.size),
        _loss(manifest.loss if manifest else None),
        _loss(manifest.eval_loss if manifest else None),
        manifest.run_id[:8] if manifest else "-",
        f"damaged: {printable(entry.problem)}" if entry.problem else "complete",
        printable(entry.path.name),
    )


def _loss(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
