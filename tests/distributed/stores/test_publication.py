"""While one process publishes, those that read see whole pairs of manifest and weights, or none."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from speedtronic.distributed.stores import FolderStore, MemoryStore, Store

READS = 10_000
READERS = 4
READS_OF_A_VERSION = 100
KEPT = 3


def name_of_head(version: int) -> str:
    return f"head/{version:08d}.json"


def publish(store: Store, version: int) -> None:
    weights = hashlib.sha256(b"%d" % version).digest() * (64 + version % 7)
    name = f"w/{version:08d}-x.safetensors"
    store.put_if_absent(name, weights)
    manifest = {"weights": name, "size": len(weights), "sha256": hashlib.sha256(weights).hexdigest()}
    store.put_if_absent(name_of_head(version), json.dumps(manifest).encode())
    if version >= KEPT:
        store.delete(f"w/{version - KEPT:08d}-x.safetensors")


class Reader:
    """Follows the head, and reads the weights that it names, as long as it may."""

    def __init__(self, store: Store, may_read: Callable[[], bool]) -> None:
        self.store = store
        self.may_read = may_read
        self.head = -1
        self.reads = self.pairs = 0
        self.torn: list[str] = []

    def run(self) -> None:
        while self.reads < READS // READERS:
            if self.may_read():
                self.look()
            else:
                time.sleep(0.0005)

    def look(self) -> None:
        while self.read(name_of_head(self.head + 1)) is not None:
            self.head += 1
        data = self.read(name_of_head(max(self.head, 0)))
        if data is None:
            return
        try:
            manifest = json.loads(data)
        except ValueError:
            self.torn.append(f"manifest {self.head}")
            return
        weights = self.read(manifest["weights"])
        if weights is None:
            return  # pruned meanwhile: a newer head is there
        self.pairs += 1
        if (len(weights), hashlib.sha256(weights).hexdigest()) != (manifest["size"], manifest["sha256"]):
            self.torn.append(f"weights {self.head}")

    def read(self, name: str) -> bytes | None:
        self.reads += 1
        return self.store.get(name, limit=1 << 20)


@pytest.mark.parametrize("kind", ["memory", pytest.param("folder", marks=pytest.mark.slow)])
def test_of_ten_thousand_reads_during_publication_none_sees_a_torn_pair(kind: str, tmp_path: Path) -> None:
    shared = MemoryStore()
    stores: list[Store] = [shared if kind == "memory" else FolderStore(tmp_path) for _ in range(READERS + 1)]
    readers: list[Reader] = []

    def reads() -> int:
        return sum(reader.reads for reader in readers)

    published = 0
    readers += [Reader(store, lambda: reads() < published * READS_OF_A_VERSION) for store in stores[1:]]
    threads = [threading.Thread(target=reader.run, daemon=True) for reader in readers]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        publish(stores[0], published)
        published += 1
        # The next is published while the last reads of this one are made.
        while reads() < (published - 0.5) * READS_OF_A_VERSION and any(thread.is_alive() for thread in threads):
            time.sleep(0.0005)
    for thread in threads:
        thread.join()
    assert [torn for reader in readers for torn in reader.torn] == []
    assert reads() >= READS
    assert sum(reader.pairs for reader in readers) > READS // 20, "most looks find a pair"
