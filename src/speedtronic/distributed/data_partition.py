"""Which part of the data a node reads, so that nodes with the same data do not train on the same part of it."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict, ValidationError

from speedtronic.config import DistributedConfig
from speedtronic.data.loading.sampler import derive_seed
from speedtronic.distributed.identity import NodeLock, node_folder, resolve_node_id
from speedtronic.distributed.ledger import LEDGER, Ledger
from speedtronic.distributed.node_files import NodeFiles
from speedtronic.distributed.protocol import PLACES, check_identity
from speedtronic.distributed.requests import Get, Procedure, Put, ReadFile, WriteFile, perform
from speedtronic.distributed.stores.base import Store
from speedtronic.errors import StoreContentError

_PLACE_FILE = "place"
_PLACE_LIMIT = 4096  # bytes
_MOST_PLACES = 10_000


class DataPartition(NamedTuple):
    """What a node reads of the data.

    Attributes:
        node: its name.
        place: which part of the data is its own, from 0; None where the data is not divided.
        parts: into how many parts the data is divided. There may be more nodes than parts: then two read one.
        order_seed: of the node's order of the data; None where all nodes have one order.
    """

    node: str
    place: int | None
    parts: int
    order_seed: int | None

    @property
    def part(self) -> int:
        return (self.place or 0) % self.parts


def data_partition_of(config: DistributedConfig, store: Store, seed: int) -> DataPartition:
    """Find out which part of the data this node reads.

    With `expected_nodes` each node takes a place in the store, once and for all, and reads the part of that number.
    Otherwise nobody knows how many nodes there will be, and each reads all of the data in its own order.

    Args:
        config: the node.
        store: asked only by a node that does not know its place yet.
        seed: of the data.

    Raises:
        StoreError: the store had to be asked and did not answer.
        RunFolderError: the node's folder in `state_dir` cannot be used; RunLockedError: another node uses it.
    """
    state_dir = Path(config.state_dir)
    node = resolve_node_id(config.node_id, state_dir)
    if config.expected_nodes is None:
        return DataPartition(node, None, 1, derive_seed(seed, node))
    folder = node_folder(state_dir, store.url, node)
    with NodeLock(folder):
        place = perform(_remembered_place(node), store, NodeFiles(folder))
    return DataPartition(node, place, config.expected_nodes, None)


def _remembered_place(node: str) -> Procedure[int]:
    remembered = yield from ReadFile(_PLACE_FILE)
    if remembered is not None and remembered.isdigit():
        return int(remembered)
    data = yield from ReadFile(LEDGER)
    ledger = None if data is None else Ledger.from_bytes(data)
    if ledger is not None:  # nothing is made in an empty folder where a mount is away
        yield from check_identity(ledger.store, or_another=True)
    place = yield from claim_place(node)
    # If the disk does not take it, the node asks again next time and gets the same answer.
    with suppress(OSError):
        yield from WriteFile(_PLACE_FILE, str(place).encode("ascii"))
    return place


class _Claim(BaseModel):
    """The object that says which node holds a place."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)

    node: str


def claim_place(node: str) -> Procedure[int]:
    """The first place that this node holds already or that nobody holds, from 0.

    A place is never given up: a node that comes back finds its own.
    """
    for index in range(_MOST_PLACES):
        name = f"{PLACES}{index:04d}.json"
        holder = yield from _holder(name)
        if holder is None:
            yield from Put(name, _Claim(node=node).model_dump_json().encode())
            # Read it back: another node may have been first, or the answer may have been lost.
            holder = yield from _holder(name)
        if holder == node:
            return index
    raise StoreContentError(f"all {_MOST_PLACES} places for nodes are taken; use a new distributed.repo_id")


def _holder(name: str) -> Procedure[str | None]:
    """The node that holds a place; an empty name if the claim cannot be read."""
    data = yield from Get(name, limit=_PLACE_LIMIT)
    if data is None:
        return None
    try:
        return _Claim.model_validate_json(data).node
    except ValidationError:
        return ""
