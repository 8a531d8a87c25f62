"""What DumbDiLoCo's rules are worth: real training of a small model by four nodes, in virtual time, arm by arm.

    python benchmarks/diloco_ablation.py [--text FILE] [--seeds 3] [--rounds 60] [--processes 2] [--quick] [--json]

The model predicts a character from the eight before it (Bengio et al. 2003, "A Neural Probabilistic Language Model";
63 thousand parameters). Its nodes and master are those of the product, run against a store in memory by a virtual
clock: the fastest node takes a second a step and thirty to a round, a request takes a twentieth of a second, and on the
slow link a delta or a version takes a round and a half. What an arm changes that cannot be configured, it changes by
replacing a function.

Every arm trains the same number of steps over all nodes together. The figure is the loss of the last version on the
last tenth of the text, relative to synchronous DiLoCo (outer learning rate 0.7, momentum 0.9, even nodes, a link
without delay) with the same seed: mean ± standard deviation over the seeds. The text is tiny Shakespeare where it lies
at ../shared/data, and Python's own library elsewhere.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import copy
import dataclasses
import json
import math
import statistics
import sysconfig
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Literal
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from virtual_nodes import Budget, Clock, Link, Throttle, VirtualMaster, VirtualNode, rebase

from speedtronic.distributed import averaging
from speedtronic.distributed.master import MasterSettings
from speedtronic.distributed.node import Install, Node
from speedtronic.distributed.schema import rebase_
from speedtronic.distributed.stores.memory import MemoryStore

SHAKESPEARE = Path(__file__).parents[2] / "shared" / "data" / "tinyshakespeare.txt"
LARGEST_TEXT = 2**20  # characters
CHARACTERS, CONTEXT, EMBEDDING, WIDTH = 65, 8, 24, 240
INNER_STEPS, BATCH, LEARNING_RATE = 30, 32, 3e-3
EVEN, UNEVEN = (1.0, 1.0, 1.0, 1.0), (1.0, 1.0, 0.5, 0.25)
NO_DELAY, NEAR = Link(), Link(request=0.05)
FAR = Link(request=0.05, transfer=1.5 * INNER_STEPS)  # up and down together: three rounds


# ---------------------------------------------------------------------- arms


@dataclass(frozen=True)
class Arm:
    """One way to train.

    Attributes:
        speeds: steps a second, of each node.
        jitter: by how much the time of a single step varies, as a share of it.
        quorum: of the four nodes.
        lr, momentum: of the outer step; None: the product's defaults for this quorum.
        reset: whether an install resets the inner optimizer.
        install: "rebase" as the product does it; "nothing pending" leaves out the node's own deltas that are still on
            their way; "overwrite" takes the global weights as they are.
        fractions: whether the outer step follows the share of the round that came.
    """

    name: str
    speeds: tuple[float, ...] = EVEN
    jitter: float = 0.1
    link: Link = NEAR
    quorum: int = 2
    lr: float | None = None
    momentum: float | None = None
    reset: bool = False
    install: Literal["rebase", "nothing pending", "overwrite"] = "rebase"
    fractions: bool = True

    @property
    def synchronous(self) -> bool:
        """Whether nodes stand still after each boundary until the version has come that holds it."""
        return self.link == NO_DELAY


BASELINE = Arm("synchronous, 0.7/0.9", jitter=0.0, link=NO_DELAY, quorum=4)
ARMS = (
    BASELINE,
    Arm("even, quorum 1", quorum=1),
    Arm("even, quorum half (default)"),
    Arm("even, quorum all", quorum=4),
    Arm("even, default, reset", reset=True),
    Arm("even, default, overwrite", install="overwrite"),
    Arm("4:4:2:1, quorum 1", UNEVEN, quorum=1),
    Arm("4:4:2:1, quorum half (default)", UNEVEN),
    Arm("4:4:2:1, quorum all", UNEVEN, quorum=4),
    Arm("4:4:2:1, default, reset", UNEVEN, reset=True),
    Arm("4:4:2:1, default, overwrite", UNEVEN, install="overwrite"),
    Arm("4:4:2:1, a full 0.7/0.9 step per late delta", UNEVEN, quorum=1, lr=0.7, momentum=0.9, fractions=False),
    Arm("slow link, default", link=FAR),
    Arm("slow link, reset", link=FAR, reset=True),
    Arm("slow link, nothing pending", link=FAR, install="nothing pending"),
    Arm("slow link, overwrite", link=FAR, install="overwrite"),
)


@dataclass(frozen=True)
class Outcome:
    """How an arm ended: loss in nats per character, versions, rounds (Σf), and what share of all steps was dropped."""

    arm: str
    seed: int
    loss: float
    versions: int
    rounds: float
    lost: float


# ---------------------------------------------------------------------- the training


class Text:
    """Characters as numbers: nine tenths to train on, in parts for the nodes, and the last tenth to be asked about."""

    def __init__(self, characters: str) -> None:
        common = [character for character, _ in collections.Counter(characters).most_common(CHARACTERS - 1)]
        places = {character: place for place, character in enumerate(sorted(common))}
        ids = torch.tensor([places.get(character, CHARACTERS - 1) for character in characters])
        windows = ids.unfold(0, CONTEXT + 1, 1)
        cut = len(windows) * 9 // 10
        self.training, self.held_out = windows[:cut], windows[cut + CONTEXT :]

    def part(self, place: int, parts: int) -> Tensor:
        """Every so manieth window, `(N, CONTEXT + 1)`, beginning with that of this place."""
        return self.training[place::parts]


class NextCharacter(nn.Module):
    """Ids `(B, CONTEXT)` to logits `(B, CHARACTERS)`."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CHARACTERS, EMBEDDING)
        self.hidden = nn.Linear(CONTEXT * EMBEDDING, WIDTH)
        self.head = nn.Linear(WIDTH, CHARACTERS)

    def forward(self, ids: Tensor) -> Tensor:
        hidden: Tensor = torch.tanh(self.hidden(self.embedding(ids).flatten(1)))
        logits: Tensor = self.head(hidden)
        return logits


