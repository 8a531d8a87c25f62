"""Whole runs with `tune: auto` against the same with `tune: off`.

    python benchmarks/tune.py [--runs NAME …] [--rounds N] [--json]

Each run is built and started in a process of its own with empty caches, as `speedtronic train` would, and its end is
reckoned from the pace of its steps. The figure is the median of the rounds' ratios. `speedtronic bench --only tune`
compares steps by a plan with a loop by hand.
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

from speedtronic import Trainer
from speedtronic.bench.loops import SIZES, Size, config_of
from speedtronic.runtime import build_runtime

MIDDLE = {"vocab_size": 2048, "max_seq_len": 256, "n_layer": 6, "d_model": 384, "n_head": 6}
LARGE = {"vocab_size": 8192, "max_seq_len": 256, "n_layer": 12, "d_model": 576, "n_head": 9}
# A model and the updates of the run.
WHOLE = {
    "tiny, short": (SIZES["tiny"], 100),
    "tiny, long": (SIZES["tiny"], 200_000),
    "small, short": (SIZES["small"], 200),
    "small, long": (SIZES["small"], 20_000),
    "middle": (Size(MIDDLE, micro_batch=4, accumulation=2, steps=0), 3_000),
    "large": (Size(LARGE, micro_batch=2, accumulation=2, steps=0), 2_000),
}


def by_fit(trainer: Trainer, steps: int) -> float:
    """Seconds of so many more steps."""
    started = time.perf_counter()
    trainer.fit(trainer.step + steps)
    return time.perf_counter() - started


def one_run(name: str, tuning: str) -> float:
    """Seconds of a whole run, from its configuration on; the steps after the first hundred are reckoned."""
    size, steps = WHOLE[name]
    with tempfile.TemporaryDirectory() as folder:
        run = {"output_dir": folder, "max_steps": steps, "device": "cpu"}
        started = time.perf_counter()
        trainer, _ = build_runtime(config_of(size, Path(folder), run=run, tune=tuning))
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
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--runs", choices=WHOLE, nargs="+", default=list(WHOLE))
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true", help="one line for a program")
    args = parser.parse_args()
    if args.one:
        print(one_run(*args.one))
        return
    for name in args.runs:
        record = whole(name, args.rounds)
        print(json.dumps(record) if args.json else f"{name:14} {record['speed_over_off']:6.2f} times tune: off")


if __name__ == "__main__":
    main()
