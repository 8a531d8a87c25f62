"""Kill a training run hundreds of times, resume it each time, and see that nothing is lost.

    python -m tests.torture [--kills N] [--each N] [--seed S] [--folder DIR] [--json]
    python -m tests.torture --self-test      does the harness notice what it is there to notice?

Exit code 0 when every run ended as the undisturbed one; else 1, and the folder of the run that did not is kept.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path

# Threads of numerical libraries would not survive the forks. It has to be said before they are imported.
os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")

from tests.torture.board import MEANINGS, Fault, Phase  # noqa: E402
from tests.torture.campaign import Campaign, Tally, TortureError, undisturbed_runs  # noqa: E402
from tests.torture.mutants import MUTANTS  # noqa: E402


def main() -> int:
    arguments = _arguments()
    folder = Path(arguments.folder or tempfile.mkdtemp(prefix="torture-"))
    code = _self_test(folder, arguments) if arguments.self_test else _torture(folder, arguments)
    if code == 0 and arguments.folder is None:
        shutil.rmtree(folder)
    return code


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.torture", description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=300, help="how many in all, at least (default 300)")
    parser.add_argument("--each", type=int, default=10, help="how many in each phase, at least (default 10)")
    parser.add_argument("--seed", type=int, default=0, help="of all that is random")
    parser.add_argument("--folder", help="where the runs are; a temporary folder without it")
    parser.add_argument("--json", action="store_true", help="one line for a program to read")
    parser.add_argument("--self-test", action="store_true", help="build faults into the code, and see them noticed")
    return parser.parse_args()


def _torture(folder: Path, arguments: argparse.Namespace) -> int:
    references = undisturbed_runs(folder)
    campaign = Campaign(folder, references, kills=arguments.kills, each=arguments.each, seed=arguments.seed)
    error = None
    try:
        campaign.go()
    except TortureError as caught:
        error = str(caught)
    if arguments.json:
        print(json.dumps(_as_json(campaign.tally, error)))
    else:
        print(_as_table(campaign.tally))
        print(f"seed {arguments.seed}: " + (error or "every run ended as the undisturbed one did, bit for bit"))
    return 0 if error is None else 1


def _self_test(folder: Path, arguments: argparse.Namespace) -> int:
    references = undisturbed_runs(folder)
    unnoticed = 0
    for number, (name, mutant) in enumerate(MUTANTS.items()):
        place = folder / f"mutant-{number}"
        place.mkdir()
        campaign = Campaign(place, references, kills=60, seed=arguments.seed, mutant=name, aims=mutant.aim)
        try:
            campaign.go()
            verdict = "NOT NOTICED"
        except TortureError as error:
            noticed = re.search(mutant.noticed_as, str(error))
            verdict = f"noticed after {campaign.tally.kills} kills" if noticed else f"NOT UNDERSTOOD: {error}"
        unnoticed += verdict.startswith("NOT")
        print(f"{name}: {verdict}", flush=True)
    return 1 if unnoticed else 0


def _as_table(tally: Tally) -> str:
    lines = [f"{'where the kills came':<22}{'exact':>7}{'random':>8}{'all':>6}"]
    for phase in [phase for phase in Phase if phase is not Phase.IDLE]:
        counts = f"{tally.exact[phase]:>7}{tally.random[phase]:>8}{tally.landed(phase):>6}"
        lines.append(f"{phase.name.lower():<22}{counts}   {MEANINGS[phase]}")
    lines.append(f"{'all':<22}{tally.exact.total():>7}{tally.random.total():>8}{tally.kills:>6}")
    faults = ", ".join(f"{tally.faults[fault]} {fault.name}" for fault in Fault)
    lines += [
        f"{tally.runs} runs in {tally.lives} lives, up to {tally.most_in_a_row} killed in a row; {tally.redone} steps "
        f"trained again; {tally.seconds:.0f} s",
        f"faults of the file layer: {faults}; {tally.failed_saves} lives whose last save failed",
    ]
    return "\n".join(lines)


def _as_json(tally: Tally, error: str | None) -> dict[str, object]:
    return {
        "kills": tally.kills,
        "phases": {phase.name.lower(): tally.landed(phase) for phase in Phase if phase is not Phase.IDLE},
        "exact": tally.exact.total(),
        "random": tally.random.total(),
        "faults": {fault.name: tally.faults[fault] for fault in Fault},
        "lives": tally.lives,
        "runs": tally.runs,
        "most_killed_in_a_row": tally.most_in_a_row,
        "lives_whose_last_save_failed": tally.failed_saves,
        "steps_trained_again": tally.redone,
        "seconds": round(tally.seconds, 1),
        "error": error,
    }


if __name__ == "__main__":
    sys.exit(main())
