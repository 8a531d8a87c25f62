"""How soon a command answers, and how soon a run has made its first steps.

    python benchmarks/startup.py [--rounds N] [--json]

`--help`, `validate` and `schema` are measured as a share of `import torch`, and a whole `speedtronic train` of four
steps as a multiple of `startup_by_hand.py`, which does the same in plain torch. Rounds take each command once, in turn;
the figures are medians of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SMOKE = str(Path(__file__).parents[1] / "examples" / "smoke.yaml")
TORCH = "import torch"
BY_HAND = "startup_by_hand.py"
COMMANDS = {
    TORCH: ["-c", "import torch"],
    "speedtronic --help": ["-m", "speedtronic", "--help"],
    "speedtronic validate": ["-m", "speedtronic", "validate", SMOKE],
    "speedtronic schema": ["-m", "speedtronic", "schema"],
    BY_HAND: [str(Path(__file__).with_name(BY_HAND))],
    "speedtronic train": ["-m", "speedtronic", "train", SMOKE, "run.max_steps=4"],
}
BASELINES = {
    "speedtronic --help": TORCH,
    "speedtronic validate": TORCH,
    "speedtronic schema": TORCH,
    "speedtronic train": BY_HAND,
}


def seconds(name: str) -> float:
    with tempfile.TemporaryDirectory() as folder:
        output = [f"run.output_dir={folder}"] if name == "speedtronic train" else []
        started = time.perf_counter()
        subprocess.run(
            [sys.executable, *COMMANDS[name], *output],
            check=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", action="store_true", help="one line for a program")
    args = parser.parse_args()
    for name in COMMANDS:  # fills the page cache
        seconds(name)
    rounds = [{name: seconds(name) for name in COMMANDS} for _ in range(args.rounds)]
    ratios = {name: statistics.median(r[name] / r[base] for r in rounds) for name, base in BASELINES.items()}
    if args.json:
        print(json.dumps({"benchmark": "startup", "ratios": ratios}))
        return
    print(f"time ÷ time of the baseline, median of {args.rounds} rounds")
    for name, ratio in ratios.items():
        print(f"  {name:22} {ratio:.2f}  ÷ {BASELINES[name]}")


if __name__ == "__main__":
    main()
