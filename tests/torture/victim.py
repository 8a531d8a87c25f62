"""A small training run that writes down what it trains on, and is killed."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import Dataset, Subset

from speedtronic import runtime
from speedtronic.checkpoint import CheckpointManager
from speedtronic.config import DataConfig
from speedtronic.durable.files import FileSystem
from speedtronic.errors import CheckpointError
from speedtronic.metrics import MetricLogger
from speedtronic.trainer import Callback, RunView, Trainer
from tests.support.configs import tiny
from tests.torture.board import Board, Phase
from tests.torture.disk import Executioner, TorturedFileSystem
from tests.torture.mutants import MUTANTS
from tests.torture.plan import Plan

FINISHED, SAVE_FAILED, NOTHING_SOUND, BROKEN = 0, 10, 11, 12

STEPS = 30
EVERY_STEPS = 3
KEEP_LAST = 2
KEEP_BEST = 1
SAMPLES = 37  # odd, so that each epoch ends with a short batch in the middle of an update
FROZEN = range(8, 20)  # the steps that the callback freezes a weight for


class Numbers(Dataset[dict[str, torch.Tensor]]):
    """Samples that depend on their index and, as augmented ones do, on the generator. The first id is the index."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = (torch.arange(9) * (index + 1) + torch.randint(0, 3, (9,))) % 64
        ids[0] = index
        return {"input_ids": ids[:-1], "labels": ids[1:]}


def numbers(config: DataConfig) -> tuple[Numbers, Subset[dict[str, torch.Tensor]]]:
    """What is trained on, and what is held out to find the best checkpoint by."""
    return Numbers(), Subset(Numbers(), range(4))


class Freezing(Callback):
    """Freezes a weight for the steps of `FROZEN`. Only its own state knows how many there were, and which losses."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_start(self, run: RunView) -> None:
        self._freeze(run)

    def on_step_end(self, run: RunView) -> None:
        assert run.loss is not None
        self.losses.append(run.loss)
        self._freeze(run)

    def _freeze(self, run: RunView) -> None:
        trains = len(self.losses) + 1 not in FROZEN
        run.model.get_parameter("transformer.h.0.mlp.down_proj.weight").requires_grad_(trains)

    def state_dict(self) -> dict[str, Any]:
        return {"losses": torch.tensor(self.losses, dtype=torch.float64)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.losses = state["losses"].tolist()


def config_of(folder: Path, seed: int, *, background: bool, workers: int = 0) -> dict[str, Any]:
    return tiny(
        folder,
        run={"max_steps": STEPS, "seed": seed},
        model={"vocab_size": 64, "dropout": 0.2},
        data={
            "dataset": "tests.torture.victim:numbers",
            "micro_batch_size": 2,
            "target_batch_size": 4,
            "shuffle": True,
            "drop_last": False,
            "num_workers": workers,
        },
        optimizer={"ema": 0.9},
        eval={"every_steps": EVERY_STEPS},
        callbacks=["tests.torture.victim:Freezing"],
        checkpoint={
            "every_steps": EVERY_STEPS,
            "keep_last": KEEP_LAST,
            "keep_best": KEEP_BEST,
            "background": background,
        },
        logging={"level": "WARNING", "json_file": "metrics.jsonl", "progress": "off"},
    )


def live(
    folder: Path,
    journal: Path,
    plan: Plan,
    board: Board,
    *,
    seed: int,
    background: bool,
    resume: bool,
    mutant: str | None = None,
) -> int:
    """Train in this process to the end, as far as the plan lets it; return the exit code.

    Args:
        folder: of the run.
        journal: file for what happened in this life, one JSON object a line.
        plan: what is to go wrong.
        board: told what is being done.
        seed: of the run.
        background: whether checkpoints are written by their own thread.
        resume: whether to go on from a checkpoint.
        mutant: name of a fault to build into the code itself.
    """
    board.enter(Phase.START)
    executioner = Executioner(plan, board)
    if plan.kill is not None and plan.kill.phase is Phase.START:
        executioner.strike_soon()
    disk: FileSystem = TorturedFileSystem(plan, board, executioner)
    if mutant is not None:
        disk = MUTANTS[mutant].infect(disk)
    _instrument(disk, Journal(journal), executioner, board)
    try:
        config = config_of(folder, seed, background=background, workers=plan.workers)
        result = runtime.train_from_config(config, resume=resume)
    except CheckpointError:
        traceback.print_exc()
        return NOTHING_SOUND
    board.enter(Phase.END)
    return FINISHED if result.save_error is None else SAVE_FAILED


class Journal:
    """What a life did: each line is in the file before the call returns, and outlives the process."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._samples: list[int] = []

    def note(self, kind: str, **fields: Any) -> None:
        os.write(self._file, json.dumps({"kind": kind, **fields}).encode("ascii") + b"\n")

    def samples(self, indices: list[int]) -> None:
        self._samples += indices

    def on_event(self, event: str, payload: dict[str, Any]) -> None:
        if event == "train_step":
            samples, self._samples = self._samples, []
            self.note("step", step=payload["step"], loss=payload["loss"].hex(), samples=samples)
        elif event == "eval":
            self.note("eval", step=payload["step"], loss=payload["loss"].hex())
        elif event == "checkpoint" and payload["path"] is not None:
            self.note("checkpoint", step=payload["step"], name=Path(payload["path"]).name)


