"""What `Trainer.fit` costs over the same steps written by hand, logging each step to a file.

    python benchmarks/loop_overhead.py [--rounds N] [--steps N] [--size tiny|small] [--compile] [--json]

`fit` has two rows: a `Trainer` over the batches of the loop by hand, and a `build_runtime` with the loader of its
configuration. With `--compile` all of them train by `torch.compile` and a fused AdamW. Rounds alternate between the
rows (A B C A B C …) in one process, in turned order; a figure is the median of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from speedtronic import ReferenceTransformer, SpeedtronicConfig, Trainer, build_runtime
from speedtronic.metrics import MetricLogger

MODELS = {
    "tiny": {
        "vocab_size": 128,
        "max_seq_len": 32,
        "n_layer": 2,
        "d_model": 64,
        "n_head": 4,
        "n_kv_head": 2,
        "d_ff": 128,
    },
    "small": {"vocab_size": 512, "max_seq_len": 128, "n_layer": 4, "d_model": 256, "n_head": 8, "d_ff": 1024},
}
BATCHES = {"tiny": (1, 2), "small": (8, 1)}
"""The micro batch, and how many of them make an update."""

Run = Callable[[int], float]
"""Trains so many steps more, and returns the seconds they took."""


def make(size: str) -> tuple[ReferenceTransformer, list[dict[str, Tensor]]]:
    shape: dict[str, Any] = MODELS[size]
    torch.manual_seed(0)
    model = ReferenceTransformer(**shape)
    ids = torch.randint(0, shape["vocab_size"], (64, BATCHES[size][0], shape["max_seq_len"] + 1))
    return model, [{"input_ids": row[:, :-1].clone(), "labels": row[:, 1:].clone()} for row in ids]


def config_of(size: str, *, compiled: bool, folder: Path) -> SpeedtronicConfig:
    shape: dict[str, Any] = MODELS[size]
    micro, accumulation = BATCHES[size]
    return SpeedtronicConfig.from_dict(
        {
            "run": {"output_dir": str(folder), "max_steps": 10**6, "device": "cpu"},
            "model": shape,
            "data": {
                "block_size": shape["max_seq_len"],
                "micro_batch_size": micro,
                "target_batch_size": micro * accumulation,
                "num_tokens": 10**6,
            },
            "optimizer": {"fused": compiled},
            "scheduler": {"name": "constant", "warmup_steps": 0},
            "checkpoint": {"enabled": False},
            "logging": {"level": "ERROR", "json_file": "log.jsonl"},
            "compile": compiled,
        }
    )


def by_hand(size: str, folder: Path, *, compiled: bool) -> Run:
    """A loop that anyone would write: it reads the loss and logs it, every step."""
    model, batches = make(size)
    optimizer = torch.optim.AdamW(model.parameters(), fused=compiled)
    call: Callable[..., Any] = torch.compile(model) if compiled else model
    accumulation = BATCHES[size][1]
    source = itertools.cycle(batches)
    log = (folder / "by_hand.jsonl").open("w", encoding="utf-8")

    def run(steps: int) -> float:
        started = time.perf_counter()
        for step in range(1, steps + 1):
            total = 0.0
            for batch in itertools.islice(source, accumulation):
                loss = call(**batch)["loss"] / accumulation
                loss.backward()
                total += loss.item()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            log.write(json.dumps({"step": step, "loss": total}) + "\n")
            log.flush()
        return time.perf_counter() - started

    return run


def _timed_fit(trainer: Trainer) -> Run:
    # What a run does once, such as writing its configuration, is no part of a step: `elapsed_s` is without it.
    return lambda steps: trainer.fit(trainer.step + steps).elapsed_s


def by_fit(size: str, folder: Path, *, compiled: bool) -> Run:
    """The same steps by `Trainer.fit`."""
    model, batches = make(size)
    optimizer = torch.optim.AdamW(model.parameters(), fused=compiled)
    logger = MetricLogger(level="ERROR", json_file=folder / "fit.jsonl")
    config = config_of(size, compiled=compiled, folder=folder)
    return _timed_fit(Trainer(model, optimizer, batches, device="cpu", config=config, logger=logger))


def by_runtime(size: str, folder: Path, *, compiled: bool) -> Run:
    """Steps of the same shapes by `build_runtime`, which reads its data from a loader of its own."""
    trainer, _ = build_runtime(config_of(size, compiled=compiled, folder=folder / "runtime"))
    return _timed_fit(trainer)


ROWS = {"by hand": by_hand, "fit": by_fit, "fit of build_runtime": by_runtime}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--size", choices=MODELS, default="tiny")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--compile", action="store_true", help="compile the model, and step with a fused AdamW")
    parser.add_argument("--json", action="store_true", help="one line for a program")
    args = parser.parse_args()
    seconds: dict[str, list[float]] = {name: [] for name in ROWS}
    with tempfile.TemporaryDirectory() as folder:
        runs = {name: make_row(args.size, Path(folder), compiled=args.compile) for name, make_row in ROWS.items()}
        for run in runs.values():
            run(20)
        names = list(runs)
        for number in range(args.rounds):
            turn = number % len(names)
            for name in names[turn:] + names[:turn]:
                seconds[name].append(runs[name](args.steps))
    ratios = {
        name: [row / hand for row, hand in zip(times, seconds["by hand"], strict=True)]
        for name, times in seconds.items()
        if name != "by hand"
    }
    overhead = {name: statistics.median(values) - 1 for name, values in ratios.items()}
    if args.json:
        report = {"benchmark": "loop_overhead", "size": args.size, "compile": args.compile}
        print(json.dumps({**report, "overhead": overhead, "ratios": ratios}))
        return
    how = ", compile + fused" if args.compile else ""
    print(f"{args.size}{how}: {args.steps} steps, {args.rounds} rounds, torch {torch.__version__}")
    for name, times in seconds.items():
        over = f"  {100 * overhead[name]:+.1f}% over the loop by hand" if name in overhead else ""
        print(f"  {name:20} {1e3 * statistics.median(times) / args.steps:8.3f} ms per step{over}")


if __name__ == "__main__":
    main()
