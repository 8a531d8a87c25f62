"""A process that is killed again and again, and started again each time by the same command."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

from tests.support.launching import free_port

ROOT = Path(__file__).parents[2]
_USUAL_START = 5.0  # seconds
_GRACE = 30.0  # seconds that torchrun gives to the ranks that are left


class HarnessError(Exception):
    """A process did not do what it should."""


class Fate(NamedTuple):
    """When a life ends: at a share of the time that a start takes, or after so many units of work."""

    during: Literal["start", "work"]
    amount: float


def fates(seed: str, mean: float) -> Iterator[Fate]:
    """Of the lives of a process, one after the other: each does `mean` units of work on average; one in six does not
    get so far. Work and not seconds, so that there is progress on a busy machine too."""
    dice = random.Random(seed)
    while True:
        if dice.random() < 1 / 6:
            yield Fate("start", dice.random())
        else:
            yield Fate("work", dice.uniform(0.1 * mean, 1.9 * mean))


@dataclass
class Process:
    """A process and all its lives.

    Args:
        name: for messages.
        command: what starts it.
        again: what is added to that when it is started again.
        folder: where it logs, with a line in `metrics.jsonl` for each unit of its work.
        unit: the event of that line.
        environment: added to this process's.
        ranks: how many processes it is, as torchrun would start them. One of them is killed, and the others are ended.
        fates: of its lives; the first one that finds none is not killed.
    """

    name: str
    command: Sequence[str]
    again: Sequence[str]
    folder: Path
    unit: str
    environment: Mapping[str, str]
    fates: Iterator[Fate]
    ranks: int = 1
    lives: int = 0
    kills: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._dice = random.Random(self.name)
        self._fate: Fate | None = None
        self._counted = self._counted_to = 0
        self._done_before = 0
        self._usual_start = _USUAL_START
        self._works = False
        self._began = 0.0

    @property
    def log(self) -> Path:
        return self.folder / "log.txt"

    def count(self) -> int:
        """Units done in all lives together, of which some were done again."""
        metrics = self.folder / "metrics.jsonl"
        if metrics.exists():
            with metrics.open("rb") as file:
                file.seek(self._counted_to)
                whole_lines = file.read().rpartition(b"\n")[0]
            self._counted += whole_lines.count(f'"event":"{self.unit}"'.encode())
            self._counted_to += len(whole_lines)
        return self._counted

    def start(self) -> None:
        words = [sys.executable, "-m", "speedtronic", *self.command, *(self.again if self.lives else ())]
        self.lives += 1
        self._fate = next(self.fates, None)
        self._done_before, self._works = self.count(), False
        self._began = time.monotonic()
        with self.log.open("ab") as log:
            log.write(f"--- life {self.lives}: {self._fate}\n".encode())
            log.flush()
            port = free_port()
            self._processes = [
                subprocess.Popen(
                    words,
                    cwd=ROOT,
                    env=os.environ | self.environment | self._place_of(rank, port),
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
                for rank in range(self.ranks)
            ]

    def _place_of(self, rank: int, port: int) -> dict[str, str]:
        if self.ranks == 1:
            return {}
        names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": self.ranks, "MASTER_PORT": port}
        return {"MASTER_ADDR": "127.0.0.1", **{name: str(value) for name, value in names.items()}}

    def goes_on(self) -> bool:
        """Kill the process if it is time, and start it again; false when it has come to its end by itself.

        Raises:
            HarnessError: it failed.
        """
        assert self._processes, "it was started"
        codes = [process.poll() for process in self._processes]
        if wrong := [code for code in codes if code]:
            raise HarnessError(f"{self.name} ended with {wrong[0]}: see {self.log}")
        if None not in codes:
            return False
        if self._is_due():
            self._kill()
            self.start()
        return True

    def end(self) -> int:
        """Ask it to end, and return its exit code."""
        assert self._processes, "it was started"
        for process in self._processes:
            process.send_signal(signal.SIGTERM)
        return max(process.wait(60.0) for process in self._processes)

    def remove(self) -> None:
        """Whatever it does, it is gone afterwards."""
        for process in self._processes:
            process.kill()
            process.wait()

    def _is_due(self) -> bool:
        done, seconds = self.count() - self._done_before, time.monotonic() - self._began
        if done and not self._works:
            self._works, self._usual_start = True, seconds
        if self._fate is None:
            return False
        if self._fate.during == "work":
            return done > self._fate.amount
        return not done and seconds > self._fate.amount * self._usual_start

    def _kill(self) -> None:
        assert self._processes, "it was started"
        killed, *others = self._dice.sample(self._processes, len(self._processes))
        killed.kill()
        if killed.wait() == -signal.SIGKILL:  # it may have come to its end a moment before
            self.kills["working" if self._works else "starting"] += 1
        for process in others:
            process.terminate()
        for process in others:
            try:
                process.wait(_GRACE)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