def _instrument(disk: FileSystem, journal: Journal, executioner: Executioner, board: Board) -> None:
    """Let the parts of a run report to journal and board. The process ends with the life, so nothing is put back."""
    runtime.CheckpointManager = partial(CheckpointManager, fs=disk)  # type: ignore[misc, assignment, attr-defined]
    _watch_logger(journal, executioner)
    _watch_loading(journal, board)
    _watch_snapshots(executioner, board)
    _watch_training(journal, executioner)


def _watch_logger(journal: Journal, executioner: Executioner) -> None:
    build_logger = runtime.build_logger

    def build(config: Any) -> MetricLogger:
        logger = build_logger(config)
        logger.add_hook(journal)
        return logger

    runtime.build_logger = build


def _watch_loading(journal: Journal, board: Board) -> None:
    load_latest = CheckpointManager.load_latest

    def load(manager: CheckpointManager) -> dict[str, Any] | None:
        board.enter(Phase.LOAD)
        state = load_latest(manager)
        if state is not None and manager.loaded_path is not None:
            journal.note("loaded", step=state["step"], name=manager.loaded_path.name)
        return state

    CheckpointManager.load_latest = load  # type: ignore[method-assign, assignment]


def _watch_snapshots(executioner: Executioner, board: Board) -> None:
    save, save_async = CheckpointManager.save, CheckpointManager.save_async

    def snapshot(write: Callable[..., Any]) -> Callable[..., Any]:
        def watched(manager: CheckpointManager, step: int, state: dict[str, Any]) -> Any:
            with executioner.operation(Phase.SNAPSHOT) as middle:
                if middle:
                    executioner.strike_soon()
                written = write(manager, step, state)
            board.enter(Phase.TRAINING)
            if isinstance(written, Future):
                written.add_done_callback(lambda future: board.writer_is_idle())
            return written

        return watched

    CheckpointManager.save = snapshot(save)  # type: ignore[method-assign, assignment]
    CheckpointManager.save_async = snapshot(save_async)  # type: ignore[method-assign, assignment]


def _watch_training(journal: Journal, executioner: Executioner) -> None:
    """A batch that is used, and an optimizer that has stepped, are each a place in training to be killed at.

    A batch is looked at where it is used: workers read ahead, and what they read may never be trained on.
    """
    move_batch = Trainer._move_batch

    def use(trainer: Trainer, batch: dict[str, torch.Tensor]) -> Any:
        journal.samples(batch["input_ids"][:, 0].tolist())
        with executioner.operation(Phase.TRAINING) as middle:
            if middle:
                executioner.strike_soon()
        return move_batch(trainer, batch)

    def stepped(*_: Any) -> None:
        with executioner.operation(Phase.TRAINING):
            pass

    Trainer._move_batch = use  # type: ignore[method-assign]
    register_optimizer_step_post_hook(stepped)


def in_child(log: Path, work: Callable[[], int]) -> int:
    """Fork; let the child do the work, with its output in a file, and end. Returns its process id."""
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(output, 1)
    os.dup2(output, 2)
    code = BROKEN
    try:
        code = work()
    except BaseException:  # noqa: BLE001 - the edge of a process: the parent learns of it by the exit code
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
