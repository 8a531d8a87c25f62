"""Kill a random rank of a run of several again and again, start all of them again, and see that nothing is lost.

    python -m tests.torture.ranks [--ranks N] [--kills N] [--seed S] [--folder DIR] [--json]

Half of the kills come from outside at a random time, and half a rank inflicts on itself at a chosen operation. The
other ranks must then end by themselves. Each step that any life trains has the loss that it has in a run that nobody
killed, to the bit, and the state at the end is the same too. Exit code 0 where that is so; else 1, and the folder is
kept.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

# Threads of numerical libraries would not survive the forks. It has to be said before they are imported.
os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")

import torch  # noqa: E402

from speedtronic import runtime  # noqa: E402
from speedtronic.checkpoint import CheckpointManager  # noqa: E402
from tests.support.states import difference  # noqa: E402
from tests.torture import victim  # noqa: E402
from tests.torture.board import MEANINGS, Board, Phase  # noqa: E402
from tests.torture.plan import Faults, Kill, Plan  # noqa: E402

_LONGEST_LIFE = 60.0  # seconds
_SEED = 11
# Rank 0 alone reads and writes checkpoints.
_AIMS = {
    0: [
        Phase.START,
        Phase.LOAD,
        Phase.TRAINING,
        Phase.SNAPSHOT,
        Phase.WRITE,
        Phase.RENAME,
        Phase.POINTER,
        Phase.PRUNE,
    ],
    1: [Phase.START, Phase.TRAINING],
}
_COUNTS = {Phase.TRAINING: 40, Phase.SNAPSHOT: 3, Phase.WRITE: 30, Phase.RENAME: 4, Phase.POINTER: 10, Phase.PRUNE: 10}


class LostError(Exception):
    """A run did not survive as it should."""


class Ranks:
    """A run of several ranks, through its lives."""

    def __init__(self, folder: Path, ranks: int) -> None:
        self.folder = folder
        self.steps: dict[int, str] = {}  # the loss of each step that any life has trained
        self.began = time.monotonic()
        self._boards = [Board() for _ in range(ranks)]
        self._lives = 0

    def live(self, plans: dict[int, Plan], *, resume: bool) -> tuple[list[int], list[Phase]]:
        """Let all ranks live once; return how each ended, and what it did last."""
        self._lives += 1
        place = self.folder.parent / f"{self.folder.name}-lives" / str(self._lives)
        place.mkdir(parents=True)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        children = []
        self.began = time.monotonic()
        for rank, board in enumerate(self._boards):
            board.clear()
            names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": len(self._boards), "MASTER_PORT": port}
            environment = {**{name: str(value) for name, value in names.items()}, "MASTER_ADDR": "127.0.0.1"}
            work = partial(self._work, place / f"{rank}.jsonl", plans.get(rank, Plan()), board, environment, resume)
            children.append(victim.in_child(place / f"{rank}.log", work))
        codes = self._wait(children, plans)
        for line in (place / "0.jsonl").read_text().splitlines() if (place / "0.jsonl").exists() else ():
            entry = json.loads(line)
            if entry["kind"] == "step":
                before = self.steps.setdefault(entry["step"], entry["loss"])
                if before != entry["loss"]:
                    raise LostError(f"{place}: step {entry['step']} was trained with another loss than before")
        return codes, [board.phase for board in self._boards]

    def _work(self, journal: Path, plan: Plan, board: Board, environment: dict[str, str], resume: bool) -> int:
        os.environ.update(environment)
        return victim.live(self.folder, journal, plan, board, seed=_SEED, background=True, resume=resume)

    def _wait(self, children: list[int], plans: dict[int, Plan]) -> list[int]:
        """The exit codes. A plan may have one killed from here. Then the others are asked to end, as torchrun does."""
        codes: dict[int, int] = {}
        doomed = {rank: plan.after for rank, plan in plans.items() if plan.after is not None}
        asked = False
        while len(codes) < len(children):
            lived = time.monotonic() - self.began
            for rank, child in enumerate(children):
                if rank not in codes:
                    if rank in doomed and lived > doomed[rank]:
                        os.kill(child, signal.SIGKILL)
                    pid, status = os.waitpid(child, os.WNOHANG)
                    if pid:
                        codes[rank] = os.waitstatus_to_exitcode(status)
            if codes and not asked and any(code != victim.FINISHED for code in codes.values()):
                asked = True
                for rank, child in enumerate(children):
                    if rank not in codes:
                        os.kill(child, signal.SIGTERM)
            if lived > _LONGEST_LIFE:
                for rank, child in enumerate(children):
                    if rank not in codes:
                        os.kill(child, signal.SIGKILL)
                        os.waitpid(child, 0)
                raise LostError(f"{self.folder}: ranks {sorted(set(range(len(children))) - codes.keys())} did not end")
            time.sleep(0.002)
        return [codes[rank] for rank in range(len(children))]

    def final_state(self) -> dict[str, Any]:
        state = CheckpointManager(self.folder / "checkpoints").load_latest()
        if state is None:
            raise LostError(f"{self.folder}: no checkpoint is left")
        # The configuration names the folder, and the passes that a process has begun are its own affair.
        del state["config"]
        for rank in (state, *state["ranks"]):
            del rank["data"]["epoch"]
        return state


def torture(folder: Path, ranks: int, kills: int, seed: int) -> dict[str, Any]:
    """Kill until there were enough kills, on every rank; return what happened.

    Raises:
        LostError: a run did not end as it would have without.
    """
    torch.set_num_threads(1)
    # Build a run once, so that what is imported on the way is there for every child. It trains nothing.
    trainer, _ = runtime.build_runtime(victim.config_of(folder / "imports", 0, background=False))
    trainer.logger.close()

    undisturbed = Ranks(folder / "undisturbed", ranks)
    codes, _ = undisturbed.live({}, resume=False)
    seconds = time.monotonic() - undisturbed.began
    if codes != [victim.FINISHED] * ranks:
        raise LostError(f"the undisturbed run ended with {codes}")
    right = undisturbed.final_state()

    choose = random.Random(seed)
    landed: Counter[Phase] = Counter()
    by_rank: Counter[int] = Counter()
    runs = lives = 0
    while landed.total() < kills or len(by_rank) < ranks:
        run = Ranks(folder / f"tortured-{runs}", ranks)
        run.steps = dict(undisturbed.steps)
        codes = []
        while codes != [victim.FINISHED] * ranks:
            rank = choose.randrange(ranks)
            plan = _plan(choose, rank, landed, seconds) if landed.total() < kills or len(by_rank) < ranks else Plan()
            resume = (run.folder / "checkpoints/latest.json").exists()
            codes, phases = run.live({rank: plan}, resume=resume)
            lives += 1
            if lives > 20 * kills + 50:
                raise LostError(f"{lives} lives brought {landed.total()} kills")
            if codes[rank] == -signal.SIGKILL:
                landed[phases[rank]] += 1
                by_rank[rank] += 1
            elif wrong := [code for code in codes if code not in (victim.FINISHED, victim.SAVE_FAILED)]:
                raise LostError(f"{run.folder}: nobody was killed, and ranks ended with {wrong}")
            if codes[rank] != -signal.SIGKILL and victim.SAVE_FAILED in codes:
                codes = []  # the last save has failed: resume, and save again
        if (found := difference(run.final_state(), right)) is not None:
            raise LostError(f"{run.folder} did not end as the undisturbed run: {found}")
        runs += 1
        shutil.rmtree(run.folder)
    return {
        "kills": landed.total(),
        "phases": {phase.name.lower(): landed[phase] for phase in MEANINGS},
        "ranks": {str(rank): by_rank[rank] for rank in range(ranks)},
        "runs": runs,
        "lives": lives,
    }


def _plan(choose: random.Random, rank: int, landed: Counter[Phase], seconds: float) -> Plan:
    seed = choose.randrange(2**32)
    faults = choose.choice([Faults(), Faults(), Faults(rate=0.02), Faults(slow_fsync=0.01)]) if rank == 0 else Faults()
    if choose.random() < 0.5:
        return Plan(seed, after=choose.uniform(0, 0.9 * seconds), faults=faults)
    aims = _AIMS.get(rank, _AIMS[1])
    phase = min(aims, key=lambda aim: landed[aim]) if choose.random() < 0.6 else choose.choice(aims)
    count = choose.randint(1, _COUNTS.get(phase, 1))
    return Plan(seed, kill=Kill(phase, count, choose.choice(["before", "middle", "after"])), faults=faults)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.torture.ranks", description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--kills", type=int, default=100, help="how many, at least (default 100)")
    parser.add_argument("--seed", type=int, default=0, help="of all that is random")
    parser.add_argument("--folder", help="where the runs are; a temporary folder without it")
    parser.add_argument("--json", action="store_true", help="one line for a program to read")
    arguments = parser.parse_args()
    folder = Path(arguments.folder or tempfile.mkdtemp(prefix="torture-ranks-"))
    began = time.monotonic()
    try:
        numbers = torture(folder, arguments.ranks, arguments.kills, arguments.seed)
    except LostError as error:
        print(f"error: {error} ({folder})", file=sys.stderr)
        return 1
    seconds = time.monotonic() - began
    if arguments.json:
        print(json.dumps({**numbers, "seconds": round(seconds, 1)}))
    else:
        for phase, meaning in MEANINGS.items():
            print(f"{phase.name.lower():<22}{numbers['phases'][phase.name.lower()]:>6}   {meaning}")
        by_rank = ", ".join(f"{count} of rank {rank}" for rank, count in numbers["ranks"].items())
        lived = f"{numbers['lives']} lives of {numbers['runs']} runs"
        print(f"{numbers['kills']} kills ({by_rank}) in {lived}; {seconds:.0f} s")
        print("every run ended as the undisturbed one did, bit for bit")
    if arguments.folder is None:
        shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
