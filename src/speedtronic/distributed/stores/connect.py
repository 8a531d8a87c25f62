"""From a configuration to a store that can be relied on: opened, tried again where that helps, and proved."""

from __future__ import annotations

import threading
import time

from speedtronic.config import DistributedConfig
from speedtronic.distributed.stores.addresses import open_store
from speedtronic.distributed.stores.base import REQUEST_TIMEOUT, Buffer, Listing, Store
from speedtronic.distributed.stores.probe import prove_exclusive
from speedtronic.distributed.stores.retrying import RetryingStore


def connect(config: DistributedConfig, store: Store | None = None, *, stopping: threading.Event | None = None) -> Store:
    """The store of a configuration. Nothing is asked of it yet.

    Args:
        config: `repo_id` and `store_options` say which store, `retry_…` how often and how fast a request that failed is
            tried again.
        store: used in place of the configured one.
        stopping: ends the pauses between attempts, and the attempts.

    Raises:
        ConfigError, StoreRefusedError, MissingExtraError: there is no such store, or it cannot be opened here.
    """
    if store is None:
        assert config.repo_id is not None, "an enabled configuration has one"
        store = open_store(config.repo_id, **config.store_options)
    sleep = time.sleep if stopping is None else stopping.wait
    return ProvenStore(
        RetryingStore(
            store,
            initial=config.retry_initial,
            maximum=config.retry_max,
            attempts=config.retry_attempts,
            sleep=sleep,
            give_up=(lambda: False) if stopping is None else stopping.is_set,
        )
    )


class ProvenStore:
    """A store that proves, before the first thing that is asked of it, that what it creates it creates once."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._proof = threading.Lock()
        self._proven = False

    @property
    def url(self) -> str:
        return self._store.url

    def put_if_absent(self, name: str, data: Buffer, *, timeout: float = REQUEST_TIMEOUT) -> bool:
        return self._proved().put_if_absent(name, data, timeout=timeout)

    def get(
        self,
        name: str,
        *,
        limit: int,
        size: int | None = None,
        sha256: str | None = None,
        timeout: float = REQUEST_TIMEOUT,
    ) -> bytes | None:
        return self._proved().get(name, limit=limit, size=size, sha256=sha256, timeout=timeout)

    def list_after(self, prefix: str, marker: str = "", *, timeout: float = REQUEST_TIMEOUT) -> Listing:
        return self._proved().list_after(prefix, marker, timeout=timeout)

    def delete(self, name: str, *, timeout: float = REQUEST_TIMEOUT) -> None:
        self._proved().delete(name, timeout=timeout)

    def close(self) -> None:
        self._store.close()

    def _proved(self) -> Store:
        with self._proof:
            if not self._proven:
                prove_exclusive(self._store)
                self._proven = True
        return self._store
