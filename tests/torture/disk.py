"""A file layer for checkpoints that fails and kills at chosen operations."""

from __future__ import annotations

import errno
import os
import random
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path

from speedtronic.durable.files import FileSystem
from tests.torture.board import Board, Fault, Phase
from tests.torture.plan import Faults, Plan

_HALF_WRITTEN = re.compile(r"\.tmp-step_\d+.*-(\d+)")
_REMOVED = re.compile(r"\.tmp-removed-.+-(\d+)")
_LATEST = re.compile(r"latest\.json|\.tmp-latest\.json-(?:.+-)?(\d+)")
_LONGEST_DELAY = 0.002  # seconds between the beginning of what has no middle of its own and the kill


class Executioner:
    """Kills its own process where the plan says so.

    Args:
        plan: of this life.
        board: told of each phase.
    """

    def __init__(self, plan: Plan, board: Board) -> None:
        self._plan = plan
        self._board = board
        self._counts: Counter[Phase] = Counter()
        self._random = random.Random(plan.seed)

    @contextmanager
    def operation(self, phase: Phase) -> Iterator[bool]:
        """Around one operation of a phase: yields whether the kill is to come in the middle of it."""
        self._board.enter(phase)
        self._counts[phase] += 1
        kill = self._plan.kill
        due = kill is not None and (kill.phase, kill.count) == (phase, self._counts[phase])
        if due and kill is not None and kill.moment == "before":
            self.strike()
        middle = due and kill is not None and kill.moment == "middle"
        yield middle
        if due:
            self.strike()

    def strike(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)  # a signal to oneself may arrive a moment later

    def strike_soon(self) -> None:
        """Kill in a moment, from another thread, whatever this one does meanwhile."""
        threading.Timer(self._random.uniform(0, _LONGEST_DELAY), self.strike).start()


class ShortWrites(FileIO):
    """A file of which the system takes less at a time than it is given, as it may."""

    chooser: random.Random
    board: Board

    def write(self, data: memoryview) -> int:  # type: ignore[override]
        view = memoryview(data)
        if len(view) < 2:
            return super().write(view)
        self.board.count(Fault.SHORT_WRITE)
        return super().write(view[: self.chooser.randint(1, len(view) - 1)])


class Delegating(FileSystem):
    """Hands every operation to another file layer; those that change something are overridden below."""

    def __init__(self, inner: FileSystem) -> None:
        self.inner = inner

    def make_directory(self, path: Path) -> None:
        self.inner.make_directory(path)

    def create(self, path: Path) -> FileIO:
        return self.inner.create(path)

    def write(self, file: FileIO, data: memoryview) -> None:
        self.inner.write(file, data)

    def sync(self, file: FileIO) -> None:
        self.inner.sync(file)

    def sync_directory(self, path: Path) -> None:
        self.inner.sync_directory(path)

    def rename(self, source: Path, target: Path) -> None:
        self.inner.rename(source, target)

    def remove_tree(self, path: Path) -> None:
        self.inner.remove_tree(path)

    def remove_file(self, path: Path) -> None:
        self.inner.remove_file(path)

    def open(self, path: Path) -> FileIO:
        return self.inner.open(path)