def loss_of(model: nn.Module, windows: Tensor) -> Tensor:
    return F.cross_entropy(model(windows[:, :-1]), windows[:, -1])


class Training:
    """A node's model and optimizer, and its own part of the text, drawn from by its own seed."""

    def __init__(self, model: nn.Module, windows: Tensor, seed: int, *, reset: bool) -> None:
        self.model = model
        self._optimizer = self._new_optimizer()
        self._windows = windows
        self._random = torch.Generator().manual_seed(seed)
        self._reset = reset

    def step(self) -> int:
        """One update; returns on how many samples."""
        chosen = torch.randint(len(self._windows), (BATCH,), generator=self._random)
        loss_of(self.model, self._windows[chosen]).backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return BATCH

    def installed(self) -> None:
        if self._reset:
            self._optimizer = self._new_optimizer()

    def _new_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE, fused=True)


# ---------------------------------------------------------------------- an arm


def run(arm: Arm, seed: int, rounds: int, characters: str) -> Outcome:
    """Train an arm to the end, until every step is in a version, or for twenty rounds after the last step."""
    text = Text(characters)
    torch.manual_seed(seed)
    initial = NextCharacter()
    clock, store = Clock(), MemoryStore()
    budget = Budget(rounds * INNER_STEPS * len(arm.speeds))
    steps = budget.left
    master = VirtualMaster(initial, settings(arm), clock=clock, store=store, link=replace(arm.link, transfer=0.0))
    nodes = [
        VirtualNode(
            f"node-{place}",
            Training(copy.deepcopy(initial), text.part(place, len(arm.speeds)), 100 * seed + place, reset=arm.reset),
            clock=clock,
            store=store,
            link=arm.link,
            pace=Throttle(speed, arm.jitter, waits=arm.synchronous),
            budget=budget,
            inner_steps=INNER_STEPS,
            put_on=overwrite if arm.install == "overwrite" else rebase,
            seed=100 * seed + place,
        )
        for place, speed in enumerate(arm.speeds)
    ]
    with changed(arm):
        master.start()
        for node in nodes:
            node.start()
        clock.run(lambda: not budget.spent)
        last = clock.now + 20 * INNER_STEPS
        clock.run(lambda: clock.now < last and not (all(node.done for node in nodes) and master.done))
    head = master.master.head
    assert head is not None, "an arm ends with a version"
    loss = evaluate(initial, master.master.weights, text.held_out)
    return Outcome(arm.name, seed, loss, head.version, head.rounds, sum(node.lost for node in nodes) / steps)


