"""`speedtronic train --dry-run`: build a run, take a few updates, say what they cost, and leave no trace of it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from speedtronic.cli import output

if TYPE_CHECKING:
    from speedtronic.config import SpeedtronicConfig
    from speedtronic.trainer import Trainer

_ENOUGH = 5.0  # seconds to measure for
_MOST_UPDATES = 10


def dry_run(config: SpeedtronicConfig, *, resume: bool) -> int:
    """Print what the run needs, and return the exit code.

    No file of the run is written, no folder locked, no store asked, no callback and no tracker told. The caches of
    encoded text, tuning and compiled code are used as in training.

    Args:
        config: of the run, resolved, its plugins imported.
        resume: build it from the newest checkpoint.
    """
    from speedtronic.metrics.lines import duration, short_bytes, short_number
    from speedtronic.runtime import build_runtime
    from speedtronic.trainer.throughput import peak_memory_bytes

    target = config.data.max_steps or config.run.max_steps
    trainer, _ = build_runtime(_without_effects(config), resume=resume)
    # Only now: what evaluates is built, and its keys are not taken for ones that nothing acts on.
    trainer.config.eval.at_end, trainer.config.eval.every_steps = False, None
    done, seen = trainer.step, trainer.tokens
    seconds, updates, first = _measure(trainer)
    size = _bytes_of(trainer.state_dict())
    pace = f"{seconds:.3g} s" if updates else f"{seconds:.3g} s at most: it was the first, which starts everything"
    left = max(0, target - done)
    facts = [
        ("device", f"{trainer.device}, {trainer.precision.mode}"),
        ("parameters", short_number(sum(parameter.numel() for parameter in trainer.model.parameters()))),
        ("an update", pace + (f" (mean of {output.counted(updates, 'update')})" if updates else "")),
        ("the first update", f"{first:.3g} s"),
        ("the run", f"{output.counted(left, 'update')}, about {duration(left * seconds)} without evaluations"),
    ]
    tokens = (trainer.tokens - seen) / (trainer.step - done)
    if tokens and seconds:
        facts.append(("tokens", f"{short_number(tokens)} an update, {short_number(tokens / seconds)}/s"))
    if (peak := peak_memory_bytes(trainer.device)) is not None:
        of = "of tensors on the device" if trainer.device.type == "cuda" else "of the process"
        facts.append(("peak memory", f"{short_bytes(peak)} {of}"))
    if config.checkpoint.enabled:
        facts += _disk(config, size)
    output.write_facts(facts)
    return 0


def _without_effects(config: SpeedtronicConfig) -> SpeedtronicConfig:
    """The run without what it would write, and without whom it would tell."""
    from speedtronic.config import load_config

    quiet = load_config(config)
    quiet.checkpoint.enabled = False
    quiet.logging.trackers = []
    quiet.logging.file = quiet.logging.json_file = None
    quiet.logging.progress, quiet.logging.level = "off", "WARNING"
    quiet.distributed.enabled = False
    quiet.callbacks = []
    return quiet


def _measure(trainer: Trainer) -> tuple[float, int, float]:
    """Seconds of an update, the number of updates that they were measured on, and the seconds of the first one.

    Of two calls of `fit` with different numbers of updates the difference counts: what each call does once, and what
    the device has not finished when an update returns, is in both.
    """
    first = trainer.fit(trainer.step + 1).elapsed_s
    if first > _ENOUGH:
        return first, 0, first
    one = trainer.fit(trainer.step + 1).elapsed_s
    updates = max(1, min(_MOST_UPDATES, int(_ENOUGH / max(one, 1e-3))))
    more = trainer.fit(trainer.step + 1 + updates).elapsed_s
    return max(0.0, more - one) / updates, updates, first


def _bytes_of(state: Mapping[str, Any]) -> int:
    """The bytes of the tensors in a checkpoint's state, each storage once."""

    def tensors(value: Any) -> Iterator[tuple[int, int]]:
        if isinstance(value, Mapping):
            value = list(value.values())
        if isinstance(value, list | tuple):
            for item in value:
                yield from tensors(item)
        elif hasattr(value, "data_ptr"):
            yield value.data_ptr(), value.nbytes

    return sum(dict(tensors(state)).values())


def _disk(config: SpeedtronicConfig, size: int) -> Iterator[tuple[str, str]]:
    """What the checkpoints take of the disk."""
    from speedtronic.metrics.lines import short_bytes

    yield "a checkpoint", short_bytes(size)
    folder = (Path(config.run.output_dir) / config.checkpoint.directory).absolute()
    place = next(parent for parent in (folder, *folder.parents) if parent.exists())
    free = shutil.disk_usage(place).free
    kept = config.checkpoint.keep_last
    # While one is written, those that it replaces are still there.
    needed = size * (kept + config.checkpoint.keep_best + 1) if kept is not None else None
    words = f"{short_bytes(free)} free at {place}"
    if needed is None:
        yield "disk", f"{words}; all checkpoints are kept (checkpoint.keep_last: null)"
    elif needed > free:
        yield "disk", f"{words}: too little for the checkpoints, which take up to {short_bytes(needed)}"
    else:
        yield "disk", f"{words}, of which checkpoints take up to {short_bytes(needed)}"
