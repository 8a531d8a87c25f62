"""What `Trainer.fit` costs over the same steps written by hand, logging each step to a file.

    python benchmarks/loop_overhead.py [--rounds N] [--steps N] [--size tiny|small] [--json]

Rounds alternate between the two (A B A B …) in one process; the figure is the median of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from speedtronic import ReferenceTransformer, SpeedtronicConfig, Trainer
from speedtronic.metrics import MetricLogger

SIZES = {
    # vocabulary, sequence, layers, width, heads, key-value heads, d_ff, micro batch, accumulation
    "tiny": (128, 32, 2, 64, 4, 2, 128, 1, 2),
    "small": (512, 128, 4, 256, 8, 8, 1024, 8, 1),
}

Batches = list[dict[str, Tensor]]


def make(size: str) -> tuple[ReferenceTransformer, Batches, int]:
    vocabulary, length, layers, width, heads, kv_heads, d_ff, micro, accumulation = SIZES[size]
    torch.manual_seed(0)
    model = ReferenceTransformer(
        vocab_size=vocabulary,
        block_size=length,
        n_layer=layers,
        d_model=width,
        n_head=heads,
        n_kv_head=kv_heads,
        d_ff=d_ff,
    )
    ids = torch.randint(0, vocabulary, (64, micro, length + 1))
    return model, [{"input_ids": row[:, :-1], "labels": row[:, 1:]} for row in ids], accumulation


def by_hand(size: str, steps: int, log: Path) -> float:
    """Seconds of a loop that anyone would write: it reads the loss and logs it, every step."""
    model, batches, accumulation = make(size)
    optimizer = torch.optim.AdamW(model.parameters())
    with log.open("w", encoding="utf-8") as file:
        started = time.perf_counter()
        position = 0
        for step in range(1, steps + 1):
            total = 0.0
            for _ in range(accumulation):
                loss = model(**batches[position % len(batches)])["loss"] / accumulation
                loss.backward()
                total += loss.item()
                position += 1
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            file.write(json.dumps({"step": step, "loss": total}) + "\n")
            file.flush()
        return time.perf_counter() - started


def by_fit(size: str, steps: int, log: Path) -> float:
    """Seconds of the same steps by `Trainer.fit`."""
    model, batches, accumulation = make(size)
    micro = batches[0]["input_ids"].shape[0]
    config = SpeedtronicConfig(data={"micro_batch_size": micro, "target_batch_size": micro * accumulation})
    optimizer = torch.optim.AdamW(model.parameters())
    with MetricLogger(level="ERROR", json_file=log) as logger:
        trainer = Trainer(model, optimizer, batches, device="cpu", config=config, logger=logger)
        started = time.perf_counter()
        trainer.fit(steps)
        return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--json", action="store_true", help="one line for a program")
    args = parser.parse_args()
    contenders: dict[str, Callable[[str, int, Path], float]] = {"by hand": by_hand, "fit": by_fit}
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    with tempfile.TemporaryDirectory() as folder:
        for run in contenders.values():
            run(args.size, 20, Path(folder) / "warmup.jsonl")
        for number in range(args.rounds):
            for name, run in contenders.items():
                seconds[name].append(run(args.size, args.steps, Path(folder) / f"{name}-{number}.jsonl"))
    ratios = [fit / hand for fit, hand in zip(seconds["fit"], seconds["by hand"], strict=True)]
    overhead = statistics.median(ratios) - 1
    if args.json:
        print(json.dumps({"benchmark": "loop_overhead", "size": args.size, "overhead": overhead, "ratios": ratios}))
        return
    print(f"{args.size}: {args.steps} steps, {args.rounds} rounds, torch {torch.__version__}")
    for name, values in seconds.items():
        print(f"  {name:8} {1e3 * statistics.median(values) / args.steps:8.3f} ms per step")
    print(f"  overhead of fit: {100 * overhead:+.1f}% (median of {args.rounds} ratios)")


if __name__ == "__main__":
    main()
