"""The machines of a schedule: nodes that train a model whose weights show what each delta carries, and masters."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import torch
from torch import nn

from speedtronic.distributed.codec import make_codec
from speedtronic.distributed.master import Master, MasterSettings
from speedtronic.distributed.node import Install, Node
from speedtronic.distributed.outer import outer_optimizer
from speedtronic.distributed.protocol import DeltaId
from speedtronic.distributed.schema import Schema, Tensors, rebase_, snapshot
from tests.distributed.explorer.schedule import PAUSE, Process, Stage, Task, Work
from tests.distributed.explorer.truth import LATEST, MEAN, SLOTS, STEP, ScheduleError, Span, Truth

_LOCAL = 0.05  # what bfloat16 leaves behind, of a slot that moves by 1


class Counting(nn.Module):
    """A model with one slot for each unit of data. Training on a unit lowers its slot by `STEP`."""

    def __init__(self, units: int, buffers: bool) -> None:
        super().__init__()
        self.register_parameter(SLOTS, nn.Parameter(torch.zeros(units)))
        if buffers:
            self.register_buffer(MEAN, torch.zeros(2))
            self.register_buffer(LATEST, torch.zeros(1, dtype=torch.int64))

    @torch.no_grad()
    def train_on(self, unit: int, step: int) -> None:
        self.get_parameter(SLOTS)[unit] -= STEP
        for name, buffer in self.named_buffers():
            buffer.copy_(buffer * 0.5 + step) if name == MEAN else buffer.fill_(step)


def values_of(model: Counting) -> Tensors:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@dataclass(frozen=True, slots=True)
class Checkpoint:
    model: Tensors
    state: dict[str, Any]
    step: int
    unsent: frozenset[int]


@dataclass(slots=True)
class NodeMachine:
    """A node through all its restarts.

    Args:
        units: of all nodes.
        buffers: whether the model has any.
        first, count: the units of data that are its own.
        tokens: of one inner step.
        offset: what its initial weights differ by from the master's.
    """

    stage: Stage
    truth: Truth
    name: str
    units: int
    buffers: bool
    first: int
    count: int
    inner_steps: int
    tokens: int
    codec: str
    offset: float
    checkpoint_share: float
    poison_share: float
    waits_for_the_store: bool
    files: dict[str, bytes] = field(default_factory=dict)
    checkpoints: list[Checkpoint] = field(default_factory=list)
    starts: int = 0
    running: RunningNode | None = None

    def new_nonce(self) -> str:
        return f"{self.starts:08x}"

    def start(self, checkpoint: Checkpoint | None) -> None:
        self.starts += 1
        self.running = RunningNode(self, checkpoint)

    def crash(self, choices: random.Random, *, new_disk: bool) -> None:
        assert self.running is not None
        self.stage.end(self.running.process)
        self.running = None
        if choices.random() < 0.1:
            self.checkpoints = self.checkpoints[:-1]  # the newest is damaged
        if choices.random() < 0.03:
            self.checkpoints = []
        if new_disk:
            self.files.clear()
            self.stage.troubles["new disk"] += 1
            gone = self.truth.disk_lost(self.name)
            self.stage.late = [asks for asks in self.stage.late if not asks.name.startswith(tuple(_stems(gone)))]
            self.stage.note(f"{self.name} gets a new disk; nobody has {sorted(gone)} any more")

    def newest(self) -> Checkpoint | None:
        return self.checkpoints[-1] if self.checkpoints else None

    def span(self) -> Span:
        return Span(self.name, self.first, self.count)


class RunningNode:
    """One process of a node: its training and its background threads."""

    def __init__(self, machine: NodeMachine, checkpoint: Checkpoint | None) -> None:
        self.machine = machine
        self.stage = machine.stage
        self.checkpoint = checkpoint
        self.model = Counting(machine.units, machine.buffers)
        if checkpoint is None:
            with torch.no_grad():
                self.model.get_parameter(SLOTS).add_(machine.offset)
        else:
            self.model.load_state_dict(checkpoint.model)
        self.step = 0 if checkpoint is None else checkpoint.step
        self.unsent = set[int]()
        self.pending: list[str] = []
        if checkpoint is not None:
            self._restore(checkpoint)
        self.seconds = 0.0
        self.begun = False
        self.looks = 0
        self.process = Process(machine.name, machine.files)
        self.process.tasks = [
            Task("trainer", self._training),
            Task(
                "spool",
                lambda: self._in_background(self.node.spool()) if self.begun and self.node.has_snapshot else None,
            ),
            Task(
                "upload",
                lambda: self._in_background(self.node.upload()) if self.begun and self.node.has_spooled else None,
            ),
            Task("poll", lambda: self._look() if self.begun else None),
        ]
        self.node = Node(
            Schema.of(self.model),
            node=machine.name,
            nonce=machine.new_nonce(),
            codec=make_codec(machine.codec),
            inner_steps=machine.inner_steps,
            initial=snapshot(self.model),
            say=self._heard,
            now=lambda: f"t{self.stage.now}",
        )
        self.stage.processes.append(self.process)
        self.stage.note(
            f"{machine.name} starts for the {machine.starts}th time, {'at' if checkpoint else 'new at'} {self.step}"
        )

    def _restore(self, checkpoint: Checkpoint) -> None:
        """What the node should know from its checkpoint: what is not sent yet, and what is sent and in no version."""
        truth, name = self.machine.truth, self.machine.name
        pending = [DeltaId(name, one["session"], one["seq"]).name for one in checkpoint.state["pending"]]
        lost = [truth.committed[delta] for delta in pending if not truth.committed[delta].reachable]
        unsent = checkpoint.unsent.union(*(delta.units for delta in lost))
        if truth.furthest(name) <= checkpoint.state["covered"]["step"]:
            self.unsent |= unsent
            self.pending += [delta for delta in pending if truth.committed[delta].reachable]
        elif checkpoint.state["version"] is None:
            # It trained alone, while what an earlier life had sent was in the store.
            truth.dropped |= unsent - truth.units_of(name)

    def _heard(self, event: str, payload: Mapping[str, Any]) -> None:
        self._maybe_forget(event, payload)
        self.stage.note(f"{self.machine.name} says {event}: {payload.get('message', payload)}")

    def _maybe_forget(self, event: str, payload: Mapping[str, Any]) -> None:
        """A node that learns that a delta will be in no version gives up all that is in none yet, and adopts one."""
        truth = self.machine.truth
        if event == "delta_rejected":
            refused = DeltaId(self.machine.name, payload["session"], payload["seq"]).name
            if not truth.has_dealt_with(len(truth.heads) - 1, refused):
                self.stage.troubles["refused without a word"] += 1
                self.pending.clear()
        elif event == "log" and re.match("session .* was closed", payload["message"]):
            self.stage.troubles["session closed"] += 1
            self.pending.clear()

    def _in_background(self, procedure: Any) -> Work:
        yield from procedure

    def _look(self) -> Work:
        try:
            yield from self.node.poll()
        finally:
            self.looks += 1

    def _training(self) -> Work:
        yield from self.node.begin(None if self.checkpoint is None else self.checkpoint.state)
        self.begun = True
        while self.machine.waits_for_the_store and not self.looks:
            yield PAUSE
        self._install()
        self._continue_at()
        while True:
            if self.step < self.machine.count:
                self._train()
            elif self.node.version is not None and self.node.unsent_steps > 0:
                self._boundary()
            self._install()
            self._continue_at()
            yield PAUSE
            if not self.stage.calm and self.stage.choices.random() < self.machine.checkpoint_share:
                while self.node.has_snapshot:
                    yield PAUSE
                self._save()

    def _train(self) -> None:
        unit = self.machine.first + self.step
        self.step += 1
        self.model.train_on(unit, self.step)
        if not self.stage.calm and self.stage.choices.random() < self.machine.poison_share:
            self._poison(unit)
        self.unsent.add(unit)
        self.seconds += 1.0
        self.node.count(1, self.machine.tokens)
        self.node.stepped(self.step)
        if self.node.wants_boundary():
            self._boundary()

    @torch.no_grad()
    def _poison(self, unit: int) -> None:
        self.model.get_parameter(SLOTS)[unit] = float("nan")
        self.stage.troubles["nan"] += 1
        self.stage.note(f"{self.machine.name} is no longer finite, at unit {unit}")

    def _boundary(self) -> None:
        if self.node.start_boundary() == "queued":
            values = snapshot(self.model, into=self.node.spare(), names=self.node.exchanged)
            self.node.give_snapshot(values, self.seconds)
            self.seconds = 0.0

    def committed(self, name: str, units: frozenset[int]) -> None:
        """A delta of this life is on the disk."""
        self.pending.append(name)
        self.unsent -= units

    def _install(self) -> None:
        install = self.node.installable()
        if install is None:
            return
        rebase_(self.model, install.new_base, install.base, adopt=install.adopt)
        self.node.installed(install)
        if install.adopt:
            self.machine.truth.dropped |= self.unsent
            self.unsent.clear()
        self.stage.note(f"{self.machine.name} installs {install.manifest.version}{' (adopts)' * install.adopt}")
        self._compare(install)

    def _compare(self, install: Install) -> None:
        """The model is the version, plus what it lacks of this node: nothing lost here, nothing learnt twice."""
        truth = self.machine.truth
        version = install.manifest.version
        self.pending = [name for name in self.pending if not truth.has_dealt_with(version, name)]
        if self.machine.name in truth.forgotten:
            return  # the version may have this node's delta and no longer say so: the node finds out a round later
        wanted = torch.tensor(truth.weights(version)[SLOTS])
        for name in self.pending:
            wanted -= torch.as_tensor(truth.committed[name].values[SLOTS])
        wanted[list(self.unsent)] -= STEP
        off = (self.model.get_parameter(SLOTS).detach() - wanted).abs()
        if off.max() > _LOCAL:
            unit = int(off.argmax())
            raise ScheduleError(
                f"{self.machine.name} at version {version}: its own slot {unit} is off by "
                f"{off[unit]:.3g}, with {self.pending} pending and {sorted(self.unsent)} unsent"
            )

    def _continue_at(self) -> None:
        goal = self.node.continue_at()
        if goal is not None:
            self.stage.note(f"{self.machine.name} continues at {goal.step}, from {self.step}")
            if goal.step > self.machine.count:
                raise ScheduleError(f"{self.machine.name} is moved to step {goal.step}, where it never was")
            self.step = goal.step

    def _save(self) -> None:
        state = self.node.state_dict(patience=0.0)
        self.machine.checkpoints.append(Checkpoint(values_of(self.model), state, self.step, frozenset(self.unsent)))
        self.stage.note(f"{self.machine.name} saves a checkpoint at {self.step}")

    def is_quiet(self, version: int) -> bool:
        node = self.node
        done = self.begun and self.step == self.machine.count and node.version == version
        return done and not (node.has_snapshot or node.has_spooled or node.unsent_steps or self.waits_for_versions)

    @property
    def waits_for_versions(self) -> bool:
        """Whether it holds deltas of which it does not know what became of them."""
        return bool(self.node._pending)


@dataclass(slots=True)
class MasterMachine:
    stage: Stage
    name: str
    units: int
    buffers: bool
    settings: MasterSettings
    nonces: Iterator[int]
    running: Process | None = None
    store: str | None = None
    has_looked: bool = False

    def start(self, store: str | None) -> None:
        """Start it, on a machine that knows the identity of the store, if there is one."""
        self.store, self.has_looked = store, False
        model = Counting(self.units, self.buffers)
        master = Master(
            Schema.of(model),
            snapshot(model),
            self.settings,
            new_outer=outer_optimizer(self.settings),
            nonce=lambda: f"n{next(self.nonces):04d}",
            clock=lambda: float(self.stage.now),
            now=lambda: datetime.fromtimestamp(self.stage.now, UTC).isoformat(),
            say=lambda event, payload: self.stage.note(f"{self.name} says {event}: {payload.get('message', payload)}"),
            store_id=store,
        )
        self.running = Process(self.name, {})
        self.running.tasks = [Task("rounds", lambda: self._round(master))]
        self.stage.processes.append(self.running)
        self.stage.note(f"{self.name} starts")

    def _round(self, master: Master) -> Work:
        yield from master.poll()
        self.has_looked = True

    def crash(self) -> None:
        assert self.running is not None
        self.stage.end(self.running)
        self.running = None


def _stems(names: set[str]) -> list[str]:
    return [name.removesuffix(".safetensors") for name in names] or ["\0"]
