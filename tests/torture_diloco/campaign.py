"""Three nodes that train together over a store, each of them killed again and again, or none."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from signal import SIGTERM

from speedtronic.config import load_config
from speedtronic.distributed.coordinator import build_master
from speedtronic.distributed.outer import say_through
from speedtronic.distributed.pull import pull
from speedtronic.distributed.status import store_status
from speedtronic.distributed.stores import open_store
from speedtronic.metrics import MetricLogger
from speedtronic.runtime import build_initial_model
from tests.torture_diloco import setting
from tests.torture_diloco.lives import HarnessError, Process, fates
from tests.torture_diloco.places import Place
from tests.torture_diloco.setting import BATCH, MASTER, NODES, Size

_TICK = 0.05  # seconds
_TAKING_IN = 300.0  # seconds that the master gets for what was sent last
_VERSIONS = 5.0  # that a master without a node makes in a life, on average
_SPOOL = "spool.safetensors"


@dataclass(frozen=True)
class Outcome:
    """How a run of the three ended.

    Attributes:
        weights: file of the final global weights.
        lives: of all processes.
        kills: by what was killed: `working`, `starting` (a node), or `averaging` (the master without a node).
        trained_again: steps, of all nodes.
        versions: of the global weights.
        seconds: from the first start until everything was taken in.
    """

    weights: Path
    lives: int
    kills: Counter[str]
    trained_again: int
    versions: int
    seconds: float


class Together:
    """A run of the three nodes.

    `anna` trains and is the master. A run outlives its nodes' ends, which kills make uneven: when anna has done her
    steps, `speedtronic diloco master` takes over the averaging, and is killed likewise.

    Args:
        folder: for everything that the run writes.
        text: what is trained on.
        size: how much.
        seed: of the model, the data and all that is random about the kills.
        place: where its store lies.
        every: mean number of steps that a life trains; None: nobody is killed.
        ranks: of each node.
    """

    def __init__(
        self, folder: Path, text: Path, size: Size, seed: int, place: Place, *, every: float | None, ranks: int = 1
    ) -> None:
        self._folder = folder
        self._size = size
        self._seed = seed
        self._every = every
        self._ranks = ranks
        self.config = setting.write(setting.together(folder, text, size, seed, place), folder / "config.json")
        self._store = open_store(place.url, **place.options)
        self._environment = {
            "OMP_NUM_THREADS": "1",
            "TORTURE_PACE": str(size.pace),
            "TORTURE_KEPT": str(place.kept),
        }
        self._nodes = {name: self._node(name) for name in NODES}
        averaging = ["diloco", "master", str(self.config), f"run.output_dir={folder / 'master'}"]
        self._averaging = self._process("master", averaging, [], "outer_step", _VERSIONS)

    def go(self) -> Outcome:
        """Raises HarnessError where a process failed, or something that was sent is not taken in."""
        began = time.monotonic()
        with _gone_at_last([*self._nodes.values(), self._averaging]):
            self._publish_the_first_version()
            self._train()
            self._send_what_is_left()
            self._take_in_what_was_sent()
            code = self._averaging.end()
            if code not in (128 + SIGTERM, -SIGTERM):  # the latter while it starts
                raise HarnessError(f"the master, asked to end, ended with {code}: see {self._averaging.log}")
        seconds = time.monotonic() - began
        weights = self._folder / "model.safetensors"
        manifest = pull(self._store, weights, replace=True)
        processes = [*self._nodes.values(), self._averaging]
        kills = sum((process.kills for process in self._nodes.values()), Counter[str]())
        kills["averaging"] = self._averaging.kills.total()
        return Outcome(
            weights=weights,
            lives=sum(process.lives for process in processes),
            kills=kills,
            trained_again=sum(node.count() for node in self._nodes.values()) - len(NODES) * self._size.steps,
            versions=manifest.version,
            seconds=seconds,
        )

    # ------------------------------------------------------------------ the processes

    def _node(self, name: str) -> Process:
        own = [f"run.output_dir={self._folder / name}", f"distributed.node_id={name}"]
        role = ["distributed.role=master"] if name == MASTER else []
        own.append(f"data.micro_batch_size={BATCH // self._ranks}")
        words = ["train", str(self.config), *own, *role]
        return self._process(name, words, ["--resume"], "train_step", self._every, self._ranks)

    def _process(
        self, name: str, command: list[str], again: list[str], unit: str, mean: float | None, ranks: int = 1
    ) -> Process:
        its_fates = iter(()) if mean is None or self._every is None else fates(f"{self._seed}-{name}", mean)
        return Process(name, command, again, self._folder / name, unit, self._environment, its_fates, ranks)

    # ------------------------------------------------------------------ what happens

    def _publish_the_first_version(self) -> None:
        """So that all nodes begin at once, and none trains alone before there is a version: what it trained then would
        be dropped, as it should be, if the first version that it sees were a later one."""
        logger = MetricLogger(level="WARNING")
        config = load_config(self.config).validate()
        build_master(
            config.distributed, self._store, build_initial_model(config, logger), say_through(logger)
        ).sync_once()

    def _train(self) -> None:
        """Until all nodes have done their steps."""
        for node in self._nodes.values():
            node.start()
        running = set(NODES)
        while running:
            time.sleep(_TICK)
            running = {name for name in running if self._nodes[name].goes_on()}
            if MASTER not in running:
                self._average()

    def _average(self) -> None:
        if not self._averaging.lives:
            self._averaging.start()
        elif not self._averaging.goes_on():
            raise HarnessError(f"the master ended by itself: see {self._averaging.log}")

    def _send_what_is_left(self) -> None:
        """A node that could not send its last delta before it ended does so when it is started again."""
        for node in self._nodes.values():
            if not any(self._folder.glob(f"state/*/{node.name}/{_SPOOL}")):
                continue
            node.fates = iter(())
            node.start()
            while node.goes_on():
                time.sleep(_TICK)

    def _take_in_what_was_sent(self) -> None:
        until = time.monotonic() + _TAKING_IN
        while (waiting := store_status(self._store, now=time.time()).outstanding) and time.monotonic() < until:
            self._average()
            time.sleep(5 * _TICK)
        if waiting:
            raise HarnessError(f"{waiting} deltas are never taken in: see {self._averaging.log}")


@contextmanager
def _gone_at_last(processes: Iterable[Process]) -> Iterator[None]:
    try:
        yield
    finally:
        for process in processes:
            process.remove()


def train_alone(folder: Path, text: Path, seed: int, *, steps: int, batch: int) -> Process:
    """Start one process that trains alone; its weights will be in `folder`."""
    config = setting.write(setting.alone(folder, text, seed, steps=steps, batch=batch), folder / "config.json")
    process = Process(folder.name, ["train", str(config)], [], folder, "train_step", {"OMP_NUM_THREADS": "1"}, iter(()))
    process.start()
    return process


def wait_for(processes: Iterable[Process]) -> None:
    """Until they have all come to their ends."""
    waiting = list(processes)
    with _gone_at_last(waiting):
        while waiting:
            time.sleep(_TICK)
            waiting = [process for process in waiting if process.goes_on()]
