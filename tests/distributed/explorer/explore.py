"""Makes a schedule of a seed, runs it to its quiet end, and judges it."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from speedtronic.distributed import marks
from speedtronic.distributed.ledger import SPOOL
from speedtronic.distributed.master import MasterSettings
from tests.distributed.explorer.machines import MasterMachine, NodeMachine
from tests.distributed.explorer.schedule import Faults, Pause, Process, Stage, Task
from tests.distributed.explorer.strangers import KINDS, Strangers
from tests.distributed.explorer.truth import SLOTS, Rule, ScheduleError, Truth, delta_of

_LONGEST_CALM = 100  # rounds of all tasks after which it must be quiet
_SOON = 0.5  # rounds after which a node that is idle can be forgotten, where manifests are to hold few of them


@dataclass(frozen=True, slots=True)
class Plan:
    """What a seed decides about a schedule before it begins.

    Attributes:
        forgets: manifests have room for one node.
        turns: times k are the versions in one of which the k-th node must have been to be expected.
    """

    seed: int
    ticks: int
    nodes: int
    masters: int
    units_each: int
    inner_steps: int
    even: bool
    codec: str
    offsets: bool
    buffers: bool
    new_disks: bool
    forgets: bool
    checkpoint_share: float
    poison_share: float
    strangers: tuple[str, ...]
    stranger_share: float
    settings: MasterSettings
    faults: Faults
    turns: int

    @classmethod
    def of(cls, seed: int) -> Plan:
        choices = random.Random(seed)
        nodes = choices.choice((1, 2, 2, 3))
        expected = choices.choice((None, nodes, nodes, 1, 3 * nodes))
        synchronous = expected == nodes and choices.random() < 0.2
        quorum = expected if synchronous else choices.choice((None, 1))
        trouble = choices.choice((0.0, 0.03, 0.1))
        settings = MasterSettings(
            outer=choices.choice(("nesterov", "nesterov", "sgd", "delayed_nesterov")),
            codec=(codec := choices.choice(("fp32", "fp32", "bf16"))),
            expected_nodes=expected,
            quorum=quorum,
            grace=None if synchronous else choices.choice((None, 5.0, 40.0, 1e6)),
            max_staleness=choices.choice((None, None, None, 1.5)),
            keep_versions=choices.choice((1, 2, 4)),
            poll_interval=5.0,
        )
        new_disks = choices.random() < 0.25
        return cls(
            seed=seed,
            ticks=choices.choice((150, 250, 400)),
            nodes=nodes,
            masters=choices.choice((1, 2)),
            units_each=choices.choice((8, 14)),
            inner_steps=choices.choice((1, 2, 3)),
            even=choices.random() < 0.6,
            codec=codec,
            offsets=choices.random() < 0.2,
            buffers=choices.random() < 0.3,
            new_disks=new_disks,
            forgets=choices.random() < 0.15,
            checkpoint_share=choices.choice((0.0, 0.1, 0.3)),
            poison_share=choices.choice((0.0, 0.0, 0.0, 0.1)),
            # A node on a new disk believes what the store says of it, since it knows nothing else.
            strangers=tuple(kind for kind in KINDS if choices.random() < 0.25 and not (kind == "forged" and new_disks)),
            stranger_share=choices.choice((0.01, 0.05)),
            settings=settings,
            faults=Faults(
                lost=trouble,
                repeated=trouble / 2,
                failed=trouble,
                late=trouble,
                doubled=trouble,
                torn=choices.choice((0.0, 0.0, 0.2)),
                disk=choices.choice((0.0, 0.0, 0.2)),
                crash=choices.choice((0.0, 0.01, 0.03)),
                sleep=choices.choice((0.0, 0.0, 0.01)),
                vanish=choices.choice((0.0, 0.0, 0.01)),
                lag=choices.choice((0, 0, 30)),
                page=choices.choice((1000, 2)),
            ),
            turns=choices.choice((marks.TURNS, 1)),
        )

    def directed(self, focus: Mapping[str, Any]) -> Plan:
        """The same with some decisions taken otherwise: fields of `MasterSettings`, of `Faults`, or of this."""

        def with_focus(part: Any) -> Any:
            names = {field.name for field in dataclasses.fields(part)}
            return dataclasses.replace(part, **{name: value for name, value in focus.items() if name in names})

        directed: Plan = dataclasses.replace(self, settings=with_focus(self.settings), faults=with_focus(self.faults))
        return with_focus(directed)


class Exploration:
    """One schedule. `run` raises ScheduleError when the protocol did not keep its word."""

    def __init__(self, plan: Plan, *, keep_trace: bool = False) -> None:
        self.plan = plan
        settings = plan.settings
        self.truth = Truth(
            Rule(
                outer=settings.outer,
                lr=settings.lr,
                momentum=settings.momentum,
                expected=settings.expected_nodes,
                even=plan.even,
                keep_versions=settings.keep_versions,
                max_staleness=settings.max_staleness,
                quorum=settings.quorum,
                patient=settings.grace is not None and settings.grace > plan.ticks,
                recent_rounds=_SOON if plan.forgets else marks.RECENT_ROUNDS,
                turns=plan.turns,
            )
        )
        self.stage = Stage(plan.seed, plan.faults, self.truth, keep_trace=keep_trace)
        self.truth.bucket = self.stage.bucket
        self.stage.on_write = self._written
        self.choices = self.stage.choices
        if settings.expected_nodes not in {None, plan.nodes}:
            self.stage.troubles["wrong expected_nodes"] += 1
        self.starts = 0
        self.nodes = [self._node(index) for index in range(plan.nodes)]
        self.strangers = Strangers(self.stage, self.truth, self.nodes, plan.strangers)
        self.stage.may_vanish = self._is_known
        nonces = itertools.count()
        units = plan.nodes * plan.units_each
        self.masters = [
            MasterMachine(self.stage, f"master{index}", units, plan.buffers, settings, nonces)
            for index in range(plan.masters)
        ]

    def _node(self, index: int) -> NodeMachine:
        plan = self.plan
        return NodeMachine(
            self.stage,
            self.truth,
            name=f"node{index}",
            units=plan.nodes * plan.units_each,
            buffers=plan.buffers,
            first=index * plan.units_each,
            count=plan.units_each,
            inner_steps=plan.inner_steps if plan.even else self.choices.choice((1, 2, 3)),
            tokens=8 if plan.even else self.choices.choice((4, 8, 16)),
            codec=plan.codec,
            offset=0.25 if plan.offsets and index else 0.0,
            checkpoint_share=plan.checkpoint_share,
            poison_share=plan.poison_share,
            waits_for_the_store=self.choices.random() < 0.5,
        )

    def run(self) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(marks, "TURNS", self.plan.turns)
            if self.plan.forgets:
                for name, value in (("MOST_NODES", 1), ("_NODES_LEFT", 1), ("RECENT_ROUNDS", _SOON)):
                    patch.setattr(marks, name, value)
            self._run()

    def _run(self) -> None:
        for machine in self.choices.sample([*self.nodes, *self.masters], len(self.nodes) + len(self.masters)):
            self._start(machine)
        for _ in range(self.plan.ticks):
            self._maybe_end_something()
            if self.choices.random() < self.plan.stranger_share:
                self.strangers.act()
            self.stage.tick()
        self._become_quiet()
        self.stage.troubles["forgotten"] += len(self.truth.forgotten)
        self.truth.judge([node.span() for node in self.nodes])
        self._all_agree()

    def _start(self, machine: NodeMachine | MasterMachine) -> None:
        self.starts += 1
        if isinstance(machine, MasterMachine):
            machine.start(self.truth.identity)
        else:
            machine.start(machine.newest())

    def _is_known(self) -> bool:
        """Whether each master would know another store from this one. A new one on a new machine cannot."""
        return bool(self.truth.heads) and all(
            machine.store is not None or machine.has_looked for machine in self.masters if machine.running is not None
        )

    def _maybe_end_something(self) -> None:
        if self.choices.random() >= self.plan.faults.crash:
            return
        machine = self.choices.choice([*self.nodes, *self.masters])
        if machine.running is None:
            self._start(machine)
        elif isinstance(machine, MasterMachine):
            machine.crash()
        else:
            self._crash(machine)
        if machine.running is None and self.choices.random() < 0.5:
            self._start(machine)

    def _crash(self, node: NodeMachine) -> None:
        new_disk = self.plan.new_disks and self.choices.random() < 0.4
        node.crash(self.choices, new_disk=new_disk)
        if new_disk:
            self.stage.bucket.settle(f"in/{node.name}/")

    def _written(self, process: Process, name: str, data: bytes) -> None:
        if name != SPOOL:
            return
        committed = self.truth.spooled(process.name, data)
        node = next(node for node in self.nodes if node.name == process.name)
        assert node.running is not None
        node.running.committed(committed, self.truth.committed[committed].units)

    # --- The end

    def _become_quiet(self) -> None:
        self.stage.calm_down()
        self.stage.note("calm")
        self.truth.calm = len(self.truth.heads)
        for machine in [*self.nodes, *self.masters]:
            if isinstance(machine, MasterMachine) and (machine.settings.synchronous or self.truth.rule.patient):
                self._no_longer_patient(machine)
            if machine.running is None:
                self._start(machine)
        for number in range(_LONGEST_CALM):
            self.stage.bucket.now += 10  # no need to wait long for a grace time
            for process in self.stage.processes:
                for task in [*process.tasks[:1] * 6, *process.tasks]:
                    self._finish(process, task)
            if self._is_quiet():
                return
            if number % 5 == 4 and any(node.running and node.running.waits_for_versions for node in self.nodes):
                self.strangers.make_time_pass()
        raise ScheduleError(f"it does not become quiet: {self._unrest()}")

    def _no_longer_patient(self, machine: MasterMachine) -> None:
        """A round of all would wait for ever for nodes that have nothing left to send."""
        if machine.running is not None:
            machine.crash()
        machine.settings = dataclasses.replace(
            machine.settings, outer_lr=machine.settings.lr, outer_momentum=machine.settings.momentum, grace=1.0
        )

    def _finish(self, process: Process, task: Task) -> None:
        """Let a task do one whole piece of work; the training goes on until it pauses."""
        while self.stage.move(process, task) and task.work is not None and not isinstance(task.asks, Pause):
            self.stage.bucket.now += 1

    def _is_quiet(self) -> bool:
        return not self._unrest()

    def _unrest(self) -> list[str]:
        truth = self.truth
        version = len(truth.heads) - 1
        waiting = [
            name
            for name, delta in truth.committed.items()
            if delta.reachable and not truth.has_dealt_with(version, name)
        ]
        others = truth.strays | truth.forged.keys()
        objects = [name for name in self.stage.bucket.names() if name.startswith("in/") and name not in others]
        waiting += [name for name in objects if not truth.may_stay(name)]
        passed_over = self._passed_over()
        waiting = [name for name in waiting if delta_of(name) not in passed_over]
        for machine in self.nodes:
            assert machine.running is not None
            if not machine.running.is_quiet(version):
                running = machine.running
                waiting.append(f"{machine.name} at version {running.node.version} of {version}, {running.pending}")
        return waiting

    def _passed_over(self) -> set[str]:
        """Deltas that no version will deal with, as their nodes find out when others make versions."""
        truth = self.truth
        version = len(truth.heads) - 1
        left = [name for name in truth.committed if not truth.has_dealt_with(version, name)]
        return {name for name in left if truth.may_be_passed_over(name)}

    def _all_agree(self) -> None:
        """A node that has nothing to add holds the weights of the head."""
        weights = torch.as_tensor(self.truth.weights(len(self.truth.heads) - 1)[SLOTS])
        for machine in self.nodes:
            assert machine.running is not None
            off = float((machine.running.model.get_parameter(SLOTS).detach() - weights).abs().max())
            if off > 1e-5:
                raise ScheduleError(f"{machine.name} is idle and differs from the head by {off:.3g}")
