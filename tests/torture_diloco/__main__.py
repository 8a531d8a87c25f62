"""Let three processes train one model over a store, kill each of them again and again, and see what it costs.

    python -m tests.torture_diloco [--seeds 0 1 2] [--store folder|s3] [--every N] [--steps N] [--only-killed]
                                   [--kills N] [--text FILE] [--folder DIR] [--json]

For each seed four things are trained: by three nodes that nobody disturbs; by three nodes of which each is killed
(`kill -9`) after `--every` steps on average, and sometimes while it starts, and started again by the same command with
`--resume`; by one process with batches three times as large, so that it sees the same tokens in as many
updates; by one process in three times as many updates, which is more than an exchange every few updates can give. Of
the text the last tenth is held out from all.

Every version of the runs of three is recomputed bit for bit by `audit`. With `--kills`, seed follows on seed until so
many processes were killed.

Exit code 0 when after each run with kills all that was trained is in the weights exactly once, and its loss is within
1% of the undisturbed run's and within 3% of that of the one process with the same batches. Else 1, and the folder is
kept.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported

from tests.torture_diloco import setting  # noqa: E402
from tests.torture_diloco.audit import Audit  # noqa: E402
from tests.torture_diloco.campaign import Outcome, Together, train_alone, wait_for  # noqa: E402
from tests.torture_diloco.checking import audited  # noqa: E402
from tests.torture_diloco.lives import HarnessError  # noqa: E402
from tests.torture_diloco.places import Place, in_folder, on_s3  # noqa: E402
from tests.torture_diloco.setting import BATCH, NODES, Size  # noqa: E402

OF_UNDISTURBED, OF_ALONE = 0.01, 0.03


def main() -> int:
    arguments = _arguments()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # takes the processes along
    folder = Path(arguments.folder or tempfile.mkdtemp(prefix="torture-diloco-")).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    text = setting.text_at(arguments.text, folder)
    size = Size(steps=arguments.steps, inner_steps=arguments.inner_steps, pace=arguments.pace)
    found: list[str] = []
    kills = 0
    seeds: Iterable[int] = itertools.count(arguments.seeds[0]) if arguments.kills else arguments.seeds
    with on_s3() if arguments.store == "s3" else nullcontext(in_folder) as new_place:
        for seed in seeds:
            part = folder / f"seed-{seed}"
            try:
                result = _train_all(
                    part,
                    text,
                    size,
                    seed,
                    new_place,
                    every=arguments.every,
                    only_killed=arguments.only_killed,
                    ranks=arguments.ranks,
                )
            except HarnessError as error:
                found.append(f"seed {seed}: {error}")
                break
            print(json.dumps(result) if arguments.json else _told(result), flush=True)
            found += [f"seed {seed}: {fault}" for fault in result["faults"]]
            kills += sum(result["kills"].values())
            if arguments.kills and (found or kills >= arguments.kills):
                break
            if arguments.kills:
                shutil.rmtree(part)  # some hundred megabytes
    for fault in found:
        print(fault, file=sys.stderr)
    if not found and arguments.folder is None:
        shutil.rmtree(folder)
    elif found:
        print(f"everything is in {folder}", file=sys.stderr)
    return 1 if found else 0


def _arguments() -> argparse.Namespace:
    usual = Size()
    parser = argparse.ArgumentParser(prog="python -m tests.torture_diloco", description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of everything (default 0 1 2)")
    parser.add_argument("--kills", type=int, help="go on from the first seed until so many processes were killed")
    parser.add_argument("--store", choices=("folder", "s3"), default="folder", help="s3: a server on this machine")
    parser.add_argument("--every", type=float, default=120.0, help="mean steps that a life trains (default 120)")
    parser.add_argument("--steps", type=int, default=usual.steps, help=f"of each node (default {usual.steps})")
    parser.add_argument("--inner-steps", type=int, default=usual.inner_steps, help="between two exchanges")
    parser.add_argument("--pace", type=float, default=usual.pace, help="least seconds of a node's step")
    parser.add_argument("--ranks", type=int, default=1, help="processes of each node, of which any is killed")
    parser.add_argument("--only-killed", action="store_true", help="nothing to compare the loss with")
    parser.add_argument("--text", type=Path, help="a text file; without it tiny Shakespeare, or Python's own library")
    parser.add_argument("--folder", help="where the runs are; a temporary folder without it")
    parser.add_argument("--json", action="store_true", help="a line for a program to read, for each seed")
    return parser.parse_args()


def _train_all(
    part: Path,
    text: Path,
    size: Size,
    seed: int,
    new_place: Callable[[Path], Place],
    *,
    every: float,
    only_killed: bool,
    ranks: int,
) -> dict[str, Any]:
    losses: dict[str, float] = {}

    def train_together(name: str, every: float | None) -> tuple[Outcome, Audit]:
        place = new_place(part / name)
        run = Together(part / name, text, size, seed, place, every=every, ranks=ranks)
        outcome = run.go()
        losses[name] = setting.held_out_loss(run.config, outcome.weights)
        return outcome, audited(place, size)

    if not only_killed:
        _, audit = train_together("undisturbed", None)
        if audit.faults:
            raise HarnessError(f"the run that nobody disturbed: {audit.faults[0]}")
        losses |= _train_alone(part, text, size, seed)
    outcome, audit = train_together("killed", every)
    found = audit.faults
    differences = {name: losses["killed"] / loss - 1.0 for name, loss in losses.items() if name != "killed"}
    for name, limit in (("undisturbed", OF_UNDISTURBED), ("same tokens", OF_ALONE)):
        if differences.get(name, 0.0) > limit:
            found.append(f"the loss is {differences[name]:.1%} above that of: {name}")
    return {
        "seed": seed,
        "losses": {name: round(loss, 4) for name, loss in losses.items()},
        "killed_to": {name: round(difference, 4) for name, difference in differences.items()},
        "kills": dict(outcome.kills),
        "lives": outcome.lives,
        "trained_again": outcome.trained_again,
        "versions": outcome.versions,
        "recomputed": {"versions": audit.versions, "deltas": len(audit.deltas)},
        "seconds": round(outcome.seconds, 1),
        "faults": found,
    }


def _train_alone(part: Path, text: Path, size: Size, seed: int) -> dict[str, float]:
    """Both at once: two processes of one thread each."""
    steps = len(NODES) * size.steps
    kinds = {
        "same tokens": train_alone(part / "batch", text, seed, steps=size.steps, batch=len(NODES) * BATCH),
        "three times the updates": train_alone(part / "updates", text, seed, steps=steps, batch=BATCH),
    }
    wait_for(kinds.values())
    return {
        name: setting.held_out_loss(process.folder / "config.json", process.folder) for name, process in kinds.items()
    }


def _told(result: Mapping[str, Any]) -> str:
    lines = [f"seed {result['seed']}: held-out loss, nats per character"]
    for name, loss in result["losses"].items():
        difference = result["killed_to"].get(name)
        lines.append(f"    {name:<24}{loss:.4f}" + ("" if difference is None else f"    killed: {difference:+.1%}"))
    kills = ", ".join(f"{count} {name}" for name, count in sorted(result["kills"].items()))
    lines.append(
        f"    {sum(result['kills'].values())} kills ({kills}) in {result['lives']} lives; {result['trained_again']} "
        f"steps trained again; {result['seconds']:.0f} s"
    )
    recomputed = result["recomputed"]
    lines.append(f"    {recomputed['versions']} versions and {recomputed['deltas']} deltas recomputed bit for bit")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
