"""From a configuration to a store that is tried again, and proved before it is used."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from speedtronic.config import DistributedConfig
from speedtronic.distributed.stores.connect import connect
from speedtronic.distributed.stores.memory import MemoryStore
from speedtronic.errors import StoreRefusedError, StoreUnavailableError
from tests.support.counting_store import CountingStore
from tests.support.failing import Failing

NEVER = 3600.0


def settings(**keys: Any) -> DistributedConfig:
    return DistributedConfig(**{"enabled": True, "repo_id": "memory://test", "retry_attempts": 2, **keys})


def test_the_configured_store_is_opened_and_nothing_made(tmp_path: Path) -> None:
    config = settings(repo_id=f"dir://{tmp_path}/store")
    assert str(tmp_path) in connect(config).url
    assert not (tmp_path / "store").exists()


def test_a_connected_store_is_proved_once_before_it_is_used() -> None:
    counting = CountingStore(MemoryStore())
    store = connect(settings(), counting)
    assert not counting.requests
    store.list_after("in/")
    proof = dict(counting.requests)
    assert proof["put"] == 2
    store.get("head/00000000.json", limit=10)
    store.put_if_absent("w/x", b"1")
    store.delete("w/x")
    assert {kind: counting.requests[kind] - proof.get(kind, 0) for kind in counting.requests} == {
        "put": 1,
        "get": 1,
        "list": 0,
        "delete": 1,
    }


def test_a_store_without_exclusive_creation_is_refused_by_its_name() -> None:
    class Overwriting(MemoryStore):
        def put_if_absent(self, name: str, data: Any, *, timeout: float = 1.0) -> bool:
            super().delete(name)
            return super().put_if_absent(name, data)

    with pytest.raises(StoreRefusedError, match="memory://careless.*created twice"):
        connect(settings(), Overwriting("careless")).list_after("in/")


def test_pauses_between_attempts_end_with_the_run() -> None:
    attempts, stopping = [], threading.Event()

    def down(kind: str, name: str) -> Exception | None:
        attempts.append(kind)
        stopping.set()
        return StoreUnavailableError("down")

    config = settings(retry_initial=NEVER, retry_max=NEVER, retry_attempts=9)
    store = connect(config, Failing(MemoryStore(), down), stopping=stopping)  # type: ignore[arg-type]
    with pytest.raises(StoreUnavailableError):
        store.list_after("in/")
    assert len(attempts) == 1


def test_a_request_that_fails_is_made_again_as_often_as_configured() -> None:
    attempts: list[str] = []

    def down(kind: str, name: str) -> Exception | None:
        attempts.append(kind)
        return StoreUnavailableError("down")

    config = settings(retry_initial=1e-6, retry_max=1e-6, retry_attempts=4)
    with pytest.raises(StoreUnavailableError):
        connect(config, Failing(MemoryStore(), down)).list_after("in/")
    assert len(attempts) == 4


def test_a_proof_that_could_not_be_given_is_tried_again() -> None:
    fails = True

    def down(kind: str, name: str) -> Exception | None:
        return StoreUnavailableError("down") if fails else None

    counting = CountingStore(MemoryStore())
    store = connect(settings(retry_attempts=1), Failing(counting, down))
    with pytest.raises(StoreUnavailableError):
        store.list_after("in/")
    fails = False
    store.list_after("in/")
    assert counting.requests["put"] == 2
