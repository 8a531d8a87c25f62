"""What tells a run's folder apart: `config.yaml`, its configuration, and `run.json`, its id and where its code lies.

Both are written when training starts. With them the folder stands for the run, wherever it is moved.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from speedtronic.config.root import SpeedtronicConfig, load_config, sections
from speedtronic.config.secrets import REDACTED
from speedtronic.config.text import parse
from speedtronic.durable.files import FileSystem, ensure_directory, replace_file
from speedtronic.durable.folders import recover
from speedtronic.errors import ConfigError

RUN_CONFIG = "config.yaml"
RUN_RECORD = "run.json"
TRACKERS = "trackers"  # a folder: how far each tracker is, and what those write that write files
# By its first line a run's own `config.yaml` is told from a file of the user's, which no run replaces or moves.
_FIRST_LINE = "# The configuration of run "


def run_folder(config: SpeedtronicConfig) -> Path | None:
    """The folder that must belong to a run alone, absolute; None where the run writes nothing."""
    logs = (config.logging.file, config.logging.json_file)
    writes = config.checkpoint.enabled or any(file is not None for file in logs)
    return Path(config.run.output_dir).absolute() if writes else None


def save_run(folder: Path, config: SpeedtronicConfig, run_id: str, import_from: Sequence[str]) -> bool:
    """Write `config.yaml`, resolved and without secrets, and `run.json` into the folder of a run, durably.

    Args:
        folder: made where it is missing.
        config: of the run.
        run_id: of the run, as its checkpoints have it.
        import_from: the folders that its own modules were imported from.

    Returns:
        Whether both were written. A `config.yaml` that is not of a run stays as it is.

    Raises:
        OSError: the disk is full, or failed. Each file is there in full, old or new.
    """
    fs = FileSystem()
    ensure_directory(fs, folder)
    for name in (RUN_CONFIG, RUN_RECORD):
        recover(fs, folder / name)
    record = {"run_id": run_id, "import_from": list(import_from)}
    replace_file(fs, folder / RUN_RECORD, json.dumps(record, indent=2).encode("ascii") + b"\n")
    file = folder / RUN_CONFIG
    if os.path.lexists(file) and not is_of_a_run(file):
        return False
    text = f"{_FIRST_LINE}{run_id}: resolved, without secrets.\n{config.to_yaml(redact_secrets=True)}"
    replace_file(fs, file, text.encode("utf-8"))
    return True


def is_of_a_run(file: Path) -> bool:
    """Whether a file is a `config.yaml` that a run wrote."""
    try:
        with file.open("rb") as opened:
            return opened.read(len(_FIRST_LINE)) == _FIRST_LINE.encode("ascii")
    except OSError:
        return False


def config_in(folder: Path) -> Path | None:
    """The `config.yaml` of the run in a folder, if there is one: the run's own, or the user's for this folder."""
    file = folder / RUN_CONFIG
    if is_of_a_run(file):
        return file
    try:
        is_for_it = file.is_file() and Path(load_config(file).run.output_dir).resolve() == folder.resolve()
    except (ConfigError, OSError):
        return None
    return file if is_for_it else None


def load_config_in(file: Path, overrides: Sequence[str] = ()) -> SpeedtronicConfig:
    """Load the `config.yaml` in a run's folder.

    A run writes its configuration resolved. Keys that follow others (`scheduler.max_steps` follows `run.max_steps`) do
    so again, unless their value shows that they were given.

    Raises:
        ConfigError: as `load_config`.
    """
    if not is_of_a_run(file):
        return load_config(file, overrides)
    resolved = load_config(file).to_dict()
    tree = parse(file.read_text(encoding="utf-8"), str(file)).data
    for name, section in sections().items():
        for key in section.following:
            values = tree.get(name)
            if isinstance(values, dict) and key in values:
                without = {**tree, name: {other: value for other, value in values.items() if other != key}}
                with suppress(ConfigError):
                    tree = without if load_config(without).to_dict() == resolved else tree
    return load_config(tree, overrides)


def imported_from(folder: Path) -> list[Path]:
    """The folders that the run in a folder imported its own modules from, as far as they are there."""
    try:
        record = json.loads((folder / RUN_RECORD).read_bytes())
        folders = [Path(word) for word in record["import_from"] if isinstance(word, str)]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    return [place for place in folders if place.is_dir()]


def run_id_in(folder: Path) -> str | None:
    """The id of the run in a folder, from its `run.json`."""
    try:
        run_id = json.loads((folder / RUN_RECORD).read_bytes())["run_id"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return run_id if isinstance(run_id, str) else None


def redacted_keys(file: Path, config: SpeedtronicConfig) -> tuple[str, ...]:
    """The keys whose value a `config.yaml` leaves out because it is secret, as far as `config` has none either."""

    def keys(values: object, now: object, at: str) -> Iterator[str]:
        if isinstance(values, dict):
            for key, value in values.items():
                yield from keys(value, now.get(key) if isinstance(now, dict) else None, f"{at}.{key}" if at else key)
        elif values == REDACTED and now is None:
            yield at

    return tuple(keys(parse(file.read_text(encoding="utf-8"), str(file)).data, config.to_dict(), ""))
