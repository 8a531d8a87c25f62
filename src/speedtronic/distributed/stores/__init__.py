"""The stores through which nodes exchange objects: one narrow protocol, and one file for each kind of store."""

from __future__ import annotations

from speedtronic.distributed.stores.base import Entry, Listing, Store
from speedtronic.distributed.stores.folder import FolderStore
from speedtronic.distributed.stores.memory import MemoryStore
from speedtronic.distributed.stores.open import open_store
from speedtronic.distributed.stores.probe import prove_exclusive
from speedtronic.distributed.stores.retrying import RetryingStore

__all__ = [
    "Entry",
    "FolderStore",
    "Listing",
    "MemoryStore",
    "RetryingStore",
    "Store",
    "open_store",
    "prove_exclusive",
]
