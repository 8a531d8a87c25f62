"""Many nodes on one Git repository of the Hub, over hours of virtual time."""

from __future__ import annotations

import pytest

from speedtronic.distributed.outer import MasterOuterLoop
from speedtronic.distributed.schema import Schema, snapshot
from speedtronic.distributed.stores import RetryingStore
from speedtronic.distributed.stores.hub import BUDGET, HubStore
from tests.distributed.stores.servers import on_hub_repository
from tests.support.hub_server import Hub
from tests.support.masters import Heard
from tests.support.together import Worker, adamw, network

WORKERS, ROUNDS, KEPT = 8, 500, 3
SECONDS = 60.0  # of a round, if nothing waits: five times as many commits as are allowed


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.mark.stores
@pytest.mark.timeout(1800)
def test_500_rounds_of_8_workers_stay_under_100_commits_an_hour(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, hub, made = Clock(), Hub(), []

    class Timed(HubStore):
        def _commit(self, name: str, added: object) -> bool:
            created = super()._commit(name, added)
            if created:
                made.append(clock.now)
            return created

    def store() -> RetryingStore:
        inner = Timed("namespace/model", budget=BUDGET // (WORKERS + 1), clock=clock, sleep=clock.sleep)
        return RetryingStore(inner, attempts=10**6, maximum=600.0, sleep=clock.sleep, clock=clock)

    with on_hub_repository(hub):
        model = network()
        settings = {"outer_lr": None, "outer_momentum": None, "expected_nodes": WORKERS, "quorum": WORKERS}
        loop = MasterOuterLoop(
            store(), snapshot(model), schema=Schema.of(model), say=Heard(), keep_versions=KEPT, **settings
        )
        loop.sync_once()
        workers = [Worker(store(), number, adamw, 1) for number in range(WORKERS)]
        for worker in workers:
            worker.receive()
        for _ in range(ROUNDS):
            clock.now += SECONDS
            for worker in workers:
                worker.train_and_send()
            assert loop.sync_once() == WORKERS
            for worker in workers:
                worker.receive()

    assert len(made) == len(hub.repositories["namespace/model"].commits) > ROUNDS * (WORKERS + 1)
    made.sort()
    in_an_hour = [len([one for one in made if begin <= one < begin + 3600]) for begin in made[:: len(made) // 200]]
    assert max(in_an_hour) <= BUDGET
    files = hub.repositories["namespace/model"].files
    assert len([name for name in files if not name.startswith("head/")]) <= 2 * (KEPT + 1) + WORKERS + 2
    assert len(hub.repositories["namespace/model"].states) < 60 * (WORKERS + 1), "the history is squashed"
