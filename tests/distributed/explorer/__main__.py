"""Run the protocol's own code through schedules that seeds decide, and judge each from outside.

    python -m tests.distributed.explorer [--schedules N] [--seed S] [--jobs J] [--mutant NAME]
    python -m tests.distributed.explorer --replay SEED [--mutant NAME]     one schedule, effect by effect
    python -m tests.distributed.explorer --self-test                       is each of the mutants noticed?

Exit code 0 when all is as it should be, else 1.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")

from tests.distributed.explorer.campaign import Tally, many, story  # noqa: E402
from tests.distributed.explorer.mutants import MUTANTS  # noqa: E402


def main() -> int:
    arguments = _arguments()
    if arguments.replay is not None:
        print(story(arguments.replay, arguments.mutant))
        return 0
    seeds = range(arguments.seed, arguments.seed + arguments.schedules)
    if arguments.self_test:
        return _self_test(seeds, arguments.jobs)
    started = time.monotonic()
    tally = many(seeds, arguments.jobs, arguments.mutant)
    print(_summary(tally, time.monotonic() - started))
    return 0 if tally.failure is None else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.distributed.explorer", description=__doc__.splitlines()[0])
    parser.add_argument("--schedules", type=int, default=2000, help="how many (default 2000)")
    parser.add_argument("--seed", type=int, default=0, help="of the first; each next one is one more")
    parser.add_argument("--jobs", type=int, default=2, help="processes (default 2)")
    parser.add_argument("--mutant", choices=MUTANTS, help="leave a rule of the protocol out")
    parser.add_argument("--replay", type=int, metavar="SEED", help="tell the schedule of one seed")
    parser.add_argument("--self-test", action="store_true", help="run every mutant until it is noticed")
    return parser.parse_args()


def _summary(tally: Tally, seconds: float) -> str:
    lines = [
        f"{tally.schedules} schedules, {tally.effects} effects, {tally.starts} starts of processes, {tally.versions} "
        f"versions, {tally.deltas} deltas; {seconds:.0f} s, {tally.schedules / seconds:.0f} schedules a second"
    ]
    troubles = sorted(tally.troubles.items())
    lines.append("requests and faults: " + ", ".join(f"{count} {trouble}" for trouble, count in troubles))
    if tally.failure is not None:
        lines.append(f"seed {tally.failure.seed}: {tally.failure.message}")
        lines.append(f"  python -m tests.distributed.explorer --replay {tally.failure.seed}")
    return "\n".join(lines)


def _self_test(seeds: range, jobs: int) -> int:
    unnoticed = 0
    for name, mutant in MUTANTS.items():
        tally = many(seeds, jobs, name)
        verdict = "NOT NOTICED"
        if tally.failure is not None:
            noticed = re.search(mutant.noticed_as, tally.failure.message)
            verdict = (
                f"{'noticed' if noticed else 'NOT UNDERSTOOD'} at seed {tally.failure.seed}: {tally.failure.message}"
            )
        unnoticed += verdict.startswith("NOT")
        print(f"{name}: {verdict}", flush=True)
    return 1 if unnoticed else 0


if __name__ == "__main__":
    sys.exit(main())
