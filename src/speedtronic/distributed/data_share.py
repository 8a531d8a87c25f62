"""Which part of the data a node reads, so that nodes which share the data do not train on the same of it."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from speedtronic.config import DistributedConfig
from speedtronic.data.loading.sampler import derive_seed
from speedtronic.distributed.identity import NodeLock, node_folder, resolve_node_id
from speedtronic.distributed.node_files import NodeFiles
from speedtronic.distributed.protocol import claim_place
from speedtronic.distributed.requests import Procedure, perform, read_file, write_file
from speedtronic.distributed.stores.base import Store

_PLACE_FILE = "place"


class DataShare(NamedTuple):
    """What a node reads of the data.

    Attributes:
        node: its name.
        place: which part of the data is its own, from 0; None where the data is not divided.
        parts: into how many parts the data is divided. There may be more nodes than parts: then two read one.
        order_seed: of the node's order of the data; None where it is that of all.
    """

    node: str
    place: int | None
    parts: int
    order_seed: int | None

    @property
    def part(self) -> int:
        return (self.place or 0) % self.parts


def share_of_data(config: DistributedConfig, store: Store, seed: int) -> DataShare:
    """Find out which part of the data this node reads.

    With `expected_nodes` each node takes a place in the store, once and for all, and reads the part of that number.
    Otherwise nobody knows how many nodes there will be, and each reads all of the data in an order of its own.

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
        return DataShare(node, None, 1, derive_seed(seed, node))
    folder = node_folder(state_dir, store.url, node)
    with NodeLock(folder):
        place = perform(_remembered_place(node), store, NodeFiles(folder))
    return DataShare(node, place, config.expected_nodes, None)


def _remembered_place(node: str) -> Procedure[int]:
    remembered = yield from read_file(_PLACE_FILE)
    if remembered is not None and remembered.isdigit():
        return int(remembered)
    place = yield from claim_place(node)
    # What is not remembered is asked for again: the store gives the same answer.
    with suppress(OSError):
        yield from write_file(_PLACE_FILE, str(place).encode("ascii"))
    return place
