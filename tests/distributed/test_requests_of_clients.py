"""What the clients of the stores send over the wire for what the protocol asks, request by request.

A client that begins to ask for more, or otherwise, after an update shows here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from urllib.parse import parse_qsl, unquote, urlsplit

import pytest

from speedtronic.distributed.requests import perform
from tests.distributed.stores.servers import ON_SERVERS, PLACES, Place
from tests.support.faulty_proxy import Asked, FaultyProxy
from tests.support.together import Worker, together

pytestmark = pytest.mark.stores


@pytest.fixture(scope="module", params=ON_SERVERS)
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    with PLACES[request.param]() as place:
        yield place


def shown(asked: Asked) -> str:
    """A request without what differs from run to run and from service to service."""
    parts = urlsplit(asked.target)
    path = re.sub("[0-9a-f]{32}", "NONCE", unquote(parts.path)).partition("/run/")[2]
    query = {name: value.rpartition("run/")[2] for name, value in parse_qsl(parts.query)}
    listed = f"?prefix={query['prefix']}" if "prefix" in query else ""
    return f"{asked.method} {path}{listed}".rstrip()


SEND = ["PUT in/n0/00000001-00000001/00000002.safetensors", "GET store.json"]
ROUND = [
    "GET head/00000002.json",  # is there a newer version?
    "GET ?prefix=in/",
    "GET in/n0/00000001-00000001/00000002.safetensors",
    "PUT w/00000002-NONCE.safetensors",
    "GET store.json",
    "PUT opt/00000002-NONCE.safetensors",
    "GET store.json",
    "GET head/00000001.json",  # the version before still stands
    "GET head/00000002.json",
    "GET ?prefix=head/00000002.",
    "PUT head/00000002.json",
    "GET head/00000001.json",
    "GET head/00000002.json",  # whose is it?
    "DELETE in/n0/00000001-00000001/00000002.safetensors",
    "GET ?prefix=w/",
    "GET ?prefix=opt/",
]
TAKE = [
    "GET head/00000002.json",
    "GET head/00000003.json",
    "GET ?prefix=head/00000003.",
    "GET store.json",
    "GET w/00000002-NONCE.safetensors",
]


def test_a_round_asks_for_exactly_this(place: Place) -> None:
    proxy = FaultyProxy(place.address)
    with place.through(proxy) as behind:
        store = behind.open("run")
        _, (worker,), loop = together(1, 1, store=store)
        assert isinstance(worker, Worker)

        def asked() -> list[str]:
            requests = [shown(request) for request in proxy.asked]
            proxy.asked.clear()
            return requests

        asked()
        worker.train_and_send()
        assert asked() == SEND
        assert loop.sync_once() == 1
        assert asked() == ROUND
        worker.receive()
        assert asked() == TAKE
        assert not perform(worker.node.poll(), store)
        assert asked() == ["GET head/00000003.json"]
        assert loop.sync_once() == 0
        assert asked() == ["GET head/00000003.json", "GET ?prefix=in/"]
        store.close()
