"""What DumbDiLoCo asks of its store, of the master's memory, and of the training thread.

    python benchmarks/diloco.py [--only idle|scale|nodes|memory|stall] [--quick] [--folder PATH] [--json]

"idle" counts the requests of one look at a store in which nothing is new, and the bytes that come back, after so many
deltas of one node, each a version: by a node and by a master, in memory and in a folder. The first look of a new node
and of a new master stand beside them. "scale" lets so many nodes make so many versions in virtual time, without
training: a fifth of them sends a delta for each version, and each restarts after five. It shows how large manifests
become, and what a look and a new version cost. "nodes" times a master's round of so many deltas in a folder, and takes
the peak of its memory in a process of its own, above what that process has before it holds a model, in copies of the
model. "memory" is the peak of a node whose master is gone, likewise in a process of its own: at boundaries, then with a
checkpoint whose tensors are copied in memory after each (the node's part of it), and at the last boundary of a run.
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
from speedtronic.checkpoint.staging import StagingBuffer
from speedtronic.checkpoint.tree import encode
from speedtronic.distributed.codec import Codec, Fp32Codec, make_codec
from speedtronic.distributed.coordinator import DumbDiLoCoCoordinator
from speedtronic.distributed.delta import DeltaHeader, Predecessor, pack_delta
from speedtronic.distributed.master import Master, MasterSettings
from speedtronic.distributed.node import Node
from speedtronic.distributed.node_files import NodeFiles
from speedtronic.distributed.outer import MasterOuterLoop, outer_optimizer
from speedtronic.distributed.protocol import find_head, list_all
from speedtronic.distributed.records import Position, session_name
from speedtronic.distributed.requests import Files, Procedure, perform
from speedtronic.distributed.schema import Schema, Tensors, rebase_, snapshot
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


def make_node(model: nn.Module, name: str, codec: Codec | None = None) -> Node:
    return Node(
        Schema.of(model),
        node=name,
        nonce="00000001",
        codec=codec or Fp32Codec(),
        inner_steps=1,
        initial=snapshot(model),
        say=lambda event, payload: None,
        now=lambda: "",
    )


def make_master(model: nn.Module, nonce: str, *, expected_nodes: int, quorum: int | None = None) -> Master:
    numbers = iter(range(10**9))
    settings = MasterSettings(expected_nodes=expected_nodes, quorum=quorum or expected_nodes)
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


# ---------------------------------------------------------------------- many nodes, many rounds

RESTART_EVERY = 5  # deltas
RECENT = 100  # versions, over which figures are taken


class Sender:
    """A node that sends zeros."""

    def __init__(self, index: int, schema: Schema, tensors: Tensors) -> None:
        self.name, self._index = f"node-{index:04}", index
        self._schema, self._tensors = schema, tensors
        self._number, self._seq = 1, 0
        self._before: Predecessor | None = None

    def send(self, store: Store, version: int) -> None:
        session = session_name(self._number, f"{self._index:08x}")
        if self._seq == RESTART_EVERY:
            self._before = Predecessor(session=session, last=self._seq)
            self._number, self._seq = self._number + 1, 0
            session = session_name(self._number, f"{self._index:08x}")
        self._seq += 1
        steps = 500 * (version + 1)
        header = DeltaHeader(
            node=self.name,
            session=session,
            seq=self._seq,
            base_version=version,
            steps=500,
            samples=8000,
            tokens=500 * 16 * 2048,
            seconds=600.0 + self._index / 7,
            position=Position(steps, steps * 16, steps * 16 * 2048),
            schema_id=self._schema.fingerprint,
            codec="fp32",
            time="",
            predecessor=self._before,
        )
        store.put_if_absent(header.id.name, pack_delta(header, self._tensors, {}))


def scale(args: argparse.Namespace) -> Iterator[Record]:
    for size in args.scale:
        nodes, versions = map(int, size.split("x"))
        yield {"nodes": nodes, "versions": versions, **at_scale(nodes, versions, args.versions_a_round)}


def at_scale(nodes: int, versions: int, versions_a_round: int) -> Record:
    """The sizes of the last manifests, in bytes, and what reading them costs."""
    store, model = MemoryStore(), nn.Linear(2, 2)
    traffic = Traffic(store)
    quorum = nodes // versions_a_round
    master = make_master(model, "only", expected_nodes=nodes, quorum=quorum)
    perform(master.poll(), store)
    schema, tensors = Schema.of(model), {name: torch.zeros_like(value) for name, value in snapshot(model).items()}
    senders = [Sender(index, schema, tensors) for index in range(nodes)]
    known = master.head
    manifests, followed, asked, seconds = [], [], [], []
    for version in range(versions):
        for sender in senders[version % versions_a_round :: versions_a_round]:
            sender.send(store, version)
        started = time.perf_counter()
        assert perform(master.poll(), store) == quorum
        seconds.append(time.perf_counter() - started)
        assert master.head is not None
        manifests.append(len(master.head.to_bytes()))
        # A follower, who knows the version before: the weights are not counted, which are the same at any scale.
        requests, received = traffic.of(find_head(known, beside=False))
        followed.append(received)
        asked.append(requests)
        known = master.head
    idle_master, _ = traffic.of(master.poll())
    idle_follower, _ = traffic.of(find_head(known, beside=False))
    new, _ = traffic.of(find_head(None))
    return {
        "manifest": manifests[-1],
        "largest": max(manifests),
        "followed": statistics.median(followed[-RECENT:]),
        "requests": statistics.median(asked[-RECENT:]),
        "idle_master": idle_master,
        "idle_follower": idle_follower,
        "first_look": new,
        "objects": len(perform(list_all(""), store)),
        "seconds": statistics.median(seconds[-RECENT:]),
    }


def scale_table(records: list[Record]) -> Iterator[str]:
    yield f"nodes that restart after {RESTART_EVERY} deltas; bytes without the weights"
    yield "     nodes  versions  manifest   largest  requests (bytes) of a new version  idle: master, node  first look"
    for record in records:
        version = f"{record['requests']:g} ({record['followed']:g})"
        looks = f"{record['idle_master']}, {record['idle_follower']}"
        yield (
            f"  {record['nodes']:8}{record['versions']:10}{record['manifest']:10}{record['largest']:10}"
            f"{version:>35}{looks:>20}{record['first_look']:12}"
        )


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


# ---------------------------------------------------------------------- a node without its master


def memory(args: argparse.Namespace) -> Iterator[Record]:
    for codec in ("fp32", "bf16"):
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            place = ["--folder", folder, "--codec", codec, "--megabytes", str(args.megabytes)]
            command = [sys.executable, __file__, "--only", "lone-node", *place, "--boundaries", str(args.boundaries)]
            output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            yield {"codec": codec, "megabytes": args.megabytes, **json.loads(output)}


def lone_node(args: argparse.Namespace) -> Record:
    """What `memory` measures, in this process: peaks in copies of the model, above the model itself."""
    store = FolderStore(Path(args.folder) / "store", sync=lambda descriptor: None)
    files = NodeFiles(Path(args.folder) / "node")
    History().grow(1)  # what the first round of a process brings into memory besides models is not counted
    model = model_of(args.megabytes)
    perform(make_master(model, "only", expected_nodes=1).poll(), store)
    before = resident_bytes("VmRSS")
    node = make_node(model, "node", make_codec(args.codec))
    perform(node.begin(None), store, files)
    perform(node.poll(), store, files)
    install = node.installable()
    assert install is not None
    rebase_(model, install.new_base, install.base, adopt=install.adopt)
    node.installed(install)
    del install

    step = 0

    def peak(boundaries: int, *, last: bool = False, saves: bool = False) -> float:
        """Copies at the peak of so many boundaries, of which the first ones are taken and all others skipped."""
        nonlocal step
        forget_peak()
        for _ in range(boundaries):
            step += 1
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter += 1e-3
            node.count(1, 0)
            node.stepped(step)
            if node.start_boundary(last=last) == "queued":
                node.give_snapshot(snapshot(model, node.spare(), names=node.exchanged), 1.0)
                perform(node.spool(), store, files)
                perform(node.upload(), store, files)
            if saves:
                staged = StagingBuffer()
                staged.fill(encode(node.state_dict()).tensors, {})
                del staged
        return (resident_bytes("VmHWM") - before) / (args.megabytes * 2**20)

    return {"boundary": peak(args.boundaries), "checkpoint": peak(2, saves=True), "last": peak(1, last=True)}


def memory_table(records: list[Record]) -> Iterator[str]:
    yield f"a node without its master, model of {records[0]['megabytes']} MiB: peak in model copies, above the model"
    yield "  codec   boundaries   with a checkpoint   last boundary"
    for record in records:
        peaks = f"{record['boundary']:13.2f}{record['checkpoint']:20.2f}{record['last']:16.2f}"
        yield f"  {record['codec']:5}{peaks}"


# ---------------------------------------------------------------------- stall of the training thread


def stall(args: argparse.Namespace) -> Iterator[Record]:
    model = model_of(args.megabytes)
    config = DistributedConfig(enabled=True, role="worker", repo_id="memory://", inner_steps=1, poll_interval=3600.0)
    store = MemoryStore()
    loop = MasterOuterLoop(
        store, snapshot(model), schema=Schema.of(model), expected_nodes=1, say=lambda event, payload: None
    )
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


MEASURES = {
    "idle": (idle, idle_table),
    "scale": (scale, scale_table),
    "nodes": (nodes, nodes_table),
    "memory": (memory, memory_table),
    "stall": (stall, stall_table),
}
QUICK = {"history": [3, 12], "scale": ["5x60"], "nodes": [2], "megabytes": 4, "rounds": 1, "boundaries": 3}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--only", choices=[*MEASURES, "master", "deltas", "lone-node"], help="one of the tables, or a part of one"
    )
    parser.add_argument("--history", type=int, nargs="+", default=[10, 200, 5000], help="deltas, for `idle`")
    parser.add_argument("--versions-a-round", type=int, default=5, help="at scale (default 5; 1: of all nodes)")
    parser.add_argument("--scale", nargs="+", default=["20x100"], metavar="NODESxVERSIONS")
    parser.add_argument("--nodes", type=int, nargs="+", default=[2, 16, 64])
    parser.add_argument("--megabytes", type=int, default=48, help="size of the model, for `nodes` and later")
    parser.add_argument("--codec", default="fp32", help="for `lone-node`")
    parser.add_argument("--rounds", type=int, default=3, help="for `nodes`")
    parser.add_argument("--boundaries", type=int, default=15, help="for `memory` and `stall`")
    parser.add_argument("--folder", help="where to write; the folder for temporary files unless given")
    parser.add_argument("--quick", action="store_true", help="the smallest sizes, to see that it runs")
    parser.add_argument("--json", action="store_true", help="a line for a program each")
    args = parser.parse_args()
    if args.quick:
        parser.set_defaults(**QUICK)
        args = parser.parse_args()
    if args.only == "master":
        print(json.dumps(master(args)))
    elif args.only == "lone-node":
        print(json.dumps(lone_node(args)))
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
