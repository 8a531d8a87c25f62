"""Kills a training run again and again, resumes it each time, and compares it with one that was left in peace.

A *run* is trained to its end through many *lives*; each life is a process, forked from this one, which has imported
everything already. Half of the kills come from outside at a random time; the other half a process inflicts on itself at
a chosen operation, since hardly any random moment falls into a rename. After each death the folder is looked at.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from speedtronic import runtime
from speedtronic.checkpoint import CheckpointEntry, CheckpointManager
from speedtronic.checkpoint.manifest import Pointer, read_pointer
from speedtronic.durable.files import FileSystem
from speedtronic.durable.lock import LOCK_FILE
from speedtronic.durable.processes import process_is_alive
from speedtronic.errors import CheckpointError
from tests.torture import victim
from tests.torture.board import Board, Fault, Phase
from tests.torture.plan import Faults, Kill, Plan

AIMS = (
    Phase.TRAINING,
    Phase.SNAPSHOT,
    Phase.WRITE,
    Phase.RENAME,
    Phase.POINTER,
    Phase.PRUNE,
    Phase.LOAD,
    Phase.START,
)
# Where in a life a kill at its n-th operation of a phase may come; later ones than a life has are not reached.
_COUNTS = {
    Phase.TRAINING: 40,
    Phase.SNAPSHOT: 3,
    Phase.WRITE: 30,
    Phase.RENAME: 4,
    Phase.POINTER: 10,
    Phase.PRUNE: 10,
    Phase.LOAD: 5,
    Phase.START: 1,
    Phase.CLEANUP: 2,
}
_LONGEST_LIFE = 120.0  # seconds; a life of the undisturbed run takes about one
_NAMES = re.compile(r"step_\d{12}(-[0-9a-f]{8})?(-new)?|latest\.json|\.tmp-.+-\d+|" + re.escape(LOCK_FILE))
_LEFT_BY = re.compile(r"\.tmp-.+-(\d+)")
_SEEDS = (11, 12)


class TortureError(Exception):
    """A run did not survive as it should."""


@dataclass(frozen=True)
class Step:
    """One step as it was trained: the exact loss, and the samples that it saw."""

    loss: str
    samples: list[int]


@dataclass(frozen=True)
class Reference:
    """The undisturbed run: its steps, its validation losses by step, and the state that it ended with."""

    steps: list[Step]
    losses: dict[int, str]
    state: dict[str, Any]
    seconds: float


@dataclass
class Tally:
    """What has happened so far."""

    exact: Counter[Phase] = field(default_factory=Counter)
    random: Counter[Phase] = field(default_factory=Counter)
    faults: Counter[Fault] = field(default_factory=Counter)
    lives: int = 0
    runs: int = 0
    redone: int = 0
    failed_saves: int = 0
    in_a_row: int = 0
    most_in_a_row: int = 0
    started: float = field(default_factory=time.monotonic)

    @property
    def kills(self) -> int:
        return self.exact.total() + self.random.total()

    def landed(self, phase: Phase) -> int:
        return self.exact[phase] + self.random[phase]

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started


@dataclass(frozen=True)
class Life:
    """What is known of a life after its end.

    Attributes:
        code: its exit code; None when it was killed.
        phase: what it was doing then.
        plan: what was to happen.
        pid: its process.
        journal: what it wrote down.
        faults: how often the file layer failed it.
    """

    code: int | None
    phase: Phase
    plan: Plan
    pid: int
    journal: list[dict[str, Any]]
    faults: dict[Fault, int]

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [line for line in self.journal if line["kind"] == kind]


def undisturbed_runs(folder: Path) -> dict[int, Reference]:
    """What each run is compared with, by its seed.

    Raises:
        TortureError: such a run failed.
    """
    torch.set_num_threads(1)
    _import_what_lives_need(folder / "imports")
    return {seed: _undisturbed(folder / f"undisturbed-{seed}", seed) for seed in _SEEDS}


def _import_what_lives_need(folder: Path) -> None:
    """Build a run once, so that what is imported on the way is there for every child. It trains nothing."""
    trainer, _ = runtime.build_runtime(victim.config_of(folder, 0, background=False))
    trainer.logger.close()


def _undisturbed(folder: Path, seed: int) -> Reference:
    run = Run(folder, seed, background=True)
    started = time.monotonic()
    life = _live(run, Plan(), Board(), resume=False, mutant=None)
    seconds = time.monotonic() - started
    if life.code != victim.FINISHED:
        raise TortureError(f"the undisturbed run did not finish: see {run.log}")
    steps = [Step(line["loss"], line["samples"]) for line in life.of("step")]
    losses = {line["step"]: line["loss"] for line in life.of("eval")}
    return Reference(steps, losses, run.final_state(), seconds)


def _live(run: Run, plan: Plan, board: Board, *, resume: bool, mutant: str | None) -> Life:
    """Let a run live once, and see how it ends."""
    run.begin_life()
    board.clear()
    work = partial(
        victim.live,
        run.folder,
        run.journal,
        plan,
        board,
        seed=run.seed,
        background=run.background,
        resume=resume,
        mutant=mutant,
    )
    pid = victim.in_child(run.log, work)
    code = os.waitstatus_to_exitcode(_wait(pid, plan.after))
    if code not in (victim.FINISHED, victim.SAVE_FAILED, victim.NOTHING_SOUND, -signal.SIGKILL):
        raise TortureError(f"{run.folder}, life {run.lives} ({plan}) ended with {code}: see {run.log}")
    killed = code == -signal.SIGKILL
    return Life(None if killed else code, board.phase, plan, pid, run.read_journal(), board.faults)


class Campaign:
    """Tortures runs until there were enough kills, in all and in each phase.

    Args:
        folder: for everything that the runs write.
        references: the undisturbed runs to compare with, by seed.
        kills: how many in all, at least.
        each: how many in each of `AIMS`, at least.
        seed: of all plans.
        mutant: a fault that is built into every life.
        aims: the phases that kills are aimed at.
    """

    def __init__(
        self,
        folder: Path,
        references: Mapping[int, Reference],
        *,
        kills: int,
        each: int = 0,
        seed: int = 0,
        mutant: str | None = None,
        aims: Sequence[Phase] = AIMS,
    ) -> None:
        self.tally = Tally()
        self._folder = folder
        self._references = references
        self._kills = kills
        self._each = each
        self._random = random.Random(seed)
        self._mutant = mutant
        self._aims = aims
        self._board = Board()

    def go(self) -> None:
        """Run the campaign.

        Raises:
            TortureError: a run lost or repeated a step, did not end as the undisturbed one, or left its folder in a
                state that it must never be in.
        """
        while not self._enough():
            if self.tally.lives > 20 * self._kills + 200:
                raise TortureError(f"not enough kills after {self.tally.lives} lives: {self._missing()}")
            self._torture_one_folder()

    def _enough(self) -> bool:
        return self.tally.kills >= self._kills and not self._missing()

    def _missing(self) -> list[str]:
        return [phase.name.lower() for phase in self._aims if self.tally.landed(phase) < self._each]

    def _torture_one_folder(self) -> None:
        """Two runs, one after the other in one folder: the second must neither take nor touch what the first left."""
        folder = self._folder / f"tortured-{self.tally.runs}"
        first = Run(folder, _SEEDS[0], background=self.tally.runs % 4 != 2)
        self._torture(first)
        second = Run(folder, _SEEDS[1], background=True, former=first.files())
        if not self._enough():
            self._torture(second)
            if changed := second.former_files_changed():
                raise TortureError(f"{folder}: the second run changed what the first had left: {changed}")
        shutil.rmtree(folder)

    def _torture(self, run: Run) -> None:
        reference = self._references[run.seed]
        finished = False
        while not finished:
            resume = not run.is_former(run.pointer())
            plan = self._next_plan(reference, enough=self._enough())
            life = _live(run, plan, self._board, resume=resume, mutant=self._mutant)
            self._count(life)
            try:
                self.tally.redone += run.bury(life, reference)
                finished = life.code == victim.FINISHED
                if finished:
                    run.compare(life, reference)
            except TortureError as error:
                raise TortureError(f"{run.folder}, life {run.lives} ({life.plan}): {error}; see {run.log}") from error
        self.tally.runs += 1

    # ------------------------------------------------------------------ one life

    def _next_plan(self, reference: Reference, *, enough: bool) -> Plan:
        choose = self._random
        seed = choose.randrange(2**32)
        if enough:
            return Plan(seed)
        faults = self._next_faults()
        workers = choose.choice([0, 1, 2])
        if self.tally.in_a_row and choose.random() < 0.2:
            # Twice in a row: before, or while, the next life takes up what the last one left.
            return Plan(seed, after=choose.uniform(0, 0.15 * reference.seconds), faults=faults, workers=workers)
        if self.tally.random.total() < self.tally.exact.total():
            return Plan(seed, after=choose.uniform(0, 0.9 * reference.seconds), faults=faults, workers=workers)
        rarest = min(self._aims, key=self.tally.landed)
        phase = rarest if choose.random() < 0.6 else choose.choice([*self._aims, Phase.CLEANUP])
        kill = Kill(phase, choose.randint(1, _COUNTS[phase]), choose.choice(["before", "middle", "after"]))
        return Plan(seed, kill=kill, faults=faults, workers=workers)

    def _next_faults(self) -> Faults:
        choose = self._random
        kind = choose.choice(["none", "some", "some", "full", "slow"])
        short_writes = choose.random() < 0.3
        if kind == "some":
            return Faults(rate=0.02, read_rate=choose.choice([0.0, 0.0, 0.1]), short_writes=short_writes)
        if kind == "full":
            begin = choose.randint(1, 60)
            return Faults(full=(begin, begin + choose.randint(1, 40)), short_writes=short_writes)
        return Faults(slow_fsync=0.01 if kind == "slow" else 0.0, short_writes=short_writes)

    def _count(self, life: Life) -> None:
        tally = self.tally
        tally.lives += 1
        tally.faults.update(life.faults)
        if life.code is None:
            (tally.random if life.plan.kill is None else tally.exact)[life.phase] += 1
        tally.failed_saves += life.code == victim.SAVE_FAILED
        tally.in_a_row = tally.in_a_row + 1 if life.code is None else 0
        tally.most_in_a_row = max(tally.most_in_a_row, tally.in_a_row)


class Run:
    """A run through its lives: the steps that survive, and the checkpoint that the next life must find.

    Args:
        folder: its output folder.
        seed: of the run.
        background: whether checkpoints are written by their own thread.
        former: digests of what another run had left in the folder before.
    """

    def __init__(self, folder: Path, seed: int, *, background: bool, former: dict[str, bytes] | None = None) -> None:
        self.folder = folder
        self.seed = seed
        self.background = background
        self.lives = 0
        self._checkpoints = folder / "checkpoints"
        self._former = former or {}
        self._former_run = self.pointer() if former else None
        self._reached = 0  # the last step of the line that the last life belongs to
        self._furthest = 0  # the last step of any line: a disk that fails while it is read sends a life back
        self._newest: CheckpointEntry | None = None
        self._durable: set[int] = set()  # the steps whose checkpoints were announced
        self._pointed = False  # whether latest.json was there
        self._dead: set[int] = set()

    @property
    def log(self) -> Path:
        return self.folder / "output.txt"

    @property
    def journal(self) -> Path:
        return self.folder / f"journal-{self.seed}-{self.lives}.jsonl"

    def begin_life(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.lives += 1

    def read_journal(self) -> list[dict[str, Any]]:
        if not self.journal.exists():
            return []
        # A kill may have come within the last line.
        whole, _, _ = self.journal.read_bytes().rpartition(b"\n")
        return [json.loads(line) for line in whole.splitlines()]

    # ------------------------------------------------------------------ after a life

    def bury(self, life: Life, reference: Reference) -> int:
        """Hold what a life did, and what it left, against what must be; return how many steps it trained again."""
        self._dead.add(life.pid)
        redone = self._stitch(life, reference)
        self._look_at_names(life)
        self._look_at_checkpoints(life)
        return redone

    def _stitch(self, life: Life, reference: Reference) -> int:
        """Hold the life's steps against the undisturbed run's, from the step of the checkpoint that it loaded."""
        if life.code == victim.NOTHING_SOUND and not life.plan.faults.read_rate:
            raise TortureError("no checkpoint could be loaded")
        loaded = next(iter(life.of("loaded")), None)
        if loaded is not None:
            self._check_loaded(loaded, life)
        elif life.of("step") and self._newest is not None:
            raise TortureError(f"{self._newest.path.name} is there, and training began at the beginning")
        if loaded is None and not life.of("step"):
            return 0
        begin = loaded["step"] if loaded is not None else 0
        redone = max(0, self._reached - begin)
        self._reached = begin
        for line in life.of("step"):
            self._take(line, reference)
        for line in life.of("eval"):
            if line["loss"] != reference.losses[line["step"]]:
                raise TortureError(f"step {line['step']} has another validation loss than the undisturbed run's")
        self._durable |= {line["step"] for line in life.of("checkpoint")}
        return redone

    def _check_loaded(self, loaded: dict[str, Any], life: Life) -> None:
        newest = None if self._newest is None else self._newest.path.name
        if loaded["name"] != newest and not life.faults[Fault.EIO]:
            raise TortureError(f"{loaded['name']} was loaded, and {newest} is the newest sound one")
        if loaded["step"] > self._furthest:
            raise TortureError(f"step {loaded['step']} was loaded, and only {self._furthest} were trained")

    def _take(self, line: dict[str, Any], reference: Reference) -> None:
        number = self._reached + 1
        if line["step"] != number:
            raise TortureError(f"step {line['step']} was trained where {number} was due")
        expected = reference.steps[number - 1]
        if line["samples"] != expected.samples:
            raise TortureError(f"step {number} saw other samples: {line['samples']}, not {expected.samples}")
        if line["loss"] != expected.loss:
            raise TortureError(f"step {number} has another loss: {line['loss']}, not {expected.loss}")
        self._reached = number
        self._furthest = max(self._furthest, number)

    def _look_at_names(self, life: Life) -> None:
        names = {path.name for path in self._listing()}
        if strangers := sorted(name for name in names if not _NAMES.fullmatch(name)):
            raise TortureError(f"files that have no business in the folder: {strangers}")
        failed = life.faults[Fault.EIO] + life.faults[Fault.ENOSPC]
        if life.of("checkpoint") and not failed and (left := sorted(_left_by(names, self._dead - {life.pid}))):
            raise TortureError(f"a save has not cleaned up what dead processes left: {left}")

    def _look_at_checkpoints(self, life: Life) -> None:
        manager = CheckpointManager(self._checkpoints, warn=_refuse_warning)
        for entry in manager.entries():
            try:
                manager.verify(entry.path)
            except CheckpointError as error:
                raise TortureError(f"a checkpoint is not sound: {error}") from error
        pointer = self.pointer()
        if pointer is not None and not self._has_checkpoint(pointer.checkpoint):
            raise TortureError(f"latest.json names {pointer.checkpoint}, which is not there")
        if pointer is None and (self._pointed or life.of("checkpoint")):
            raise TortureError("latest.json is lost")
        self._pointed = pointer is not None
        if not self.is_former(pointer):
            self._look_at_newest(life)

    def _has_checkpoint(self, name: str) -> bool:
        return any((self._checkpoints / there).is_dir() for there in (name, f"{name}-new", *self._renewed(name)))

    def _renewed(self, name: str) -> Iterator[str]:
        """A checkpoint that is being replaced is for a moment there under the name of what replaces it only."""
        return (path.name for path in self._listing() if path.name.startswith(name) and path.name.endswith("-new"))

    def _look_at_newest(self, life: Life) -> None:
        found = self._newest_sound()
        before, self._newest = self._newest, found
        announced = [line["step"] for line in life.of("checkpoint")]
        loaded = [line["step"] for line in life.of("loaded")]
        floor = max([*loaded, *announced], default=None)
        if found is None:
            if announced or before is not None:
                raise TortureError("every checkpoint is lost")
            return
        if found.step > self._furthest:
            raise TortureError(f"{found.path.name} is there, and only {self._furthest} steps were trained")
        unchanged = before is not None and (found.path, found.sequence) == (before.path, before.sequence)
        if announced or not unchanged:
            if floor is not None and found.step < floor:
                raise TortureError(f"step {floor} was durable, and step {found.step} is the newest: a step is lost")
            if before is not None and found.sequence < before.sequence:
                raise TortureError(f"{before.path.name} is lost: {found.path.name} was saved before it")

    def _newest_sound(self) -> CheckpointEntry | None:
        # A killed run's first checkpoint may be there without latest.json, which is worth a warning.
        manager = CheckpointManager(self._checkpoints, warn=lambda message: None)
        if manager.load_latest() is None:
            return None
        return next(entry for entry in manager.entries() if entry.path == manager.loaded_path)

    def _listing(self) -> list[Path]:
        return sorted(self._checkpoints.iterdir()) if self._checkpoints.is_dir() else []

    # ------------------------------------------------------------------ at the end

    def compare(self, life: Life, reference: Reference) -> None:
        """Hold a finished run against the undisturbed one."""
        if self._reached != len(reference.steps):
            raise TortureError(f"{self._reached} steps survive, of {len(reference.steps)}")
        if difference := _difference(self.final_state(), reference.state, "state"):
            raise TortureError(f"the final state differs from the undisturbed run's at {difference}")
        logged = {line["step"] for line in self._logged() if line["event"] == "train_step"}
        if missing := set(range(1, victim.STEPS + 1)) - logged:
            raise TortureError(f"metrics.jsonl lacks the steps {sorted(missing)}")
        if life.of("checkpoint") and not life.faults[Fault.EIO] + life.faults[Fault.ENOSPC]:
            self._check_tidiness(reference)

    def _check_tidiness(self, reference: Reference) -> None:
        names = {path.name for path in self._listing()}
        if left := sorted(_left_by(names, self._dead)):
            raise TortureError(f"the finished run left {left}")
        assert self._newest is not None
        entries = CheckpointManager(self._checkpoints).entries()
        own = [entry for entry in entries if entry.run_id == self._newest.run_id]
        if len(own) > victim.KEEP_LAST + victim.KEEP_BEST:
            raise TortureError(f"{len(own)} checkpoints were kept, not {victim.KEEP_LAST} and {victim.KEEP_BEST}")
        best = min(float.fromhex(reference.losses[step]) for step in self._durable)
        if not any(entry.eval_loss is not None and entry.eval_loss <= best for entry in own):
            raise TortureError(f"the best checkpoint, of validation loss {best}, is lost")

    def final_state(self) -> dict[str, Any]:
        state = CheckpointManager(self._checkpoints, warn=_refuse_warning).load_latest()
        if state is None:
            raise TortureError("every checkpoint is lost")
        del state["config"]  # which names the folder
        return state

    def _logged(self) -> Iterator[dict[str, Any]]:
        """The lines of metrics.jsonl; a kill may have cut off one line in each life."""
        cut = 0
        for line in (self.folder / "metrics.jsonl").read_bytes().splitlines():
            try:
                yield json.loads(line, parse_constant=_refuse_constant)
            except ValueError:
                cut += 1
        if cut > len(self._dead) + len(self._former):
            raise TortureError(f"metrics.jsonl has {cut} lines that are no JSON")

    # ------------------------------------------------------------------ the folder

    def pointer(self) -> Pointer | None:
        """What latest.json says; a kill never leaves one that cannot be read."""
        path = self._checkpoints / "latest.json"
        try:
            return read_pointer(FileSystem(), path) if path.exists() else None
        except CheckpointError as error:
            raise TortureError(f"latest.json is torn: {error}") from error

    def is_former(self, pointer: Pointer | None) -> bool:
        """Whether latest.json still names the run that was in this folder before."""
        return self._former_run is not None and pointer is not None and pointer.run_id == self._former_run.run_id

    def files(self) -> dict[str, bytes]:
        """The contents of every checkpoint in the folder."""
        return {str(path): path.read_bytes() for path in sorted(self._checkpoints.glob("step_*/*"))}

    def former_files_changed(self) -> list[str]:
        now = self.files()
        return sorted(name for name, content in self._former.items() if now.get(name) != content)


def _wait(pid: int, after: float | None) -> int:
    """The status of a child that has ended; it is killed after so many seconds."""
    started = time.monotonic()
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return status
        lived = time.monotonic() - started
        if after is not None and lived >= after:
            os.kill(pid, signal.SIGKILL)
            return os.waitpid(pid, 0)[1]
        if lived > _LONGEST_LIFE:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise TortureError(f"a life did not end within {_LONGEST_LIFE:.0f} seconds")
        time.sleep(0.001)


def _left_by(names: set[str], pids: set[int]) -> Iterator[str]:
    """Those of the names that a dead process has given."""
    for name in names:
        match = _LEFT_BY.fullmatch(name)
        # Another process may have the number by now, and then its holder is not known to be dead.
        if match and int(match[1]) in pids and not process_is_alive(int(match[1])):
            yield name


def _refuse_warning(message: str) -> None:
    raise TortureError(message)


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON")


def _difference(one: Any, other: Any, path: str) -> str | None:
    """The path to the first part in which two states differ; None where they are equal bit for bit."""
    if type(one) is not type(other):
        return path
    if isinstance(one, dict):
        if list(one) != list(other):
            return path
        return next((found for key in one if (found := _difference(one[key], other[key], f"{path}.{key}"))), None)
    if isinstance(one, list | tuple):
        if len(one) != len(other):
            return path
        pairs = enumerate(zip(one, other, strict=True))
        return next((found for index, (a, b) in pairs if (found := _difference(a, b, f"{path}.{index}"))), None)
    if isinstance(one, torch.Tensor):
        return None if one.dtype == other.dtype and torch.equal(one, other) else path
    if isinstance(one, np.ndarray):
        return None if one.dtype == other.dtype and np.array_equal(one, other) else path
    return None if one == other else path
