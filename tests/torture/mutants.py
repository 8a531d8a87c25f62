"""Faults of our own making, built into the code of a victim: a harness that does not notice them proves nothing."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

from speedtronic.checkpoint import CheckpointManager
from speedtronic.checkpoint.entries import checkpoint_name
from speedtronic.checkpoint.manifest import Pointer, read_manifest
from speedtronic.durable.files import FileSystem, replace_file
from speedtronic.trainer import Trainer
from tests.torture.board import Phase
from tests.torture.disk import Delegating


def _is_new_checkpoint(source: Path) -> bool:
    return source.name.startswith(".tmp-step_")


class PointerFirst(Delegating):
    """`latest.json` names a checkpoint before the checkpoint has that name."""

    def rename(self, source: Path, target: Path) -> None:
        if _is_new_checkpoint(source):
            manifest = read_manifest(FileSystem(), source)
            pointer = Pointer(checkpoint=target.name, step=manifest.step, run_id=manifest.run_id)
            replace_file(self.inner, target.parent / "latest.json", pointer.to_bytes())
        super().rename(source, target)


class PruneFirst(Delegating):
    """The old checkpoints go before the new one is there."""

    def rename(self, source: Path, target: Path) -> None:
        if _is_new_checkpoint(source):
            for old in sorted(target.parent.glob("step_*")):
                self.inner.remove_tree(old)
        super().rename(source, target)


class CopiedIntoPlace(Delegating):
    """A finished folder is copied to its name file by file, as a tool that does not know `rename` would."""

    def rename(self, source: Path, target: Path) -> None:
        if not _is_new_checkpoint(source):
            super().rename(source, target)
            return
        self.inner.make_directory(target)
        for file in sorted(source.iterdir()):
            self.inner.rename(file, target / file.name)
        shutil.rmtree(source)


def _resume_without(part: str) -> Callable[[FileSystem], FileSystem]:
    def infect(disk: FileSystem) -> FileSystem:
        resume = Trainer.resume

        def forgetful(trainer: Trainer, state: Mapping[str, Any]) -> None:
            resume(trainer, {**state, part: None})

        Trainer.resume = forgetful  # type: ignore[method-assign, assignment]
        return disk

    return infect


def _write_once(disk: FileSystem) -> FileSystem:
    """What the system has not taken of a write is not written again."""

    def write(self: FileSystem, file: FileIO, data: memoryview) -> None:
        file.write(data)

    FileSystem.write = write  # type: ignore[method-assign, assignment]
    return disk


def _announce_at_once(disk: FileSystem) -> FileSystem:
    """A save in the background is said to be durable when it begins."""
    save_async = CheckpointManager.save_async

    def hasty(manager: CheckpointManager, step: int, state: dict[str, Any]) -> Future[Path]:
        save_async(manager, step, state)
        done: Future[Path] = Future()
        done.set_result(manager.directory / checkpoint_name(step))
        return done

    CheckpointManager.save_async = hasty  # type: ignore[method-assign, assignment]
    CheckpointManager.wait = lambda manager: None  # type: ignore[method-assign, assignment]
    return disk


@dataclass(frozen=True)
class Mutant:
    """A fault in the code.

    Attributes:
        infect: builds it into this process; returns the file layer to use.
        noticed_as: what the harness says of it, as a regular expression.
        aim: the phases in which a kill brings it to light.
    """

    infect: Callable[[FileSystem], FileSystem]
    noticed_as: str
    aim: tuple[Phase, ...]


MUTANTS: Mapping[str, Mutant] = {
    "latest.json before the checkpoint": Mutant(PointerFirst, r"latest\.json names", (Phase.RENAME,)),
    "pruning before the checkpoint is there": Mutant(PruneFirst, r"lost|latest\.json names", (Phase.RENAME,)),
    "a checkpoint that is not renamed but copied": Mutant(CopiedIntoPlace, r"not sound", (Phase.RENAME,)),
    "a write that is not finished": Mutant(_write_once, r"not sound", (Phase.WRITE,)),
    "a checkpoint announced before it is durable": Mutant(_announce_at_once, r"is lost", (Phase.WRITE,)),
    "a resume that drops the data position": Mutant(_resume_without("data"), r"other samples", (Phase.TRAINING,)),
    "a resume that drops the averaged weights": Mutant(
        _resume_without("ema"), r"another validation loss|differs .* at state\.ema", (Phase.TRAINING,)
    ),
    "a resume that drops the states of callbacks": Mutant(
        _resume_without("callbacks"), r"another loss|differs .* at state\.callbacks", (Phase.TRAINING,)
    ),
    "a resume that drops the random state": Mutant(_resume_without("rng"), r"another loss", (Phase.TRAINING,)),
}
