"""How soon a command answers, as a share of `import torch`.

    python benchmarks/startup.py [--rounds N] [--json]

Rounds take each command once, in turn; the figures are medians of the rounds' ratios to `import torch`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

SMOKE = str(Path(__file__).parents[1] / "examples" / "smoke.yaml")
BASELINE = "import torch"
COMMANDS = {
    BASELINE: ["-c", "import torch"],
    "speedtronic --help": ["-m", "speedtronic", "--help"],
    "speedtronic validate": ["-m", "speedtronic", "validate", SMOKE],
    "speedtronic schema": ["-m", "speedtronic", "schema"],
}


def seconds(arguments: list[str]) -> float:
    started = time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", action="store_true", help="one line for a program")
    args = parser.parse_args()
    for arguments in COMMANDS.values():
        seconds(arguments)
    rounds = [{name: seconds(arguments) for name, arguments in COMMANDS.items()} for _ in range(args.rounds)]
    ratios = {name: statistics.median(r[name] / r[BASELINE] for r in rounds) for name in COMMANDS if name != BASELINE}
    if args.json:
        print(json.dumps({"benchmark": "startup", "ratios": ratios}))
        return
    print(f"share of `{BASELINE}`, median of {args.rounds} rounds")
    for name, ratio in ratios.items():
        print(f"  {name:22} {ratio:.2f}")


if __name__ == "__main__":
    main()
