"""How long a checkpoint keeps the training loop waiting, and how much it slows the steps while it is written.

The state is that of a model of 48 million parameters and its AdamW, 580 MB. "First" is the first save of a manager,
which takes its memory; "warm" is any later one. Steps are real ones of the same model, in stretches that alternate:
nothing written, a checkpoint being written. Files go to the folder for temporary files (TMPDIR), whose disk counts.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict_saver import async_save

from speedtronic import ReferenceTransformer
from speedtronic.bench.figures import Figure, Settings, interleaved, ratios
from speedtronic.checkpoint import CheckpointManager

State = dict[str, Any]
Wait = Callable[[], object]


class Training:
    """A model, its optimizer, and a batch that it learns again and again."""

    def __init__(self, layers: int, device: str) -> None:
        torch.manual_seed(0)
        self.model = ReferenceTransformer(vocab_size=8192, block_size=64, n_layer=layers, d_model=512, n_head=8).to(
            device
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        self._ids = torch.randint(0, 8192, (1, 65), device=device)
        self.step()

    def step(self) -> None:
        self.model(input_ids=self._ids[:, :-1], labels=self._ids[:, 1:])["loss"].backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self._ids.is_cuda:
            torch.cuda.synchronize()

    def state(self) -> State:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "step": 1}


# ---------------------------------------------------------------------- contenders

# Each starts a save of a state in a folder, and returns what waits for its end.


def by_torch_save(state: State, folder: Path) -> Wait:
    torch.save(state, folder / "state.pt")
    return lambda: None


def by_synced_torch_save(state: State, folder: Path) -> Wait:
    with (folder / "state.pt").open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    return lambda: None


def by_dcp(state: State, folder: Path) -> Wait:
    """torch.distributed.checkpoint.async_save, of one process."""
    saved = async_save(state, checkpoint_id=folder / "dcp", no_dist=True)
    assert isinstance(saved, Future)
    return saved.result


def by_save(state: State, folder: Path) -> Wait:
    CheckpointManager(folder / "sync").save(1, state)
    return lambda: None


def by_first_save_async(state: State, folder: Path) -> Wait:
    manager = CheckpointManager(folder / "first")
    manager.save_async(1, state)

    def finish() -> None:
        manager.wait()
        manager.close()

    return finish


class Warm:
    """A manager that has saved before."""

    def __init__(self, state: State, folder: Path) -> None:
        self.manager = CheckpointManager(folder / "warm", keep_last=1)
        self.step = 0
        self(state, folder)()

    def __call__(self, state: State, folder: Path) -> Wait:
        self.step += 1
        self.manager.save_async(self.step, state)
        return self.manager.wait


# ---------------------------------------------------------------------- rows


def training_of(settings: Settings) -> Training:
    return Training(1 if settings.quick else 14, settings.device)


def blocked(settings: Settings) -> Iterator[Figure]:
    """How long a save keeps its caller, over `torch.save` of the same state."""
    warnings.filterwarnings("ignore", "torch.distributed is disabled")  # DCP says so at each save
    training = training_of(settings)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        warm = Warm(training.state(), folder)
        saves: dict[str, Callable[[State, Path], Wait]] = {
            "torch.save": by_torch_save,
            "torch.save + fsync": by_synced_torch_save,
            "DCP async_save": by_dcp,
            "save, durable on return": by_save,
            "save_async, first": by_first_save_async,
            "save_async, warm": warm,
        }
        clocks = {name: partial(_seconds_blocked, training, save, folder) for name, save in saves.items()}
        try:
            seconds = interleaved(clocks, settings.rounds_or(7))
        finally:
            warm.manager.close()
    for name in list(saves)[1:]:
        goal = 0.25 if name == "save_async, warm" else None
        yield Figure(name=f"{name} ÷ torch.save", rounds=ratios(seconds[name], seconds["torch.save"]), at_most=goal)


def _seconds_blocked(training: Training, save: Callable[[State, Path], Wait], folder: Path) -> float:
    training.step()
    started = time.perf_counter()
    wait = save(training.state(), folder)
    seconds = time.perf_counter() - started
    wait()
    _empty(folder)
    return seconds


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        if path.name == "warm":
            continue
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
    os.sync()  # what one has left in the cache must not be written during the next


def slowdown(settings: Settings) -> Iterator[Figure]:
    """A step while a checkpoint is written over those of the stretches before and after."""
    training = training_of(settings)
    stretch = 0.1 if settings.quick else 5.0
    steps: list[float] = []
    durable: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        save = Warm(training.state(), Path(folder))
        before = _step_seconds(training, lambda elapsed: elapsed < stretch)
        for _ in range(settings.rounds_or(5)):
            save.step += 1
            started = time.perf_counter()
            saved = save.manager.save_async(save.step, training.state())
            during = _step_seconds(training, partial(_is_written_still, saved))
            durable.append(time.perf_counter() - started)
            save.manager.wait()
            os.sync()
            after = _step_seconds(training, lambda elapsed: elapsed < stretch)
            steps.append(2 * during / (before + after))
            before = after
        save.manager.close()
    yield Figure(name="a step while a checkpoint is written", rounds=tuple(steps), at_most=1.05)
    yield Figure(name="seconds until it is durable", rounds=tuple(durable))


def _is_written_still(saved: Future[Path], elapsed: float) -> bool:
    return not saved.done()


def _step_seconds(training: Training, goes_on: Callable[[float], bool]) -> float:
    started = time.perf_counter()
    steps = 0
    while steps == 0 or goes_on(time.perf_counter() - started):
        training.step()
        steps += 1
    return (time.perf_counter() - started) / steps
