"""How long a checkpoint keeps the training loop waiting, and how much it slows the steps while it is written.

    python benchmarks/checkpoint.py [--rounds N] [--layers N] [--device D] [--folder PATH] [--json]

The state is that of a model of 48 million parameters and its AdamW, 580 MB. In each round all contenders save it in
turn (A B C A B C …), each into an empty place; the figures are medians of the rounds' ratios. "first" is the first save
of a manager, which takes its memory; "warm" is any later one. Steps are real ones of the same model, in stretches that
alternate: nothing written, a checkpoint being written. Writing goes to `--folder`, whose disk counts.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from torch.distributed import checkpoint as dcp

from speedtronic import ReferenceTransformer
from speedtronic.checkpoint import CheckpointManager

WARM = "save_async, warm"
STRETCH_S = 5.0

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
    saved = dcp.async_save(state, checkpoint_id=folder / "dcp", no_dist=True)
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


# ---------------------------------------------------------------------- measuring


def blocked(
    training: Training, contenders: dict[str, Callable[[State, Path], Wait]], rounds: int, folder: Path
) -> dict[str, list[float]]:
    """Seconds that each contender keeps its caller, in each round."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, save in contenders.items():
            training.step()
            started = time.perf_counter()
            wait = save(training.state(), folder)
            seconds[name].append(time.perf_counter() - started)
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


def slowdown(training: Training, rounds: int, folder: Path) -> tuple[list[float], list[float]]:
    """Step time while a checkpoint is written ÷ that of the stretches before and after, and seconds until durable."""
    save = Warm(training.state(), folder)
    ratios: list[float] = []
    durations: list[float] = []
    before = _step_seconds(training, lambda elapsed: elapsed < STRETCH_S)
    for _ in range(rounds):
        save.step += 1
        started = time.perf_counter()
        saved = save.manager.save_async(save.step, training.state())
        during = _step_seconds(training, lambda elapsed, saved=saved: not saved.done())
        durations.append(time.perf_counter() - started)
        save.manager.wait()
        os.sync()
        after = _step_seconds(training, lambda elapsed: elapsed < STRETCH_S)
        ratios.append(2 * during / (before + after))
        before = after
    save.manager.close()
    return ratios, durations


def _step_seconds(training: Training, goes_on: Callable[[float], bool]) -> float:
    started = time.perf_counter()
    steps = 0
    while steps == 0 or goes_on(time.perf_counter() - started):
        training.step()
        steps += 1
    return (time.perf_counter() - started) / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--layers", type=int, default=14)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--folder", help="where to write; the folder for temporary files unless given")
    parser.add_argument("--only", choices=["blocked", "steps"], help="one of the two tables")
    parser.add_argument("--json", action="store_true", help="one line for a program")
    args = parser.parse_args()
    warnings.filterwarnings("ignore", "torch.distributed is disabled")  # DCP says so at each save
    training = Training(args.layers, args.device)
    report: dict[str, Any] = {
        "benchmark": "checkpoint",
        "bytes": 3 * sum(parameter.nbytes for parameter in training.model.parameters()),
        "device": args.device,
        "processors": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "rounds": args.rounds,
    }
    if args.only != "steps":
        with tempfile.TemporaryDirectory(dir=args.folder) as name:
            report["blocked_s"] = measured_blocking(training, args.rounds, Path(name))
    if args.only != "blocked":
        with tempfile.TemporaryDirectory(dir=args.folder) as name:
            report["step_ratios"], report["durable_s"] = slowdown(training, args.rounds, Path(name))
    print(json.dumps(report) if args.json else table(report))


def measured_blocking(training: Training, rounds: int, folder: Path) -> dict[str, list[float]]:
    warm = Warm(training.state(), folder)
    contenders: dict[str, Callable[[State, Path], Wait]] = {
        "torch.save": by_torch_save,
        "torch.save + fsync": by_synced_torch_save,
        "DCP async_save": by_dcp,
        "save": by_save,
        "save_async, first": by_first_save_async,
        WARM: warm,
    }
    try:
        return blocked(training, contenders, rounds, folder)
    finally:
        warm.manager.close()


def table(report: dict[str, Any]) -> str:
    lines = [
        f"{report['bytes'] / 1e6:.0f} MB, {report['device']}, {report['rounds']} rounds, {report['processors']} "
        f"processors, {report['threads']} threads, torch {report['torch']}"
    ]
    if "blocked_s" in report:
        lines.append("  keeps the loop waiting        seconds   ÷ torch.save   (lowest … highest)")
        reference = report["blocked_s"]["torch.save"]
        for name, seconds in report["blocked_s"].items():
            ratios = [mine / its for mine, its in zip(seconds, reference, strict=True)]
            lines.append(f"    {name:22} {statistics.median(seconds):10.3f} {_spread(ratios)}")
    if "step_ratios" in report:
        lines.append("  a step while one is written ÷ without")
        lines.append(f"    {'':33} {_spread(report['step_ratios'])}")
        lines.append(f"    written and durable after {statistics.median(report['durable_s']):.1f} s")
    return "\n".join(lines)


def _spread(ratios: list[float]) -> str:
    return f"{statistics.median(ratios):12.3f}   ({min(ratios):.3f} … {max(ratios):.3f})"


if __name__ == "__main__":
    main()
