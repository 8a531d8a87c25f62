"""One schedule: processes that run procedures against each other, one effect at a time, as a seed decides."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

from speedtronic.distributed.protocol import IDENTITY
from speedtronic.distributed.requests import (
    Delete,
    Effect,
    Get,
    List,
    Put,
    ReadFile,
    RemoveFile,
    WriteFile,
)
from speedtronic.errors import StoreContentError, StoreUnavailableError
from tests.distributed.explorer.bucket import Bucket, Copy, Watcher

TEARABLE = ("in/", "w/", "opt/")


@dataclass(frozen=True, slots=True)
class Faults:
    """How often, of all requests to the store, each fault happens; and of all ticks, each crash."""

    lost: float = 0.0  # done, but the reply does not arrive
    repeated: float = 0.0  # done, the reply lost, and done again below the protocol, whose reply arrives
    failed: float = 0.0  # not done
    late: float = 0.0  # an error now, done at some time later
    doubled: float = 0.0  # done, and done again at some time later
    arrival: float = 0.1  # of all ticks in which something is late, those in which it happens
    torn: float = 0.0  # a large object of which only the beginning arrives
    disk: float = 0.0  # a file cannot be written
    crash: float = 0.0  # a process ends
    vanish: float = 0.0  # the root of the store is away: all requests are answered by the bare folder below the mount
    sleep: float = 0.0  # a process stands still for long
    vanish_at: str = ""  # a regular expression: before one in five puts of such names, the root goes away
    hidden: str = ""  # a regular expression: names that listings do not show at all, until it is calm
    lag: int = 0  # ticks for which a listing may still show what was
    page: int = 1000  # entries of one page of a listing


class Pause:
    """What a task yields where others may move although it asked for nothing."""


PAUSE = Pause()
Work = Generator[Effect | Pause, Any, None]


class Task:
    """A background thread, or the training, of a process: does its work one effect at a time."""

    def __init__(self, name: str, next_work: Callable[[], Work | None]) -> None:
        self.name = name
        self.next_work = next_work
        self.work: Work | None = None
        self.asks: Effect | Pause | None = None


@dataclass(eq=False)
class Process:
    """What ends all at once. `files` stay when it has ended."""

    name: str
    files: dict[str, bytes]
    tasks: list[Task] = field(default_factory=list)
    wakes: int = 0
    alive: bool = True


class _Nobody:
    """Watches the bare folder, which is not the store."""

    def created(self, copy: Copy) -> None:
        pass

    def deleted(self, copy: Copy) -> None:
        pass


class Stage:
    """The scheduler: which process moves, and what becomes of the effect that it asks for.

    While the root of the store is away, a bare folder answers, which keeps what it is given for the next time. The root
    comes back when nobody acts any more on what the bare folder said: each work that it answered has ended, or has
    asked since for the identity of the store, which is what the protocol rests on. (In between, within one request and
    the check that follows it, the folder store holds a handle to its root.)
    """

    def __init__(self, seed: int, faults: Faults, watcher: Watcher, *, keep_trace: bool = False) -> None:
        self.choices = random.Random(seed)
        self.faults = faults
        self.bucket = Bucket(self.choices, watcher, lag=faults.lag, page=faults.page, hidden=faults.hidden)
        self.bare = Bucket(self.choices, _Nobody(), lag=0, page=faults.page)
        self.away = False
        self.misled = set[Task]()  # what acts on an answer of the bare folder
        self.may_vanish: Callable[[], bool] = lambda: False
        self.processes: list[Process] = []
        self.late: list[Put | Delete] = []
        self.effects = 0
        self.troubles = Counter[str]()
        self.calm = False
        self.keep_trace = keep_trace
        self.trace: list[str] = []
        self.on_write: Callable[[Process, str, bytes], None] = lambda process, name, data: None

    @property
    def now(self) -> int:
        return self.bucket.now

    def note(self, line: str) -> None:
        if self.keep_trace:
            self.trace.append(f"{self.now:>6}  {line}")

    def calm_down(self) -> None:
        """From here on nothing fails, nothing lags, nobody sleeps."""
        self.calm = True
        for process in self.processes:
            for task in process.tasks:
                while task in self.misled:
                    self.move(process, task)
        self._come_back()
        while self.late:
            self._something_late()
        self.bucket.lag, self.bucket.hidden = 0, ""
        for process in self.processes:
            process.wakes = 0

    def tick(self) -> None:
        """One move of one task, or one thing that comes late."""
        self.bucket.now += 1
        self._vanish_or_come_back()
        if self.late and self.choices.random() < self.faults.arrival:
            self._something_late()
            return
        awake = [process for process in self.processes if process.wakes <= self.now]
        if not awake:
            return
        process = self.choices.choice(awake)
        if not self.calm and self.choices.random() < self.faults.sleep:
            process.wakes = self.now + self.choices.randrange(10, 200)
            self.note(f"{process.name} sleeps until {process.wakes}")
            return
        self.move(process, self.choices.choice(process.tasks))

    def _vanish_or_come_back(self) -> None:
        if self.away:
            if not self.misled and self.choices.random() < 0.1:
                self._come_back()
        elif self.choices.random() < self.faults.vanish:
            self._vanish()

    def _vanish(self) -> None:
        if not self.away and not self.calm and self.may_vanish():
            self.away = True
            self.troubles["vanished"] += 1
            self.note("the root is away")

    def _come_back(self) -> None:
        if self.away:
            self.away = False
            self.note("the root is back")

    def end(self, process: Process) -> None:
        """A crash: what was in memory is gone, the files stay. A request on its way may still arrive."""
        self.note(f"{process.name} ends")
        self.troubles["crash"] += 1
        self.processes.remove(process)
        process.alive = False
        for task in process.tasks:
            asked = task.asks
            if isinstance(asked, Put | Delete) and not self.calm and self.choices.random() < 0.3:
                self.late.append(asked)
            if task.work is not None:
                task.work.close()
            self.misled.discard(task)

    def move(self, process: Process, task: Task) -> bool:
        """Let a task do what it asked for and go on to its next request; false when it has nothing to do."""
        try:
            return self._move(process, task)
        finally:
            if task.work is None:
                self.misled.discard(task)

    def _move(self, process: Process, task: Task) -> bool:
        try:
            if task.work is None:
                task.work = task.next_work()
                if task.work is None:
                    return False
                task.asks = next(task.work)
                return True
            try:
                answer = self._answer(process, task, task.asks)
            except (StoreUnavailableError, OSError) as error:
                task.asks = task.work.throw(error)
            else:
                task.asks = task.work.send(answer)
        except StopIteration:
            task.work = task.asks = None
        except StoreContentError:
            raise
        except (StoreUnavailableError, OSError) as error:
            self.note(f"{process.name}/{task.name} gives up: {error}")
            task.work = task.asks = None
        return True

    def _answer(self, process: Process, task: Task, asks: Effect | Pause | None) -> Any:
        if asks is None or isinstance(asks, Pause):
            return None
        self.effects += 1
        match asks:
            case WriteFile(name, data):
                if not self.calm and self.choices.random() < self.faults.disk:
                    self.note(f"{process.name}/{task.name} write {name}: no space")
                    self.troubles["no space"] += 1
                    raise OSError(28, "No space left on device")
                self.note(f"{process.name}/{task.name} write {name} ({len(data)} bytes)")
                process.files[name] = bytes(data)
                self.on_write(process, name, bytes(data))
                return None
            case ReadFile(name):
                return process.files.get(name)
            case RemoveFile(name):
                self.note(f"{process.name}/{task.name} remove {name}")
                process.files.pop(name, None)
                return None
        at = self.faults.vanish_at
        if at and isinstance(asks, Put) and re.search(at, asks.name) and self.choices.random() < 0.2:
            self._vanish()
        fate = self._fate(asks)
        self.troubles[fate] += 1
        if fate == "late" or fate == "doubled":
            assert isinstance(asks, Put | Delete)
            self.late.append(asks)
        if fate == "torn":
            assert isinstance(asks, Put)
            done: Any = self._root.put(asks.name, bytes(asks.data)[: len(asks.data) // 2], whole=False)
        elif fate == "failed" or fate == "late":
            done = None
        else:
            if fate == "repeated":
                self._do(asks)
            done = self._do(asks)
        if self.keep_trace:
            self.note(f"{process.name}/{task.name} {_words(asks)} -> {fate} {_short(done)}{' (bare)' * self.away}")
        if fate in ("lost", "failed", "late", "torn"):
            raise StoreUnavailableError(f"{fate}: {_words(asks)}")
        if self.away and not (isinstance(asks, Get) and asks.name == IDENTITY):
            self.misled.add(task)
        else:
            self.misled.discard(task)
        return done

    @property
    def _root(self) -> Bucket:
        """What answers: the store, or the bare folder in its place."""
        return self.bare if self.away else self.bucket

    def _do(self, asks: Effect) -> Any:
        match asks:
            case Put(name, data):
                return self._root.put(name, bytes(data))
            case Get():
                return self._root.get(asks)
            case List(prefix, marker):
                return self._root.list_after(prefix, marker)
            case Delete(name):
                return self._root.delete(name)
        raise TypeError(asks)

    def _fate(self, asks: Effect) -> str:
        if self.calm:
            return "served"
        drawn = self.choices.random()
        faults = self.faults
        for fate, share in (
            ("lost", faults.lost),
            ("repeated", faults.repeated),
            ("failed", faults.failed),
            ("late", faults.late),
            ("doubled", faults.doubled),
            ("torn", faults.torn),
        ):
            drawn -= share
            if drawn < 0:
                return fate if self._possible(fate, asks) else "served"
        return "served"

    def _possible(self, fate: str, asks: Effect) -> bool:
        if fate == "torn":
            return isinstance(asks, Put) and asks.name.startswith(TEARABLE) and self._root.there(asks.name) is None
        if fate in ("late", "doubled"):
            return isinstance(asks, Put | Delete)
        return True

    def _something_late(self) -> None:
        asks = self.late.pop(self.choices.randrange(len(self.late)))
        self.note(f"late: {_words(asks)} -> {_short(self._do(asks))}")


def _words(asks: Effect) -> str:
    match asks:
        case Put(name, data):
            return f"put {name} ({len(data)} bytes)"
        case Get(name):
            return f"get {name}"
        case List(prefix, marker):
            return f"list {prefix} after {marker!r}"
        case Delete(name):
            return f"delete {name}"
    return str(asks)


def _short(done: Any) -> str:
    if isinstance(done, bytes):
        return f"{len(done)} bytes"
    if isinstance(done, tuple):
        return f"{[entry.name for entry in done[0]]}"
    return "" if done is None else str(done)