def settings(arm: Arm) -> MasterSettings:
    return MasterSettings(
        outer_lr=arm.lr,
        outer_momentum=arm.momentum,
        expected_nodes=len(arm.speeds),
        quorum=arm.quorum,
        poll_interval=0.5,
    )


@contextlib.contextmanager
def changed(arm: Arm) -> Iterator[None]:
    """Replace what the product does by what the arm does instead."""
    with contextlib.ExitStack() as changes:
        if arm.install != "rebase":  # a version is taken without the node's own deltas that are still on their way
            changes.enter_context(mock.patch.object(Node, "_without", lambda self, weights, deltas: dict(weights)))
        if not arm.fractions:
            changes.enter_context(mock.patch.object(averaging.Round, "fraction", return_value=1.0))
        yield


def overwrite(model: nn.Module, install: Install) -> Install:
    install = install._replace(adopt=True)
    rebase_(model, install.new_base, install.base, adopt=True)
    return install


@torch.no_grad()
def evaluate(model: nn.Module, weights: dict[str, Tensor], windows: Tensor) -> float:
    """Mean loss in nats per character."""
    model.load_state_dict(weights)
    return float(loss_of(model, windows))


# ---------------------------------------------------------------------- all arms


def read_text(path: Path | None) -> tuple[str, str]:
    """What the text is, and its characters."""
    if path is None and SHAKESPEARE.exists():
        path = SHAKESPEARE
    if path is not None:
        return path.name, path.read_text(encoding="utf-8")[:LARGEST_TEXT]
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    characters = "".join(source.read_text(encoding="utf-8", errors="replace") for source in sources)
    return "the Python library", characters[:LARGEST_TEXT]


def relative(outcomes: list[Outcome], arm: str, to: str) -> list[float]:
    """Loss over that of another arm with the same seed, less one, seed by seed."""
    losses = {(outcome.arm, outcome.seed): outcome.loss for outcome in outcomes}
    seeds = sorted(seed for name, seed in losses if name == arm)
    return [losses[arm, seed] / losses[to, seed] - 1.0 for seed in seeds]


def spread(values: list[float]) -> str:
    """Mean ± standard deviation, in percent."""
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{100 * statistics.mean(values):+.1f}% ± {100 * deviation:.1f}"


def table(outcomes: list[Outcome]) -> list[str]:
    lines = [
        "| arm | loss | relative to synchronous | versions | rounds | steps dropped |",
        "|---|---|---|---|---|---|",
    ]
    for arm in dict.fromkeys(outcome.arm for outcome in outcomes):
        own = [outcome for outcome in outcomes if outcome.arm == arm]
        figures = [
            f"{statistics.mean(outcome.loss for outcome in own):.4f}",
            spread(relative(outcomes, arm, BASELINE.name)),
            f"{statistics.mean(outcome.versions for outcome in own):.0f}",
            f"{statistics.mean(outcome.rounds for outcome in own):.1f}",
            f"{100 * statistics.mean(outcome.lost for outcome in own):.1f}%",
        ]
        lines.append(f"| {' | '.join([arm, *figures])} |")
    return lines


# ---------------------------------------------------------------------- what is said of them