class TorturedFileSystem(Delegating):
    """Fails as `plan.faults` says, kills as `plan.kill` says, and knows which phase of a save each operation is.

    A save's phases are told by the names that it works on, so that nothing of the manager's inside is relied upon.
    """

    def __init__(self, plan: Plan, board: Board, executioner: Executioner) -> None:
        super().__init__(FileSystem())
        self._faults: Faults = plan.faults
        self._board = board
        self._executioner = executioner
        self._random = random.Random(plan.seed + 1)
        self._operations = 0
        self._pointed = False
        self._phase = Phase.WRITE

    # ------------------------------------------------------------------ operations

    def make_directory(self, path: Path) -> None:
        with self._changing(path, fills=True):
            super().make_directory(path)

    def create(self, path: Path) -> FileIO:
        with self._changing(path, fills=True):
            if not self._faults.short_writes:
                return super().create(path)
            file = ShortWrites(path, "xb")
            file.chooser, file.board = self._random, self._board
            return file

    def write(self, file: FileIO, data: memoryview) -> None:
        with self._changing(Path(str(file.name)), fills=True) as middle:
            if middle:
                super().write(file, data[: len(data) // 2])
                self._executioner.strike()
            super().write(file, data)

    def sync(self, file: FileIO) -> None:
        with self._changing(Path(str(file.name))) as middle:
            self._dawdle()
            if middle:
                self._executioner.strike_soon()
            super().sync(file)

    def sync_directory(self, path: Path) -> None:
        with self._changing(path):
            self._dawdle()
            super().sync_directory(path)

    def rename(self, source: Path, target: Path) -> None:
        with self._changing(target if target.name == "latest.json" else source, target):
            super().rename(source, target)
            self._pointed = self._pointed or target.name == "latest.json"

    def remove_tree(self, path: Path) -> None:
        with self._changing(path) as middle:
            if middle:
                for file in sorted(path.iterdir())[:2]:
                    file.unlink()
                self._executioner.strike()
            super().remove_tree(path)

    def remove_file(self, path: Path) -> None:
        with self._changing(path):
            super().remove_file(path)

    def open(self, path: Path) -> FileIO:
        loading = not self._saving
        with self._executioner.operation(Phase.LOAD if loading else self._phase):
            if self._random.random() < self._faults.read_rate and loading:
                self._board.count(Fault.EIO)
                raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
            return super().open(path)

    # ------------------------------------------------------------------ phases

    @property
    def _saving(self) -> bool:
        return self._operations > 0

    @contextmanager
    def _changing(self, path: Path, target: Path | None = None, *, fills: bool = False) -> Iterator[bool]:
        self._operations += 1
        self._phase = self._phase_of(path, target)
        with self._executioner.operation(self._phase) as middle:
            self._fail_perhaps(path, fills=fills)
            yield middle

    def _phase_of(self, path: Path, target: Path | None) -> Phase:
        for name in (path.name, path.parent.name):
            if match := _HALF_WRITTEN.fullmatch(name):
                return self._phase_of_half_written(int(match[1]), target)
            if match := _REMOVED.fullmatch(name):
                return self._removing() if int(match[1]) == os.getpid() else Phase.CLEANUP
            if match := _LATEST.fullmatch(name):
                mine = match[1] is None or int(match[1]) == os.getpid()
                return Phase.POINTER if mine else Phase.CLEANUP
        if target is not None:
            return self._removing() if _REMOVED.fullmatch(target.name) else Phase.RENAME
        return self._phase

    def _phase_of_half_written(self, pid: int, target: Path | None) -> Phase:
        if pid != os.getpid():
            return Phase.CLEANUP
        self._pointed = False
        return Phase.WRITE if target is None else Phase.RENAME

    def _removing(self) -> Phase:
        return Phase.PRUNE if self._pointed else Phase.RENAME

    # ------------------------------------------------------------------ faults

    def _fail_perhaps(self, path: Path, *, fills: bool) -> None:
        begin, end = self._faults.full
        if fills and begin <= self._operations < end:
            self._fail(Fault.ENOSPC, path)
        if self._random.random() < self._faults.rate:
            self._fail(self._random.choice([Fault.ENOSPC, Fault.EIO]) if fills else Fault.EIO, path)

    def _fail(self, fault: Fault, path: Path) -> None:
        self._board.count(fault)
        number = errno.ENOSPC if fault is Fault.ENOSPC else errno.EIO
        raise OSError(number, os.strerror(number), str(path))

    def _dawdle(self) -> None:
        if self._faults.slow_fsync:
            self._board.count(Fault.SLOW_FSYNC)
            time.sleep(self._random.uniform(0, self._faults.slow_fsync))
