"""Rows that scripts of the repository measure: long ones, and what needs other trainers. The package has no scripts."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from speedtronic.bench.figures import Figure, LeftOutError, Settings

SOURCE = Path(__file__).parents[2]
BENCHMARKS = SOURCE.parent / "benchmarks"


def _records(script: str, *options: str) -> list[dict[str, Any]]:
    """The lines that a script prints for programs."""
    if SOURCE.name != "src" or not (BENCHMARKS / script).is_file():
        raise LeftOutError(f"needs benchmarks/{script} of the repository: it is not in the package")
    command = [sys.executable, str(BENCHMARKS / script), *options, "--json"]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def time_to_loss(settings: Settings) -> Iterator[Figure]:
    """Whole trainings to a validation loss of 1.88, with runs of tokens and without."""
    if settings.quick:
        raise LeftOutError("has no quick form")
    if settings.text is None:
        raise LeftOutError("needs --text FILE, a text of about a megabyte such as tiny Shakespeare")
    plain = ["model.ngram_order=1", "run.max_steps=300"]
    for name, goal, overrides in (("n-gram tables", 1 / 8, []), ("plain architecture", 1 / 4, plain)):
        options = ["--text", str(settings.text), "--seeds", str(settings.rounds_or(3))]
        (record,) = _records("time_to_loss.py", *options, *overrides)
        if math.inf in record["ratios"]:
            raise RuntimeError(f"a training with the {name} ended above a loss of 1.88")
        yield Figure(name=f"time to 1.88 ÷ nanoGPT's recipe, {name}", rounds=record["ratios"], at_most=goal)


def diloco(settings: Settings) -> Iterator[Figure]:
    """Requests of a look that finds nothing, and the memory of a round."""
    quick = ["--quick"] if settings.quick else ["--history", "200", "--nodes", "16"]
    looks = _records("diloco.py", "--only", "idle", *quick)
    for who in ("node", "master"):
        last = [look for look in looks if look["who"] == who][-1]
        name = f"requests of a {who} that finds nothing, {last['history']} deltas"
        yield Figure(name=name, rounds=(last["requests"],), at_most=2)
    (of_round,) = _records("diloco.py", "--only", "nodes", "--rounds", str(settings.rounds_or(1)), *quick)
    yield Figure(name=f"model copies of a round, {of_round['nodes']} nodes", rounds=(of_round["copies"],), at_most=4)


def peers(settings: Settings) -> Iterator[Figure]:
    """Other trainers, in an environment that has them."""
    if missing := [name for name in ("lightning", "transformers", "accelerate") if find_spec(name) is None]:
        raise LeftOutError(f"needs {', '.join(missing)}: `make bench-peers` in the repository installs and measures")
    options = ["--rounds", str(settings.rounds_or(5)), *(["--quick"] if settings.quick else [])]
    for record in _records("peers.py", *options):
        yield Figure.model_validate(record)


def card(settings: Settings) -> Iterator[Figure]:
    """What a script of its own measures."""
    raise LeftOutError("`bash benchmarks/gpu_check.sh` in the repository measures what needs a CUDA card")
