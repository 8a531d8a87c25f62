"""Many nodes and a master in one process and in virtual time, around the real procedures of the protocol.

Nothing sleeps: a queue of events, in the order of a virtual clock, moves the trainings and answers the requests of the
procedures. Training is real. The same seeds give the same events, and so the same weights.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

from torch import nn

from speedtronic.distributed.codec import Fp32Codec
from speedtronic.distributed.master import Master, MasterSettings
from speedtronic.distributed.node import Install, Node
from speedtronic.distributed.outer import outer_optimizer
from speedtronic.distributed.requests import Delete, Effect, Files, Get, List, Procedure, Put, answer
from speedtronic.distributed.schema import Schema, rebase_, snapshot
from speedtronic.distributed.stores.base import Buffer, Store
from speedtronic.errors import StoreError

T = TypeVar("T")


class Clock:
    """The queue of what is to happen, each at its virtual second."""

    def __init__(self) -> None:
        self.now = 0.0
        self._order = itertools.count()
        self._queue: list[tuple[float, int, Callable[[], None]]] = []

    def __call__(self) -> float:
        return self.now

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        """Let `call` happen in so many virtual seconds; what is due at one time happens in the order of asking."""
        heapq.heappush(self._queue, (self.now + seconds, next(self._order), call))

    def run(self, goes_on: Callable[[], bool]) -> None:
        """Let things happen for as long as `goes_on` says, asked before each."""
        while self._queue and goes_on():
            self.now, _, call = heapq.heappop(self._queue)
            call()


@dataclass(frozen=True)
class Link:
    """How long requests of one machine take: `request` seconds each, and `transfer` seconds for a model's size."""

    request: float = 0.0
    transfer: float = 0.0

    def seconds(self, effect: Effect) -> float:
        match effect:
            case Put(name, _) | Get(name, _):
                return self.request + (0.0 if name.startswith(("head/", "place/")) else self.transfer)
            case List() | Delete():
                return self.request
        return 0.0


class VirtualThread:
    """Runs one procedure after another in virtual time; each request is answered when its time on the link is over.

    What a request raises is raised inside the procedure, as on a thread; a store error that ends a procedure leaves the
    thread free for the next one.
    """

    def __init__(self, clock: Clock, link: Link, store: Store, files: Files | None = None) -> None:
        self._clock, self._link, self._store, self._files = clock, link, store, files
        self.busy = False

    def run(self, procedure: Procedure[T], done: Callable[[T], None] = lambda _: None) -> None:
        """Begin a procedure; `done` is given what it returns. Not while it is busy."""
        assert not self.busy, "one procedure at a time"
        self.busy = True
        self._resume(procedure, done, None, None)

    def _resume(
        self, procedure: Procedure[T], done: Callable[[T], None], result: object, error: Exception | None
    ) -> None:
        """Continue until a request that takes time. Requests that take none are answered in place."""
        while True:
            try:
                effect = procedure.throw(error) if error is not None else procedure.send(result)
            except StopIteration as end:
                self.busy = False
                done(end.value)
                return
            except StoreError:
                self.busy = False
                return
            seconds = self._link.seconds(effect)
            if seconds > 0.0:
                self._clock.after(seconds, partial(self._answered, procedure, done, effect))
                return
            result, error = self._answer(effect)

    def _answered(self, procedure: Procedure[T], done: Callable[[T], None], effect: Effect) -> None:
        self._resume(procedure, done, *self._answer(effect))

    def _answer(self, effect: Effect) -> tuple[object, Exception | None]:
        try:
            return answer(effect, self._store, self._files), None
        except (StoreError, OSError) as error:
            return None, error


class MemoryFiles:
    """A node's own files, in memory."""

    def __init__(self) -> None:
        self._files: dict[str, bytes] = {}

    def write(self, name: str, data: Buffer) -> None:
        self._files[name] = bytes(data)

    def read(self, name: str) -> bytes | None:
        return self._files.get(name)

    def remove(self, name: str) -> None:
        self._files.pop(name, None)


class Training(Protocol):
    """What a node trains."""

    model: nn.Module

    def step(self) -> int:
        """One update; returns on how many samples."""

    def installed(self) -> None:
        """The model was put on a version."""


class Budget:
    """The steps that all nodes may make together."""

    def __init__(self, steps: int) -> None:
        self.left = steps

    def take(self) -> bool:
        self.left -= 1
        return self.left >= 0

    @property
    def spent(self) -> bool:
        return self.left <= 0


@dataclass(frozen=True)
class Throttle:
    """How a node moves.

    Attributes:
        speed: steps a second.
        jitter: by how much the time of a step varies at most, as a share of it.
        poll: seconds from one look for a newer version to the next.
        waits: whether a node stands still after each boundary until a version has come, as in synchronous DiLoCo.
    """

    speed: float
    jitter: float = 0.0
    poll: float = 1.0
    waits: bool = False


