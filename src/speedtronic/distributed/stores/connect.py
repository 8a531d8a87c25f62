"""From a configuration to a store that can be relied on: opened, with retries, and checked before its first use."""

from __future__ import annotations

import threading
import time

from speedtronic.config import DistributedConfig
from speedtronic.distributed.stores.addresses import open_store
from speedtronic.distributed.stores.base import Store
from speedtronic.distributed.stores.retrying import RetryingStore


def connect(config: DistributedConfig, store: Store | None = None, *, stopping: threading.Event | None = None) -> Store:
    """The store of a configuration. Nothing is asked of it yet.

    Args:
        config: `repo_id` and `store_options` say which store, `retry_…` how often and how fast a failed request is
            tried again.
        store: used instead of the configured one.
        stopping: ends the pauses between attempts, and the attempts.

    Raises:
        ConfigError, StoreRefusedError, MissingExtraError: there is no such store, or it cannot be opened here.
    """
    if store is None:
        assert config.repo_id is not None, "an enabled configuration has one"
        store = open_store(config.repo_id, **config.store_options)
    return RetryingStore(
        store,
        initial=config.retry_initial,
        maximum=config.retry_max,
        attempts=config.retry_attempts,
        sleep=time.sleep if stopping is None else stopping.wait,
        give_up=(lambda: False) if stopping is None else stopping.is_set,
        prove=True,
    )
