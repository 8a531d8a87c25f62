"""The run that lies in a folder already, and setting it aside."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from speedtronic.errors import ConfigError, RunFolderError

if TYPE_CHECKING:
    from speedtronic.config import SpeedtronicConfig

_CHECKPOINT = re.compile(r"step_(\d{12,})(-[0-9a-f]{8}(-new)?)?")
_LATEST = "latest.json"
_BEFORE_TRAINING = {
    "environment",
    "log",
    "shape_profile",
    "shape_warning",
}  # events that a run writes before it begins to train
_LONGEST_START = 2**16  # bytes of a log


@dataclass(frozen=True)
class FormerRun:
    """What a run left behind.

    Attributes:
        folder: of the run, absolute.
        files: its files and folders: first those that say which run it is, so that a run which is cut apart by a kill
            still shows.
    """

    folder: Path
    files: list[Path]

    def __str__(self) -> str:
        """`run 1a2b3c4d, checkpoints up to step 500, metrics.jsonl`."""
        from speedtronic.config.run_folder import RUN_CONFIG, RUN_RECORD, TRACKERS, run_id_in

        run_id = run_id_in(self.folder)
        words = [f"run {run_id[:8]}"] if run_id else []
        steps = [int(match[1]) for file in self.files if (match := _CHECKPOINT.fullmatch(file.name))]
        if steps:
            words.append(f"checkpoints up to step {max(steps)}")
        known = {RUN_CONFIG, RUN_RECORD, TRACKERS, _LATEST}
        words += [file.name for file in self.files if file.name not in known and not _CHECKPOINT.fullmatch(file.name)]
        return ", ".join(words)


def find_former_run(config: SpeedtronicConfig, folder: Path) -> FormerRun | None:
    """The run whose checkpoints or log lines are where a run with this configuration would put its own.

    A run that left neither is none: it has failed before its first step, and the next one takes its place.

    Args:
        folder: `run.output_dir`, absolute.
    """
    from speedtronic.config import load_config
    from speedtronic.config.run_folder import RUN_CONFIG, RUN_RECORD, is_of_a_run

    own = folder / RUN_CONFIG
    configs = [config]
    if is_of_a_run(own):
        # Its files may have had other names. One of another version cannot be read, and is done without.
        with suppress(ConfigError):
            configs.append(load_config(own))
    left = list(dict.fromkeys(file for each in configs for file in _files_of(each, folder)))
    if not left:
        return None
    return FormerRun(folder, [file for file in (own, folder / RUN_RECORD) if _is_its_own(file)] + left)


def _is_its_own(file: Path) -> bool:
    from speedtronic.config.run_folder import RUN_CONFIG, is_of_a_run

    return is_of_a_run(file) if file.name == RUN_CONFIG else file.is_file()


def _files_of(config: SpeedtronicConfig, folder: Path) -> Iterator[Path]:
    """The checkpoints and the logs that are there. A log outside of the folder is shared with others on purpose."""
    from speedtronic.config.run_folder import TRACKERS

    checkpoints = folder / config.checkpoint.directory
    try:
        there = sorted(checkpoints.iterdir()) if checkpoints.is_dir() else []
    except OSError as error:
        raise RunFolderError(f"{checkpoints}: cannot be read: {error.strerror or error}") from error
    found = [file for file in there if _CHECKPOINT.fullmatch(file.name)]
    yield from found
    yield from (file for file in there if found and file.name == _LATEST)
    for log in (config.logging.file, config.logging.json_file):
        file = folder / (log or "")
        if file.is_relative_to(folder) and file.is_file() and (found or not _is_of_a_failed_start(file)):
            yield file
            found.append(file)
    if found and (trackers := folder / TRACKERS).is_dir():
        yield trackers


def _is_of_a_failed_start(log: Path) -> bool:
    """Whether a log is empty, or has only lines of JSON from before the first step."""
    if log.stat().st_size > _LONGEST_START:
        return False
    try:
        records = [json.loads(line) for line in log.read_bytes().splitlines()]
    except (ValueError, RecursionError):  # it is a log for people
        return False
    return all(isinstance(record, dict) and record.get("event") in _BEFORE_TRAINING for record in records)


def set_aside(former: FormerRun) -> Path:
    """Move what a run left into a folder beside its own, which then stands for the run as its own did.

    Returns:
        The folder: `{folder}.old-1`, or the first number that is free.

    Raises:
        RunFolderError: it could not be moved. It is where it was.
    """
    from speedtronic.durable.files import FileSystem, ensure_directory

    fs = FileSystem()
    number = 1
    while (aside := former.folder.with_name(f"{former.folder.name}.old-{number}")).exists():
        number += 1
    moved: list[tuple[Path, Path]] = []
    try:
        for file in former.files:
            if file.is_relative_to(former.folder):
                target = aside / file.relative_to(former.folder)
            else:  # checkpoints in a folder of their own
                target = file.parent.with_name(f"{file.parent.name}.old-{number}") / file.name
            ensure_directory(fs, target.parent)
            fs.rename(file, target)
            moved.append((file, target))
        for folder in {place.parent for pair in moved for place in pair}:
            fs.sync_directory(folder)
    except OSError as error:
        for file, target in reversed(moved):
            fs.rename(target, file)
        raise RunFolderError(
            f"{former.folder}: its run cannot be moved to {aside} ({error.strerror or error}); move it yourself, or "
            "choose another folder with --output-dir"
        ) from error
    return aside
