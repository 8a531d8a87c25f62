"""Three processes that share nothing but a folder train the quickstart's model. One is killed, and comes back.

    python benchmarks/diloco_demo.py [--steps 200] [--alone batch|updates]

A master averages. Each worker trains `--steps` steps on a part of the data of its own, on one thread; one of them is
ended by SIGKILL on its way and started again a few seconds later. The table of `speedtronic diloco status` shows what
happens meanwhile.

Then one process trains alone, twice. First as many steps as each of the three made, of the same batch: what one
machine learns in the same time. Then on as many tokens as the three had together, in as many steps, of three times the
batch: what the three would be if the network between them cost nothing. (`--alone updates`: in three times as many
steps of the same batch. One after another, these learn more from the same tokens, and cannot be shared out.) All models
are measured on text that none has seen. Logs and weights stay in runs/diloco-demo.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from speedtronic.config import load_config

FOLDER = Path("runs/diloco-demo")
STORE = FOLDER / "store"
TOGETHER, ALONE = Path("examples/diloco/diloco.yaml"), Path("examples/quickstart.yaml")
WORKERS = ("anna", "berta", "carla")
VICTIM = "berta"
ABSENCE = 5.0  # seconds between the kill and the return
SHOW_EVERY = 20.0  # seconds between two looks at the table
LAST_DELTAS = 60.0  # seconds that the master gets to take in what the workers sent at their end
HELD_OUT_BATCHES = 40

Process = subprocess.Popen[bytes]


# ---------------------------------------------------------------------- processes


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "speedtronic", *words]


def settings(steps: int) -> list[str]:
    """What the demo sets otherwise than the example does."""
    return [
        f"run.max_steps={steps}",
        f"distributed.repo_id=dir://{STORE}",
        f"distributed.state_dir={FOLDER / 'state'}",
        f"distributed.expected_nodes={len(WORKERS)}",
        f"distributed.inner_steps={max(1, steps // 10)}",
        f"checkpoint.every_steps={max(1, steps // 10)}",
        "eval.every_steps=null",
        "eval.at_end=false",
        "logging.every_steps=5",
    ]


def start(name: str, *words: str) -> Process:
    """A process whose output goes to a log of its own."""
    with (FOLDER / f"{name}.log").open("ab") as log:
        return subprocess.Popen(command(*words), stdout=log, stderr=subprocess.STDOUT)


def start_worker(name: str, steps: int, *options: str) -> Process:
    own = [f"distributed.node_id={name}", f"run.output_dir={FOLDER / name}"]
    return start(name, "train", str(TOGETHER), *settings(steps), *own, *options)


def start_master(steps: int) -> Process:
    return start("master", "diloco", "master", str(TOGETHER), *settings(steps), f"run.output_dir={FOLDER / 'master'}")


@contextmanager
def ended_at_last(processes: dict[str, Process]) -> Iterator[None]:
    """Whatever happens in the block, none of the processes outlives it."""
    try:
        yield
    finally:
        for process in processes.values():
            process.kill()
            process.wait()


# ---------------------------------------------------------------------- what is seen of them


def say(text: str) -> None:
    print(text, flush=True)


def events(name: str) -> list[dict[str, Any]]:
    """What a run has logged so far. A line that a kill cut short is none."""
    file = FOLDER / name / "metrics.jsonl"
    found = []
    for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else ():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def step_of(name: str) -> int:
    return max((event["step"] for event in events(name) if event["event"] == "train_step"), default=0)


def show_table() -> None:
    """The table as a person gets it; before the first version there is none."""
    table = subprocess.run(command("diloco", "status", str(STORE)), capture_output=True, text=True)
    if table.returncode == 0:
        say("\n" + "\n".join("    " + line for line in table.stdout.splitlines()) + "\n")


def status() -> dict[str, Any]:
    words = command("diloco", "status", str(STORE), "--json")
    found: dict[str, Any] = json.loads(subprocess.run(words, check=True, capture_output=True).stdout)
    return found


# ---------------------------------------------------------------------- the two trainings


class Victim:
    """A worker that is killed when it has done two fifths of its steps, and comes back some seconds later."""

    def __init__(self, processes: dict[str, Process], steps: int) -> None:
        self._processes = processes
        self._steps = steps
        self._killed_at: float | None = None

    def fate(self, now: float) -> None:
        process = self._processes[VICTIM]
        if self._killed_at is None and step_of(VICTIM) >= 0.4 * self._steps:
            process.kill()
            process.wait()
            self._killed_at = now
            say(f"{VICTIM} is killed (SIGKILL) at step {step_of(VICTIM)}; the others go on")
        if process.returncode == -signal.SIGKILL and now - (self._killed_at or now) >= ABSENCE:
            self._processes[VICTIM] = start_worker(VICTIM, self._steps, "--resume")
            say(f"{VICTIM} comes back, with --resume")


def train_together(steps: int) -> float:
    """Returns the seconds it took."""
    began = time.monotonic()
    processes = {name: start_worker(name, steps) for name in WORKERS}
    processes["master"] = start_master(steps)
    with ended_at_last(processes):
        watch(processes, Victim(processes, steps))
        took = time.monotonic() - began
        take_in_the_last_deltas()
        processes["master"].send_signal(signal.SIGTERM)
        processes["master"].wait(timeout=30)
    return took


def watch(processes: dict[str, Process], victim: Victim) -> None:
    """Until all workers have done their steps."""
    shown_at = time.monotonic()
    while not all(processes[name].poll() == 0 for name in WORKERS):
        time.sleep(0.5)
        now = time.monotonic()
        victim.fate(now)
        for name, process in processes.items():
            if process.poll() not in (None, 0, -signal.SIGKILL) or (name == "master" and process.returncode == 0):
                raise SystemExit(f"{name} has ended by itself; see {FOLDER / name}.log")
        if now - shown_at >= SHOW_EVERY:
            shown_at = now
            say("    " + ", ".join(f"{name} is at step {step_of(name)}" for name in WORKERS))
            show_table()


def take_in_the_last_deltas() -> None:
    until = time.monotonic() + LAST_DELTAS
    while status()["outstanding"] and time.monotonic() < until:
        time.sleep(1)
    say(f"all workers are done; of what they sent at their end {status()['outstanding']} deltas still wait")
    show_table()


def train_alone(name: str, updates: int, batch: int) -> float:
    """Returns the held-out loss."""
    unseen = [f"run.output_dir={FOLDER / name}", "eval.every_steps=null", "eval.at_end=false"]
    options = [f"run.max_steps={updates}", f"data.target_batch_size={batch}"]
    process = start(name, "train", str(ALONE), *unseen, *options)
    with ended_at_last({name: process}):
        while process.poll() is None:
            try:
                process.wait(SHOW_EVERY)
            except subprocess.TimeoutExpired:
                say(f"    alone is at step {step_of(name)}")
        if process.returncode != 0:
            raise SystemExit(f"the training has failed; see {FOLDER / name}.log")
    return held_out_loss(FOLDER / name)


# ---------------------------------------------------------------------- the comparison


def held_out_loss(weights: Path) -> float:
    """Nats per byte over text that no process was trained on."""
    import torch

    from speedtronic.checkpoint.initial_weights import load_initial_weights
    from speedtronic.data import build_data
    from speedtronic.evaluation import HeldOutLoss
    from speedtronic.precision import resolve_precision
    from speedtronic.registry import build_model

    config = load_config(ALONE)
    model = build_model(config)
    load_initial_weights(model, weights)
    validation = build_data(config, pin_memory=False).validation
    assert validation is not None, "the quickstart holds a part of its data out"
    cpu = torch.device("cpu")
    measure = HeldOutLoss(
        lambda: validation,
        device=cpu,
        precision=resolve_precision(config.precision, cpu),
        batches=HELD_OUT_BATCHES,
    )
    result = measure(model)
    assert result is not None, "nothing asks it to stop"
    return float(result["loss"])


def count(name: str, event: str) -> int:
    return sum(1 for found in events(name) if found["event"] == event)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="of each worker (default: 200)")
    parser.add_argument(
        "--alone", choices=("batch", "updates"), default="batch", help="what one process has more of (default: batch)"
    )
    args = parser.parse_args()
    steps: int = args.steps
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: sys.exit(128 + number))  # takes the processes along
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)

    say(f"A master and three workers ({', '.join(WORKERS)}) start. They share nothing but the folder {STORE}.")
    say(f"Each worker trains {steps} steps, and sends what it has learned every {max(1, steps // 10)} steps.\n")
    together = train_together(steps)
    weights = FOLDER / "together.safetensors"
    subprocess.run(command("diloco", "pull", str(STORE), "--out", str(weights)), check=True)

    batch = load_config(ALONE).data.target_batch_size
    say(f"\nNow one process alone takes {steps} steps of {batch} samples, as each of the three did.")
    same_time = train_alone("alone", steps, batch)
    updates, larger = (steps, batch * len(WORKERS)) if args.alone == "batch" else (steps * len(WORKERS), batch)
    say(f"Now one process alone takes {updates} steps of {larger} samples: as many tokens as the three had together.")
    same_tokens = train_alone("alone-all-tokens", updates, larger)

    three = held_out_loss(weights)
    made = f"{status()['version']} versions from {sum(count(name, 'delta_uploaded') for name in WORKERS)} deltas"
    say("\nheld-out loss, in nats per byte:")
    say(f"    one process, the same steps       {same_time:.4f}")
    say(f"    three processes                   {three:.4f}   {made} in {together:.0f} s; one was killed on its way")
    say(f"    one process, all of their tokens  {same_tokens:.4f}")


if __name__ == "__main__":
    main()
