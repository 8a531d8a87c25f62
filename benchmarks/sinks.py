"""What a run pays for being watched: training with every sink on, over the same training with none.

    python benchmarks/sinks.py [--pairs N] [--seconds S] [--every N] [--json]

All sinks are lines on the terminal (here a pipe), a text file, JSON lines, and each tracker of `logging.trackers` that
is installed, in its offline mode. Each arm is a process of its own that trains the same model for about S seconds; the
arms alternate in turned order, and a figure is the median of the pairs' ratios. Two figures: the steps alone, and the
whole `fit`, which waits at its end for the trackers to have all numbers.
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
from importlib.util import find_spec
from pathlib import Path

from speedtronic import build_runtime
from speedtronic.config import SpeedtronicConfig

TRACKERS = [name for name in ("tensorboard", "wandb", "mlflow", "trackio") if find_spec(name)]


def train(folder: Path, *, steps: int, every: int, watched: bool) -> None:
    """Train, and print the seconds of the steps and of everything."""
    logging = {"level": "ERROR"}
    if watched:
        logging = {"file": "log.txt", "json_file": "metrics.jsonl", "trackers": TRACKERS}
    config = SpeedtronicConfig.from_dict(
        {
            "run": {"output_dir": str(folder), "max_steps": steps, "device": "cpu"},
            "model": {"vocab_size": 512, "max_seq_len": 128, "n_layer": 4, "d_model": 256, "n_head": 8, "d_ff": 1024},
            "data": {"micro_batch_size": 8, "target_batch_size": 8, "num_tokens": 10**6},
            "scheduler": {"name": "constant", "warmup_steps": 0},
            "checkpoint": {"enabled": False},
            "logging": {**logging, "every_steps": every},
        }
    )
    trainer, _ = build_runtime(config)
    trainer.fit(10)  # imports, the trackers' first contact
    started = time.perf_counter()
    result = trainer.fit()
    with trainer.logger:
        pass
    print(json.dumps({"steps_s": result.elapsed_s, "whole_s": time.perf_counter() - started}))


def arm(*, steps: int, every: int, watched: bool) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        offline = {
            "WANDB_MODE": "offline",
            "WANDB_SILENT": "true",
            "MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow.db",
            "TRACKIO_DIR": f"{folder}/trackio",
        }
        command = [sys.executable, __file__, "--arm", "watched" if watched else "alone", "--folder", folder]
        done = subprocess.run(
            [*command, "--steps", str(steps), "--every", str(every)],
            env={**os.environ, **offline},
            check=True,
            capture_output=True,
            text=True,
        )
    times: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long each arm trains, about")
    parser.add_argument("--every", type=int, default=1, help="logging.every_steps")
    parser.add_argument("--json", action="store_true", help="one line for a program")
    parser.add_argument("--arm", choices=["watched", "alone"], help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, default=50, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.arm:
        train(args.folder, steps=args.steps + 10, every=args.every, watched=args.arm == "watched")
        return
    pace = arm(steps=50, every=args.every, watched=False)["steps_s"] / 50
    steps = max(20, round(args.seconds / pace))
    ratios: dict[str, list[float]] = {"steps_s": [], "whole_s": []}
    alone: list[float] = []
    for pair in range(args.pairs):
        order = (True, False) if pair % 2 else (False, True)
        times = {watched: arm(steps=steps, every=args.every, watched=watched) for watched in order}
        alone.append(times[False]["steps_s"])
        for name, values in ratios.items():
            values.append(times[True][name] / times[False][name])
    if args.json:
        print(json.dumps({"benchmark": "sinks", "trackers": TRACKERS, "steps": steps, "ratios": ratios}))
        return
    step = statistics.median(alone) / steps
    print(f"{steps} steps of {step * 1e3:.1f} ms, logged every {args.every}; {args.pairs} pairs")
    print(f"trackers: {', '.join(TRACKERS) or 'none is installed'}")
    for name, what in (("steps_s", "the steps"), ("whole_s", "with the end")):
        low, high = min(ratios[name]), max(ratios[name])
        print(f"  {what:13} {statistics.median(ratios[name]):.3f} of none ({low:.3f} to {high:.3f})")
    spread = (max(alone) - min(alone)) / statistics.median(alone)
    print(f"  noise: runs without sinks differ by {100 * spread:.1f}%")


if __name__ == "__main__":
    main()
