"""`speedtronic checkpoints verify`: read checkpoints whole and compare them with their checksums."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from typing import TYPE_CHECKING

from speedtronic.cli import output
from speedtronic.cli.checkpoints_found import (
    FIELDS,
    Found,
    add_path_argument,
    as_object,
    find,
    printable,
    reading_progress,
)

if TYPE_CHECKING:
    from speedtronic.checkpoint import CheckpointEntry
    from speedtronic.durable.files import FileSystem


def add_parser(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = actions.add_parser(
        "verify",
        help="read a checkpoint whole and compare it with its checksums",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Read every byte of the checkpoint that was saved last, or of the one that is named, and compare\n"
        "it with its checksums. Each is told in a line, with the reason when it is damaged.",
        epilog="exit code: 0 all are sound, 1 at least one is damaged, 2 there is none\n\n" + FIELDS,
    )
    add_path_argument(parser)
    parser.add_argument("--all", action="store_true", help="verify every checkpoint in the folder")
    parser.add_argument("--json", action="store_true", help="print a JSON array, one object per checkpoint")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    found = find(args.path)
    chosen = found.entries if args.all or found.is_one else [_saved_last(found)]
    newest = found.manager.latest_path()
    verified = []
    with reading_progress("verifying", sum(entry.size for entry in chosen)) as fs:
        for entry in chosen:
            verified.append(_verified(fs, entry))
            if not args.json:
                output.write(_line(verified[-1]))
    if args.json:
        output.write(json.dumps([as_object(entry, newest) for entry in verified], indent=2) + "\n")
    return 0 if all(entry.problem is None for entry in verified) else 1


def _saved_last(found: Found) -> CheckpointEntry:
    """The newest checkpoint, in whatever condition: what `latest.json` names, else what the manifests say."""
    from speedtronic.checkpoint.entries import newest_first, of_run
    from speedtronic.checkpoint.manager import LATEST
    from speedtronic.checkpoint.manifest import read_pointer
    from speedtronic.durable.files import FileSystem
    from speedtronic.errors import CheckpointError

    entries = found.entries
    by_manifest = [*newest_first(entries), *reversed(entries)]
    try:
        pointer = read_pointer(FileSystem(), found.manager.directory / LATEST)
    except CheckpointError:
        return by_manifest[0]
    named = [entry for entry in entries if entry.path.name == pointer.checkpoint]
    return [*named, *of_run(entries, pointer.run_id), *by_manifest][0]


def _verified(fs: FileSystem, entry: CheckpointEntry) -> CheckpointEntry:
    """The entry, with what is wrong with its contents."""
    from speedtronic.checkpoint.snapshot import check_files
    from speedtronic.errors import CheckpointError

    if entry.manifest is None or entry.problem is not None:
        return entry
    try:
        check_files(fs, entry.path, entry.manifest)
    except CheckpointError as error:
        return replace(entry, problem=str(error))
    except OSError as error:
        return replace(entry, problem=f"it cannot be read: {error.strerror or error}")
    return entry


def _line(entry: CheckpointEntry) -> str:
    from speedtronic.metrics.lines import short_bytes

    status = f"sound, {short_bytes(entry.size)}" if entry.problem is None else f"damaged: {printable(entry.problem)}"
    return f"{printable(entry.path.name)}: {status}\n"
