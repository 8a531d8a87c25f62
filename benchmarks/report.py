"""How long `speedtronic report` takes for a long run, and how large its page is.

    python benchmarks/report.py [--steps N] [--json]

A log of N steps is made first, with a line for each of them and all the keys that the trainer writes. The command is
measured as a whole process: wall time, and CPU time, which other work on the machine changes less.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

# The logs of the tests, which lie in the repository and not in the package.
sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.support.logs import write_long_log  # noqa: E402 - found through the line above


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_long_log(Path(folder), args.steps, {args.steps // 3: 99.0})
        log_bytes = (Path(folder) / "metrics.jsonl").stat().st_size
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        started = time.perf_counter()
        subprocess.run([sys.executable, "-m", "speedtronic", "report", folder], check=True, stdout=subprocess.DEVNULL)
        wall = time.perf_counter() - started
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        record = {
            "steps": args.steps,
            "log_bytes": log_bytes,
            "page_bytes": (Path(folder) / "report.html").stat().st_size,
            "wall_s": round(wall, 2),
            "cpu_s": round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 2),
        }
    if args.json:
        print(json.dumps(record))
    else:
        log, page = record["log_bytes"] / 1e6, record["page_bytes"] / 1e6
        print(f"{args.steps:,} steps, {log:.0f} MB of log: a page of {page:.2f} MB")
        print(f"{record['wall_s']} s, {record['cpu_s']} s of CPU")


if __name__ == "__main__":
    main()
