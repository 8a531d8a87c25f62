"""What DumbDiLoCo asks of its store, of the master's memory, and of the training thread.

    python benchmarks/diloco.py [--only idle|nodes|stall] [--quick] [--folder PATH] [--json]

"idle" counts the requests of one look at a store in which nothing is new, and the bytes that come back, after so many
deltas of one node, each a version: by a node and by a master, in memory and in a folder. The first look of a new node
and of a new master stand beside them. "nodes" times a master's round of so many deltas in a folder, and takes the peak
of its memory in a process of its own, above what that process has before it holds a model, in copies of the model.
"stall" is how long the training thread stands still at a boundary, as a share of one copy of the weights; the two
alternate (A B A B …), and the figure is the median of the ratios.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from speedtronic import DistributedConfig
from speedtronic.distributed.codec import Fp32Codec
from speedtronic.distributed.coordinator import DumbDiLoCoCoordinator
from speedtronic.distributed.delta import DeltaHeader, pack_delta
from speedtronic.distributed.master import Master, MasterSettings
from speedtronic.distributed.node import Node
from speedtronic.distributed.outer import MasterOuterLoop, outer_optimizer
from speedtronic.distributed.protocol import list_all
from speedtronic.distributed.records import Position
from speedtronic.distributed.requests import Files, Procedure, perform
from speedtronic.distributed.schema import Schema, rebase_, snapshot
from speedtronic.distributed.stores.base import REQUEST_TIMEOUT, Buffer, Listing, Store
from speedtronic.distributed.stores.folder import FolderStore
from speedtronic.distributed.stores.memory import MemoryStore
from speedtronic.distributed.tensors import cpu_state_dict
from speedtronic.metrics import MetricLogger

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.support.counting_store import CountingStore  # noqa: E402 - found through the line above

Record = dict[str, Any]


# ---------------------------------------------------------------------- idle looks


class Traffic(CountingStore):
    """Counts the names of listings too, as bytes that come back."""

    def list_after(self, prefix: str, marker: str = "", *, timeout: float = REQUEST_TIMEOUT) -> Listing:
        listing = super().list_after(prefix, marker, timeout=timeout)
        self.bytes["list"] += sum(len(entry.name) for entry in listing.entries)
        return listing

    def of(self, procedure: Procedure[Any], files: Files | None = None) -> tuple[int, int]:
        """How many requests a procedure makes, and how many bytes it receives."""
        self.reset()
        perform(procedure, self, files)
        return self.requests.total(), self.bytes["get"] + self.bytes["list"]


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


class History:
    """A node and a master who have made so many versions together, in memory."""

    def __init__(self) -> None:
        self.store = MemoryStore()
        self.length = 0
        self._model = nn.Linear(4, 4)
        self._files = MemoryFiles()
        self.node, self.master = self.new_node("node"), self.new_master("first")
        perform(self.master.poll(), self.store)
        perform(self.node.begin(None), self.store, self._files)
        self._take_up()

    def grow(self, length: int) -> None:
        while self.length < length:
            self.length += 1
            with torch.no_grad():
                self._model.weight += 1e-3
            self.node.count(1, 0)
            self.node.stepped(self.length)
            assert self.node.start_boundary() == "queued"
            self.node.give_snapshot(snapshot(self._model, names=self.node.exchanged), 1.0)
            perform(self.node.spool(), self.store, self._files)
            perform(self.node.upload(), self.store, self._files)
            assert perform(self.master.poll(), self.store) == 1
            self._take_up()

    def _take_up(self) -> None:
        perform(self.node.poll(), self.store, self._files)
        install = self.node.installable()
        assert install is not None, "each round makes a version"
        rebase_(self._model, install.new_base, install.base, adopt=install.adopt)
        self.node.installed(install)

    def new_node(self, name: str) -> Node:
        return make_node(self._model, name)

    def new_master(self, nonce: str) -> Master:
        return make_master(self._model, nonce, expected_nodes=1)

    def looks(self, store: Store) -> Iterator[tuple[str, tuple[int, int]]]:
        """What each kind of look costs in a store that holds this history."""
        traffic = Traffic(store)
        yield "node", traffic.of(self.node.poll(), self._files)
        yield "master", traffic.of(self.master.poll())
        files = MemoryFiles()
        newcomer = self.new_node("newcomer")
        perform(newcomer.begin(None), traffic, files)
        yield "new node", traffic.of(newcomer.poll(), files)
        yield "new master", traffic.of(self.new_master("second").poll())


def make_node(model: nn.Module, name: str) -> Node:
    return Node(
        Schema.of(model),
        node=name,
        nonce="00000001",
        codec=Fp32Codec(),
        inner_steps=1,
        initial=snapshot(model),
        say=lambda event, payload: None,
        now=lambda: "",
    )


def make_master(model: nn.Module, nonce: str, *, expected_nodes: int) -> Master:
    numbers = iter(range(10**9))
    settings = MasterSettings(expected_nodes=expected_nodes, quorum=expected_nodes)
    return Master(
        Schema.of(model),
        snapshot(model),
        settings,
        new_outer=outer_optimizer(settings),
        nonce=lambda: f"{nonce}-{next(numbers)}",
        clock=time.monotonic,
        now=lambda: "",
        say=lambda event, payload: None,
    )


def idle(args: argparse.Namespace) -> Iterator[Record]:
    history = History()
    for length in args.history:
        history.grow(length)
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            stores: dict[str, Store] = {"memory": history.store, "folder": copied(history.store, Path(folder))}
            for kind, store in stores.items():
                for who, (requests, received) in history.looks(store):
                    yield {"store": kind, "who": who, "history": length, "requests": requests, "bytes": received}


def copied(store: Store, folder: Path) -> FolderStore:
    copy = FolderStore(folder, sync=lambda descriptor: None)
    for entry in perform(list_all(""), store):
        data = store.get(entry.name, limit=entry.size)
        assert data is not None
        copy.put_if_absent(entry.name, data)
    return copy


def idle_table(records: list[Record]) -> Iterator[str]:
    yield "one look at a store in which nothing is new: requests (bytes received)"
    lengths = list(dict.fromkeys(record["history"] for record in records))
    yield f"  {'after so many deltas':24}" + "".join(f"{length:>18}" for length in lengths)
    for who, store in dict.fromkeys((record["who"], record["store"]) for record in records):
        cells = [
            f"{record['requests']} ({record['bytes']})"
            for record in records
            if (record["who"], record["store"]) == (who, store)
        ]
        yield f"  {f'{who}, {store}':24}" + "".join(f"{cell:>18}" for cell in cells)


# ---------------------------------------------------------------------- a round of many nodes


def model_of(megabytes: int) -> nn.Module:
    """A model of so many parameters of 2^20 bytes."""
    return nn.ParameterDict({f"layer_{index:03}": torch.zeros(512, 512) for index in range(megabytes)})


def nodes(args: argparse.Namespace) -> Iterator[Record]:
    for count in args.nodes:
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            place = ["--folder", folder, "--nodes", str(count), "--megabytes", str(args.megabytes)]
            command = [sys.executable, __file__, "--only", "master", *place, "--rounds", str(args.rounds)]
            output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            yield {"nodes": count, "megabytes": args.megabytes, **json.loads(output)}


def master(args: argparse.Namespace) -> Record:
    """What `nodes` measures, in this process: seconds of each round, and the peak of memory in copies of the model."""
    count, rounds = args.nodes[0], args.rounds
    place = ["--folder", args.folder, "--nodes", str(count), "--megabytes", str(args.megabytes)]
    store = FolderStore(args.folder)
    History().grow(1)  # what the first round of a process brings into memory besides models is not counted
    before = resident_bytes("VmRSS")
    forget_peak()
    loop = make_master(model_of(args.megabytes), "only", expected_nodes=count)
    perform(loop.poll(), store)
    seconds = []
    for number in range(1, rounds + 1):
        subprocess.run([sys.executable, __file__, "--only", "deltas", *place, "--rounds", str(number)], check=True)
        started = time.perf_counter()
        entered = perform(loop.poll(), store)
        seconds.append(time.perf_counter() - started)
        assert entered == count, f"{entered} of {count} deltas entered"
    copies = (resident_bytes("VmHWM") - before) / (args.megabytes * 2**20)
    return {"seconds": seconds, "copies": copies}


def deltas(args: argparse.Namespace) -> None:
    """Put a delta of each node into the store, for the master's next round."""
    count, number = args.nodes[0], args.rounds
    model = model_of(args.megabytes)
    schema = Schema.of(model)
    tensors = snapshot(model)
    store = FolderStore(args.folder, sync=lambda descriptor: None)
    for index in range(count):
        header = DeltaHeader(
            node=f"node-{index:03}",
            session="only",
            seq=number,
            base_version=number - 1,
            steps=1,
            samples=1,
            tokens=1,
            seconds=1.0,
            position=Position(number, number, number),
            schema_id=schema.fingerprint,
            codec="fp32",
            time="",
        )
        store.put_if_absent(header.id.name, pack_delta(header, tensors, {}))


