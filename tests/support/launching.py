"""Several processes that train together, as torchrun would start them, and what they print."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
_PATIENCE = 120.0  # seconds; only a hang takes so long


@dataclass
class Ranks:
    """Running processes, in rank order."""

    processes: list[subprocess.Popen[str]]

    def wait(self) -> list[tuple[int, str, str]]:
        """The exit code, output and errors of each."""
        results = []
        for process in self.processes:
            output, errors = process.communicate(timeout=_PATIENCE)
            results.append((process.returncode, output, errors))
        return results

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()


def environment() -> dict[str, str]:
    """That of this process, in which Python finds the package and the tests, with one thread."""
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def start_ranks(size: int, arguments: Sequence[str], *, cwd: Path, more: Mapping[str, str] | None = None) -> Ranks:
    """Start `python ARGUMENTS` on each of `size` ranks, with the variables that torchrun sets and `more`."""
    common = {
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        **(more or {}),
    }
    return Ranks(
        [
            subprocess.Popen(
                [sys.executable, *arguments],
                cwd=cwd,
                env={**environment(), **common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(size)
        ]
    )


def run_ranks(
    size: int, arguments: Sequence[str], *, cwd: Path, more: Mapping[str, str] | None = None
) -> list[tuple[int, str, str]]:
    """What `start_ranks` started came to."""
    ranks = start_ranks(size, arguments, cwd=cwd, more=more)
    try:
        return ranks.wait()
    finally:
        ranks.end()