class VirtualNode:
    """A training process: steps at its own pace, and the background threads beside it.

    Args:
        put_on: puts the model on a version, and returns the install that came of it.
        budget: when it is spent, the node trains no more, and sends what it has.
    """

    def __init__(
        self,
        name: str,
        training: Training,
        *,
        clock: Clock,
        store: Store,
        link: Link,
        pace: Throttle,
        budget: Budget,
        inner_steps: int,
        put_on: Callable[[nn.Module, Install], Install],
        seed: int,
    ) -> None:
        self.lost = 0
        self.node = Node(
            Schema.of(training.model),
            node=name,
            nonce="00000001",
            codec=Fp32Codec(),
            inner_steps=inner_steps,
            initial=snapshot(training.model),
            say=lambda event, payload: None,
            now=lambda: "",
        )
        self._training = training
        self._clock = clock
        self._pace = pace
        self._budget = budget
        self._put_on = put_on
        self._random = random.Random(seed)
        files = MemoryFiles()
        self._sending, self._polling = (
            VirtualThread(clock, link, store, files),
            VirtualThread(clock, link, store, files),
        )
        self._boundary_at = 0.0
        self._waits = True  # for the first version

    def start(self) -> None:
        self._sending.run(self.node.begin(None))
        self._look()

    @property
    def done(self) -> bool:
        """Whether everything that it learned is in the store."""
        node = self.node
        return self._budget.spent and not (node.unsent_steps or node.has_snapshot or node.has_spooled)

    def _look(self) -> None:
        if not self._polling.busy:
            self._polling.run(self.node.poll(), lambda found: self._found() if found else None)
        self._clock.after(self._pace.poll, self._look)

    def _found(self) -> None:
        if self._waits:
            self._install()
            self._waits = False
            self._next()

    def _next(self) -> None:
        shake = self._random.uniform(-self._pace.jitter, self._pace.jitter)
        self._clock.after((1.0 + shake) / self._pace.speed, self._after_step)

    def _after_step(self) -> None:
        """The end of a step. What has come in the meantime is installed here, between two steps."""
        if self._budget.take():
            self.node.count(self._training.step(), 0)
            self.node.stepped(self.node.local_step + 1)
        queued = self._wants_boundary() and self._boundary_reached()
        self._install()
        self._waits = self._pace.waits and queued
        if not self._waits:
            self._next()

    def _wants_boundary(self) -> bool:
        node = self.node
        return node.wants_boundary() or (self._budget.spent and node.unsent_steps > 0 and not node.has_spooled)

    def _boundary_reached(self) -> bool:
        if self.node.start_boundary() != "queued":
            return False
        values = snapshot(self._training.model, self.node.spare(), names=self.node.exchanged)
        self.node.give_snapshot(values, self._clock.now - self._boundary_at)
        self._boundary_at = self._clock.now
        self._send()
        return True

    def _send(self) -> None:
        if not self._sending.busy:
            self._sending.run(self._spool_and_upload())

    def _spool_and_upload(self) -> Procedure[None]:
        yield from self.node.spool()
        while (yield from self.node.upload()) or self.node.has_snapshot:
            yield from self.node.spool()

    def _install(self) -> None:
        install = self.node.installable()
        if install is None:
            return
        before = self.node.unsent_steps
        install = self._put_on(self._training.model, install)
        self.node.installed(install)
        self.lost += before - self.node.unsent_steps
        self._training.installed()


def rebase(model: nn.Module, install: Install) -> Install:
    """As the product puts a model on a version."""
    rebase_(model, install.new_base, install.base, adopt=install.adopt)
    return install


class VirtualMaster:
    """A master alone on a machine beside the store, which looks every `settings.poll_interval` seconds."""

    def __init__(self, model: nn.Module, settings: MasterSettings, *, clock: Clock, store: Store, link: Link) -> None:
        numbers = itertools.count()
        self._clock, self._store, self._interval = clock, store, settings.poll_interval
        self._thread = VirtualThread(clock, link, store)
        self.master = Master(
            Schema.of(model),
            snapshot(model),
            settings,
            new_outer=outer_optimizer(settings),
            nonce=lambda: f"n{next(numbers)}",
            clock=clock,
            now=lambda: "",
            say=lambda event, payload: None,
        )

    def start(self) -> None:
        self._look()

    @property
    def done(self) -> bool:
        """Whether everything that the store has is in the version that it made last."""
        return not self._thread.busy and not self._store.list_after("in/").entries

    def _look(self) -> None:
        if not self._thread.busy:
            self._thread.run(self.master.poll())
        self._clock.after(self._interval, self._look)