def resident_bytes(what: str) -> int:
    """Memory of this process, as Linux counts it: `VmRSS` now, or `VmHWM` at its peak."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{what}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"this system does not say {what}")


def forget_peak() -> None:
    with suppress(OSError):  # where it is not allowed the peak before counts too
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def nodes_table(records: list[Record]) -> Iterator[str]:
    yield f"a round of a model of {records[0]['megabytes']} MiB in a folder, median of {len(records[0]['seconds'])}"
    yield "     nodes   seconds   seconds a node   peak memory in model copies"
    for record in records:
        seconds = statistics.median(record["seconds"])
        yield f"  {record['nodes']:8}{seconds:10.3f}{seconds / record['nodes']:17.4f}{record['copies']:30.2f}"


# ---------------------------------------------------------------------- stall of the training thread


def stall(args: argparse.Namespace) -> Iterator[Record]:
    model = model_of(args.megabytes)
    config = DistributedConfig(enabled=True, role="worker", repo_id="memory://", inner_steps=1, poll_interval=3600.0)
    store = MemoryStore()
    loop = MasterOuterLoop(store, snapshot(model), schema=Schema.of(model), expected_nodes=1)
    loop.sync_once()
    warm = {name: torch.empty_like(value) for name, value in model.named_parameters()}
    seconds: dict[str, list[float]] = {"boundary": [], "copy": [], "copy into memory that is there": [], "install": []}
    with tempfile.TemporaryDirectory(dir=args.folder) as folder, MetricLogger(level="ERROR") as logger:
        coordinator = DumbDiLoCoCoordinator(config, model, store=store, state_dir=folder, logger=logger)
        coordinator.start()
        for step in range(1, args.boundaries + 2):
            coordinator.count(1, 0)
            seconds["boundary"].append(timed(partial(coordinator.after_optimizer_step, model, step)))
            wait_for_upload(coordinator)  # which would take time from what is measured next
            assert loop.sync_once() == 1, "each boundary sends a delta"
            assert coordinator.refresh()
            base = snapshot(model)
            seconds["install"].append(timed(partial(rebase_, model, dict(base), base, adopt=False)))
            seconds["copy"].append(timed(partial(cpu_state_dict, model)))
            seconds["copy into memory that is there"].append(timed(partial(snapshot, model, into=warm)))
        coordinator.stop()
    yield {"megabytes": args.megabytes, **{what: values[1:] for what, values in seconds.items()}}


def timed(work: Callable[[], object]) -> float:
    """Seconds until it returns; what it returned is let go of after that."""
    started = time.perf_counter()
    kept = work()
    seconds = time.perf_counter() - started
    del kept
    return seconds


def wait_for_upload(coordinator: DumbDiLoCoCoordinator) -> None:
    while (coordinator.state_dict() or {})["pending_upload"] is not None:
        time.sleep(0.005)


def stall_table(records: list[Record]) -> Iterator[str]:
    (record,) = records
    count = len(record["copy"])
    yield f"the training thread of a model of {record['megabytes']} MiB, {count} boundaries: ÷ one copy of it"
    for what in ("boundary", "copy into memory that is there", "install"):
        ratios = [own / copy for own, copy in zip(record[what], record["copy"], strict=True)]
        yield f"  {what:32}{statistics.median(ratios):8.3f}   ({min(ratios):.3f} … {max(ratios):.3f})"


# ---------------------------------------------------------------------- all


MEASURES = {"idle": (idle, idle_table), "nodes": (nodes, nodes_table), "stall": (stall, stall_table)}
QUICK = {"history": [3, 12], "nodes": [2], "megabytes": 4, "rounds": 1, "boundaries": 3}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", choices=[*MEASURES, "master", "deltas"], help="one of the tables, or a part of one")
    parser.add_argument("--history", type=int, nargs="+", default=[10, 200, 5000], help="deltas, for `idle`")
    parser.add_argument("--nodes", type=int, nargs="+", default=[2, 16, 64])
    parser.add_argument("--megabytes", type=int, default=48, help="size of the model, for `nodes` and `stall`")
    parser.add_argument("--rounds", type=int, default=3, help="for `nodes`")
    parser.add_argument("--boundaries", type=int, default=15, help="for `stall`")
    parser.add_argument("--folder", help="where to write; the folder for temporary files unless given")
    parser.add_argument("--quick", action="store_true", help="the smallest sizes, to see that it runs")
    parser.add_argument("--json", action="store_true", help="a line for a program each")
    args = parser.parse_args()
    if args.quick:
        parser.set_defaults(**QUICK)
        args = parser.parse_args()
    if args.only == "master":
        print(json.dumps(master(args)))
    elif args.only == "deltas":
        deltas(args)
    else:
        report(args)


def report(args: argparse.Namespace) -> None:
    for name, (measure, table) in MEASURES.items():
        if args.only not in {None, name}:
            continue
        records = list(measure(args))
        for record in records if args.json else ():
            print(json.dumps({"benchmark": "diloco", "measure": name, **record}))
        for line in () if args.json else table(records):
            print(line)


if __name__ == "__main__":
    main()
