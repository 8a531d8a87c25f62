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

ROOT = Path(__file__).parents[2]
_USUAL_START = 5.0  # seconds


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
        fates: of its lives; the first one that finds none is not killed.
    """

    name: str
    command: Sequence[str]
    again: Sequence[str]
    folder: Path
    unit: str
    environment: Mapping[str, str]
    fates: Iterator[Fate]
    lives: int = 0
    kills: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._process: subprocess.Popen[bytes] | None = None
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
            self._process = subprocess.Popen(
                words, cwd=ROOT, env=os.environ | self.environment, stdout=log, stderr=subprocess.STDOUT
            )

    def goes_on(self) -> bool:
        """Kill the process if it is time, and start it again; false when it has come to its end by itself.

        Raises:
            HarnessError: it failed.
        """
        assert self._process is not None, "it was started"
        code = self._process.poll()
        if code is not None:
            if code != 0:
                raise HarnessError(f"{self.name} ended with {code}: see {self.log}")
            return False
        if self._is_due():
            self._kill()
            self.start()
        return True

    def end(self) -> int:
        """Ask it to end, and return its exit code."""
        assert self._process is not None, "it was started"
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(60.0)

    def remove(self) -> None:
        """Whatever it does, it is gone afterwards."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()

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
        assert self._process is not None, "it was started"
        self._process.kill()
        if self._process.wait() == -signal.SIGKILL:  # it may have come to its end a moment before
            self.kills["working" if self._works else "starting"] += 1
