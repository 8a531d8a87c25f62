"""What `tune: auto` is worth: `fit` against a loop by hand, and whole runs against `tune: off`.

    python benchmarks/tune.py [--size tiny|small] [--rounds N] [--steps N] [--json]
    python benchmarks/tune.py --whole [--runs NAME …] [--rounds N] [--json]

The first measures the plan without a limit of time, then alternates between both (A B A B …) in one process, after the
compiler has done its work; the figure is the median of the rounds' ratios. The second builds and starts each run in a
process of its own with empty caches, as `speedtronic train` would, and reckons its end from the pace of its steps.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from speedtronic import ReferenceTransformer, Trainer
from speedtronic.runtime import build_runtime, tune_from_config
from speedtronic.tuning.plan import in_words

MODELS: dict[str, dict[str, Any]] = {
    "tiny": {
        "vocab_size": 128,
        "max_seq_len": 32,
        "n_layer": 2,
        "d_model": 64,
        "n_head": 4,
        "n_kv_head": 2,
        "d_ff": 128,
    },
    "small": {"vocab_size": 512, "max_seq_len": 128, "n_layer": 4, "d_model": 256, "n_head": 8},
    "middle": {"vocab_size": 2048, "max_seq_len": 256, "n_layer": 6, "d_model": 384, "n_head": 6},
    "large": {"vocab_size": 8192, "max_seq_len": 256, "n_layer": 12, "d_model": 576, "n_head": 9},
}
BATCHES = {"tiny": (1, 2), "small": (8, 8), "middle": (4, 8), "large": (2, 4)}
# Whole runs: a model and the updates of the run.
WHOLE = {
    "tiny, short": ("tiny", 100),
    "tiny, long": ("tiny", 200_000),
    "small, short": ("small", 200),
    "small, long": ("small", 20_000),
    "middle": ("middle", 3_000),
    "large": ("large", 2_000),
}


def config(size: str, steps: int, folder: Path, tuning: str) -> dict[str, Any]:
    micro, target = BATCHES[size]
    return {
        "model": MODELS[size],
        "run": {"max_steps": steps, "output_dir": str(folder)},
        "data": {"micro_batch_size": micro, "target_batch_size": target, "num_tokens": 200_000},
        "precision": {"mode": "fp32"},
        "checkpoint": {"enabled": False},
        "logging": {"level": "ERROR", "json_file": "log.jsonl"},
        "tune": tuning,
    }


def by_hand(size: str, steps: int) -> float:
    """Seconds of a loop that anyone would write: forward, backward, AdamW with its defaults, and the loss is read."""
    model = ReferenceTransformer(**MODELS[size])
    optimizer = torch.optim.AdamW(model.parameters())
    micro, target = BATCHES[size]
    ids = torch.randint(0, MODELS[size]["vocab_size"], (64, micro, MODELS[size]["max_seq_len"] + 1))
    position = 0
    started = time.perf_counter()
    for _ in range(steps):
        for _ in range(target // micro):
            row = ids[position % len(ids)]
            loss = model(row[:, :-1], row[:, 1:])["loss"] / (target // micro)
            loss.backward()
            loss.item()
            position += 1
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return time.perf_counter() - started


def by_fit(trainer: Trainer, steps: int) -> float:
    """Seconds of so many more steps."""
    started = time.perf_counter()
    trainer.fit(trainer.step + steps)
    return time.perf_counter() - started


def compare(size: str, rounds: int, steps: int, folder: Path) -> dict[str, Any]:
    threads = torch.get_num_threads()
    plan = tune_from_config(config(size, 10**6, folder, "auto"))
    (folder / "plan.json").write_text(plan.to_json(), encoding="utf-8")
    trainer, _ = build_runtime(config(size, 10**6, folder, str(folder / "plan.json")))
    tuned = torch.get_num_threads()
    by_fit(trainer, 20)
    ratios = []
    for _ in range(rounds):
        torch.set_num_threads(threads)
        hand = by_hand(size, steps)
        torch.set_num_threads(tuned)
        ratios.append(hand / by_fit(trainer, steps))
    return {
        "benchmark": "tune",
        "size": size,
        "plan": in_words(plan.choices.changes(plan.base)),
        "speed_over_hand": statistics.median(ratios),
        "ratios": ratios,
        "table": plan.table(),
    }


def one_run(name: str, tuning: str) -> float:
    """Seconds of a whole run, from its configuration on; the steps after the first hundred are reckoned."""
    size, steps = WHOLE[name]
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        trainer, _ = build_runtime(config(size, steps, Path(folder), tuning))
        first = min(steps, 20)
        by_fit(trainer, first)
        begun = time.perf_counter() - started
        if steps == first:
            return begun
        some = min(steps - first, 80)
        return begun + by_fit(trainer, some) / some * (steps - first)


def whole(name: str, rounds: int) -> dict[str, Any]:
    ratios = []
    for _ in range(rounds):
        seconds = {}
        for tuning in ("off", "auto"):
            with tempfile.TemporaryDirectory() as caches:
                empty = {"SPEEDTRONIC_CACHE": caches, "TORCHINDUCTOR_CACHE_DIR": f"{caches}/inductor"}
                command = [sys.executable, __file__, "--one", name, tuning]
                done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=os.environ | empty)
                seconds[tuning] = float(done.stdout.splitlines()[-1])
        ratios.append(seconds["off"] / seconds["auto"])
    return {"benchmark": "tune, whole runs", "run": name, "speed_over_off": statistics.median(ratios), "ratios": ratios}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--size", choices=MODELS, nargs="+", default=["tiny", "small"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--whole", action="store_true", help="whole runs against tune: off")
    parser.add_argument("--runs", choices=WHOLE, nargs="+", default=list(WHOLE))
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true", help="one line for a program")
    args = parser.parse_args()
    if args.one:
        print(one_run(*args.one))
        return
    if args.whole:
        for name in args.runs:
            record = whole(name, args.rounds)
            print(json.dumps(record) if args.json else f"{name:14} {record['speed_over_off']:6.2f} times tune: off")
        return
    for size in args.size:
        with tempfile.TemporaryDirectory() as folder:
            record = compare(size, args.rounds, args.steps, Path(folder))
        if args.json:
            print(json.dumps(record))
        else:
            print(
                f"{size}: {record['speed_over_hand']:.2f} times the loop by hand ({record['plan']})\n{record['table']}"
            )


if __name__ == "__main__":
    main()
