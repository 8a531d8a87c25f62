"""Real nodes and a real master that train one small model together over any store, in one thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from speedtronic.distributed.codec import make_codec
from speedtronic.distributed.node import Node
from speedtronic.distributed.outer import MasterOuterLoop
from speedtronic.distributed.requests import perform
from speedtronic.distributed.schema import Schema, rebase_, snapshot
from speedtronic.distributed.stores.base import Store
from speedtronic.distributed.stores.memory import MemoryStore
from tests.support.masters import Heard
from tests.support.nodes import MemoryFiles

INNER = 5


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-2)


class Data:
    """The batches of a node: different for each, the same each time."""

    def __init__(self, node: int) -> None:
        self.generator = torch.Generator().manual_seed(100 + node)

    def batch(self) -> tuple[Tensor, Tensor]:
        inputs = torch.randn(16, 4, generator=self.generator)
        return inputs, inputs.sum(dim=1, keepdim=True).sin()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, data: Data, steps: int) -> None:
    for _ in range(steps):
        inputs, targets = data.batch()
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()


class Worker:
    """A training process with its node."""

    def __init__(
        self, store: Store, number: int, make_optimizer: Callable[[nn.Module], torch.optim.Optimizer], inner: int
    ) -> None:
        self.store, self.inner = store, inner
        self.model = network()
        self.optimizer = make_optimizer(self.model)
        self.data, self.files = Data(number), MemoryFiles()
        self.step = 0
        self.node = Node(
            Schema.of(self.model),
            node=f"n{number}",
            nonce="00000001",
            codec=make_codec("fp32"),
            inner_steps=inner,
            initial=snapshot(self.model),
            say=Heard(),
            now=lambda: "t",
        )
        perform(self.node.begin(None), store, self.files)

    def receive(self) -> None:
        perform(self.node.poll(), self.store, self.files)
        self.install()

    def install(self) -> None:
        install = self.node.installable()
        assert install is not None
        rebase_(self.model, install.new_base, install.base, adopt=install.adopt)
        self.node.installed(install)

    def train_and_send(self) -> None:
        for _ in range(self.inner):
            train(self.model, self.optimizer, self.data, 1)
            self.step += 1
            self.node.count(16, 16)
            self.node.stepped(self.step)
        assert self.node.start_boundary() == "queued"
        self.node.give_snapshot(snapshot(self.model, names=self.node.exchanged), 1.0)
        assert perform(self.node.spool(), self.store, self.files)
        while not perform(self.node.upload(), self.store, self.files):
            pass


def together(
    nodes: int,
    rounds: int,
    *,
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adamw,
    inner: int = INNER,
    store: Store | None = None,
    **settings: Any,
) -> tuple[nn.Module, list[Worker], MasterOuterLoop]:
    """Train by the real nodes and the real master, all of which wait for each round; the model is the global one."""
    store = store or MemoryStore()
    model = network()
    options = {"outer_lr": None, "outer_momentum": None, "expected_nodes": nodes, "quorum": nodes} | settings
    loop = MasterOuterLoop(store, snapshot(model), schema=Schema.of(model), say=Heard(), **options)
    loop.sync_once()
    workers = [Worker(store, number, make_optimizer, inner) for number in range(nodes)]
    for worker in workers:
        worker.receive()
    for round_ in range(1, rounds + 1):
        for worker in workers:
            worker.train_and_send()
        assert loop.sync_once() == nodes
        assert loop.outer_step == round_
        for worker in workers:
            worker.receive()
    model.load_state_dict(loop.snapshot())
    return model, workers, loop


def assert_same(one: nn.Module, other: nn.Module, *, tolerance: float = 0.0) -> None:
    for value, expected in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(value, expected, rtol=tolerance, atol=tolerance)