@dataclass(frozen=True)
class Statement:
    """What is said of an arm, and how its losses (relative to another arm) or its dropped steps must be for it.

    Attributes:
        least, most: bounds of the mean of the relative losses, or of the share of dropped steps.
    """

    text: str
    arm: str
    to: str = BASELINE.name
    least: float = -math.inf
    most: float = math.inf
    of_dropped_steps: bool = False

    def judged(self, outcomes: list[Outcome]) -> str:
        if self.of_dropped_steps:
            mean = statistics.mean(outcome.lost for outcome in outcomes if outcome.arm == self.arm)
            figure = f"{100 * mean:.1f}% of the steps"
        else:
            costs = relative(outcomes, self.arm, self.to)
            mean, figure = statistics.mean(costs), f"{spread(costs)} against {self.to!r}"
        verdict = "reproduced" if self.least <= mean <= self.most else "NOT reproduced"
        return f"{verdict}: {self.text}: {self.arm!r} {figure}"


EVEN_DEFAULT, UNEVEN_DEFAULT = "even, quorum half (default)", "4:4:2:1, quorum half (default)"
STATEMENTS = (
    Statement("the default loses nothing against synchronous rounds", EVEN_DEFAULT, most=0.0),
    Statement("nor does it with uneven speeds", UNEVEN_DEFAULT, most=0.0),
    Statement("resetting costs loss", "even, default, reset", EVEN_DEFAULT, least=0.0),
    Statement("resetting costs loss", "4:4:2:1, default, reset", UNEVEN_DEFAULT, least=0.0),
    Statement("resetting costs loss", "slow link, reset", "slow link, default", least=0.0),
    Statement("what is pending must be kept", "slow link, nothing pending", "slow link, default", least=0.1),
    Statement("a slow link does not diverge", "slow link, default", most=0.1),
    Statement("overwriting costs loss", "even, default, overwrite", EVEN_DEFAULT, least=0.0),
    Statement("overwriting costs loss", "4:4:2:1, default, overwrite", UNEVEN_DEFAULT, least=0.0),
    Statement(
        "overwriting drops about a fifth", "even, default, overwrite", least=0.1, most=0.35, of_dropped_steps=True
    ),
    Statement("waiting for all costs loss", "even, quorum all", EVEN_DEFAULT, least=0.0),
    Statement("waiting for all costs loss", "4:4:2:1, quorum all", UNEVEN_DEFAULT, least=0.0),
    Statement("waiting for nobody changes less than 1%", "even, quorum 1", EVEN_DEFAULT, least=-0.01, most=0.01),
    Statement("waiting for nobody changes less than 1%", "4:4:2:1, quorum 1", UNEVEN_DEFAULT, least=-0.01, most=0.01),
    Statement("full steps per late delta diverge", "4:4:2:1, a full 0.7/0.9 step per late delta", least=1.0),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--text", type=Path, help="any text of about a megabyte")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=60, help="of thirty steps of each of the four nodes")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="one seed and ten rounds: to see that it runs")
    parser.add_argument("--json", action="store_true", help="a line for a program each")
    args = parser.parse_args()
    if args.quick:
        args.seeds, args.rounds = 1, 10
    name, characters = read_text(args.text)
    jobs = [(arm, seed) for seed in range(1, args.seeds + 1) for arm in ARMS]
    with ProcessPoolExecutor(args.processes, get_context("spawn"), partial(torch.set_num_threads, 1)) as pool:
        futures = [pool.submit(run, arm, seed, args.rounds, characters) for arm, seed in jobs]
        outcomes = [future.result() for future in futures]
    for outcome in outcomes if args.json else ():
        print(json.dumps({"benchmark": "diloco_ablation", "text": name, **dataclasses.asdict(outcome)}))
    if not args.json:
        print(
            f"{name}: {len(characters)} characters; {args.rounds} rounds of {INNER_STEPS} steps, {args.seeds} seeds\n"
        )
        print("\n".join([*table(outcomes), "", *(statement.judged(outcomes) for statement in STATEMENTS)]))


if __name__ == "__main__":
    main()
