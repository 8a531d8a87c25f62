"""Prints how much memory a master takes at most, in copies of a model of 32 MiB.

python -m tests.support.large DELTA STORE NODES
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from speedtronic.distributed.outer import MasterOuterLoop
from speedtronic.distributed.protocol import DELTAS, DeltaId, parse_delta_name
from speedtronic.distributed.schema import Schema, TensorSpec
from speedtronic.distributed.stores.base import Entry, Listing
from speedtronic.distributed.stores.folder import FolderStore
from speedtronic.distributed.stores.memory import MemoryStore
from tests.support.masters import INITIAL, SCHEMA, Heard, send

LARGE = Schema({f"layer{number:02d}": TensorSpec("trained", (2**18,), torch.float32) for number in range(32)})
LARGE_BYTES = 32 * 2**20
TEMPLATE_NODE = "node-00"


class ManyNodes(FolderStore):
    """A folder in which a file outside stands for the first delta of every node: only a name in its header differs."""

    def __init__(self, folder: Path, template: Path) -> None:
        super().__init__(folder)
        self.template = template
        self.nodes = 0

    def list_after(self, prefix: str, marker: str = "", **options: Any) -> Listing:
        if prefix != DELTAS:
            return super().list_after(prefix, marker, **options)
        size = self.template.stat().st_size
        return Listing(tuple(Entry(DeltaId(f"node-{n:02d}", "s", 1).name, size) for n in range(self.nodes)), False)

    def get(self, name: str, **options: Any) -> Any:
        delta = parse_delta_name(name)
        if delta is None:
            return super().get(name, **options)
        data = bytearray(self.template.stat().st_size)
        with open(self.template, "rb") as file:
            file.readinto(data)
        at = data.index(TEMPLATE_NODE.encode())
        data[at : at + len(TEMPLATE_NODE)] = delta.node.encode()
        return data


def memory(key: str) -> int:
    """Bytes of memory that this process holds now (`VmRSS`), or held at most (`VmHWM`)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:"))


def warm_up() -> None:
    """Let a small master run through all that the large one will, so that code is loaded."""
    store = MemoryStore()
    loop = MasterOuterLoop(store, INITIAL, schema=SCHEMA, expected_nodes=1, say=Heard())
    loop.sync_once()
    send(store, "a", 1, [1.0, 1.0, 1.0])
    assert loop.sync_once() == 1


def main(template: str, folder: str, nodes: str) -> None:
    store = ManyNodes(Path(folder), Path(template))
    warm_up()
    before = memory("VmRSS")
    state = {name: torch.zeros(spec.shape) for name, spec in LARGE.entries.items()}
    count = int(nodes)
    loop = MasterOuterLoop(store, state, schema=LARGE, expected_nodes=count, quorum=count, say=Heard())
    del state
    loop.sync_once()
    store.nodes = count
    assert loop.sync_once() == count
    print((memory("VmHWM") - before) / LARGE_BYTES)


if __name__ == "__main__":
    main(*sys.argv[1:])
