"""The nodes and the master of `together`, each in a process of its own.

    python -m tests.support.apart ROLE NODES ROUNDS URL OPTIONS OUT

ROLE is `master` or the number of a node, OPTIONS are JSON. At the end OUT holds the weights.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from speedtronic.distributed.outer import MasterOuterLoop
from speedtronic.distributed.requests import perform
from speedtronic.distributed.schema import Schema, snapshot
from speedtronic.distributed.stores import RetryingStore, Store, open_store
from speedtronic.distributed.tensors import save_safetensors
from tests.support.masters import Heard
from tests.support.together import INNER, Worker, adamw, network

_PAUSE = 0.05  # seconds between two looks


def run_apart(nodes: int, rounds: int, url: str, options: Mapping[str, Any], folder: Path) -> list[Path]:
    """Run a master and some nodes, and return the files with their weights; the master's is the first."""
    roles = ["master", *map(str, range(nodes))]
    files = [folder / f"{role}.safetensors" for role in roles]
    processes = [
        subprocess.Popen(
            [
                sys.executable,
                *("-m", "tests.support.apart"),
                *(role, str(nodes), str(rounds), url, json.dumps(dict(options)), str(file)),
            ],
            stderr=subprocess.PIPE,
            text=True,
        )
        for role, file in zip(roles, files, strict=True)
    ]
    try:
        for process in processes:
            _, said = process.communicate(timeout=200)
            assert process.returncode == 0, said
    finally:
        for process in processes:
            process.kill()
    return files


def _master(store: Store, nodes: int, rounds: int, file: Path) -> None:
    model = network()
    loop = MasterOuterLoop(
        store,
        snapshot(model),
        outer_lr=None,
        outer_momentum=None,
        schema=Schema.of(model),
        expected_nodes=nodes,
        quorum=nodes,
        say=Heard(),
    )
    loop.sync_once()
    while loop.outer_step < rounds:
        if not loop.sync_once():
            time.sleep(_PAUSE)
    save_safetensors(loop.snapshot(), file)


def _node(store: Store, number: int, rounds: int, file: Path) -> None:
    worker = Worker(store, number, adamw, INNER)

    def receive() -> None:
        while not perform(worker.node.poll(), store, worker.files):
            time.sleep(_PAUSE)
        worker.install()

    receive()
    for _ in range(rounds):
        worker.train_and_send()
        receive()
    save_safetensors(worker.model.state_dict(), file)


def main(role: str, nodes: str, rounds: str, url: str, options: str, file: str) -> None:
    store = RetryingStore(open_store(url, **json.loads(options)), initial=0.01, maximum=0.1, attempts=60)
    if role == "master":
        _master(store, int(nodes), int(rounds), Path(file))
    else:
        _node(store, int(role), int(rounds), Path(file))
    store.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
