"""What a step of several ranks costs by `Trainer.fit`, over a loop with `DistributedDataParallel` written by hand.

    python benchmarks/ranks.py [--ranks N] [--device cpu|cuda] [--rounds N] [--steps N] [--json]

Each rank is a process, on CPUs with one thread. Both ways train the same model with AdamW, accumulate over two micro
batches, and clip; the loop by hand synchronises once an update (`no_sync`). Rounds alternate between them in the same
processes; a figure is the median of the rounds' ratios, on rank 0. On a busy machine the ratio of processor time says
more than that of time: it is without the waits.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from speedtronic import ReferenceTransformer, SpeedtronicConfig, Trainer
from speedtronic.metrics import MetricLogger
from speedtronic.parallel.start import join_group

SHAPE: dict[str, Any] = {
    "vocab_size": 512,
    "max_seq_len": 128,
    "n_layer": 4,
    "d_model": 256,
    "n_head": 8,
    "d_ff": 1024,
}
MICRO_BATCH, MICRO_BATCHES = 4, 2

Run = Callable[[int], float]


class Batches:
    """The batches of one rank, again and again."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.num_replicas = rank, ranks
        generator = torch.Generator().manual_seed(rank)
        ids = torch.randint(0, SHAPE["vocab_size"], (16, MICRO_BATCH, SHAPE["max_seq_len"] + 1), generator=generator)
        self._batches = [{"input_ids": row[:, :-1].clone(), "labels": row[:, 1:].clone()} for row in ids]

    def __iter__(self) -> Any:
        return iter(self._batches)


def make_model(device: torch.device) -> ReferenceTransformer:
    torch.manual_seed(0)
    return ReferenceTransformer(**SHAPE).to(device)


def by_hand(batches: Batches, device: torch.device) -> Run:
    module = make_model(device)
    model = DistributedDataParallel(module, device_ids=[device.index] if device.type == "cuda" else None)
    optimizer = torch.optim.AdamW(module.parameters())
    source = itertools.cycle(batches)

    def run(steps: int) -> float:
        started = time.perf_counter()
        for _ in range(steps):
            total: Tensor | float = 0.0
            for number in range(MICRO_BATCHES):
                batch = {key: value.to(device, non_blocking=True) for key, value in next(source).items()}
                with model.no_sync() if number + 1 < MICRO_BATCHES else nullcontext():
                    loss = model(**batch)["loss"] / MICRO_BATCHES
                    loss.backward()
                total = total + loss.detach()
            nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            float(total)  # as a log of each step reads it
        return time.perf_counter() - started

    return run


def by_fit(batches: Batches, device: torch.device, folder: str) -> Run:
    model = make_model(device)
    config = SpeedtronicConfig.from_dict(
        {
            "run": {"output_dir": folder, "max_steps": 10**6},
            "model": SHAPE,
            "data": {
                "block_size": SHAPE["max_seq_len"],
                "micro_batch_size": MICRO_BATCH,
                "target_batch_size": MICRO_BATCH * MICRO_BATCHES * batches.num_replicas,
            },
            "optimizer": {"grad_clip": 1.0},
            "checkpoint": {"enabled": False},
        }
    )
    logger = MetricLogger(level="ERROR", json_file=Path(folder) / "fit.jsonl" if batches.rank == 0 else None)
    optimizer = torch.optim.AdamW(model.parameters())
    trainer = Trainer(model, optimizer, batches, device=device, config=config, logger=logger)
    return lambda steps: trainer.fit(trainer.step + steps).elapsed_s


def measure(args: argparse.Namespace) -> None:
    """The work of one rank."""
    group, device = join_group(SpeedtronicConfig().parallel, args.device)
    batches = Batches(group.rank, group.size)
    with tempfile.TemporaryDirectory() as folder:
        runs = {"by hand": by_hand(batches, device), "fit": by_fit(batches, device, folder)}
        seconds: dict[str, list[float]] = {name: [] for name in runs}
        busy: dict[str, list[float]] = {name: [] for name in runs}
        for run in runs.values():
            run(3)
        for number in range(args.rounds):
            for name in list(runs) if number % 2 == 0 else list(runs)[::-1]:
                group.reduce(1)  # begin together
                began = time.process_time()
                seconds[name].append(runs[name](args.steps))
                busy[name].append(time.process_time() - began)
    if group.rank:
        return
    ratios = [fit / hand for fit, hand in zip(seconds["fit"], seconds["by hand"], strict=True)]
    processor = statistics.median(fit / hand for fit, hand in zip(busy["fit"], busy["by hand"], strict=True))
    if args.json:
        report = {"benchmark": "ranks", "ranks": group.size, "device": device.type, "steps": args.steps}
        print(
            json.dumps({**report, "ratio": statistics.median(ratios), "processor_ratio": processor, "ratios": ratios})
        )
        return
    print(f"{group.size} ranks on {device.type}: {args.steps} steps, {args.rounds} rounds, torch {torch.__version__}")
    for name, times in seconds.items():
        print(f"  {name:10} {1e3 * statistics.median(times) / args.steps:8.3f} ms per step")
    spread = f"({min(ratios):.3f} to {max(ratios):.3f})"
    print(f"  ratio      {statistics.median(ratios):8.3f}  {spread}; of processor time {processor:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--json", action="store_true", help="one line for a program")
    args = parser.parse_args()
    if "RANK" in os.environ:
        measure(args)
        return
    if args.device == "cuda" and torch.cuda.device_count() < args.ranks:
        print(f"{args.ranks} ranks need as many cards, and here are {torch.cuda.device_count()}: nothing was measured")
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"WORLD_SIZE": args.ranks, "LOCAL_WORLD_SIZE": args.ranks, "MASTER_PORT": port}
    names = {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1", **{key: str(value) for key, value in common.items()}}
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, *sys.argv[1:]],
            env={**os.environ, **names, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(args.ranks)
    ]
    sys.exit(max(rank.wait() for rank in ranks))


if __name__ == "__main__":
    main()
