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
from tests.support.together import together

pytestmark = pytest.mark.stores


@pytest.fixture(scope="module", params=ON_SERVERS)
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    with PLACES[request.param]() as place:
        yield place


def shown(asked: Asked) -> str:
    """A request without what differs from run to run and from service to service."""
    parts = urlsplit(asked.target)
    path = re.sub("[0-9a-f]{64}", "SHA256", unquote(parts.path))
    path = re.sub("[0-9a-f]{40}", "COMMIT", path)
    path = re.sub("[0-9a-f]{32}", "NONCE", path)
    path = path.removeprefix("/api/models").removeprefix("/namespace/model").removeprefix("/resolve/main")
    query = {name: value.rpartition("run/")[2] for name, value in parse_qsl(parts.query)}
    listed = f"?prefix={query['prefix']}" if "prefix" in query else ""
    return f"{asked.method} {path.partition('/run/')[2] or ('' if listed else path)}{listed}".rstrip()


DELTA = "in/n0/00000001-00000001/00000002.safetensors"
SEND = [f"PUT {DELTA}", "GET store.json"]
BESIDE = "GET ?prefix=head/0000000{}."  # of obstore, which takes folders alone: the whole folder, from that name on
ROUND = [
    "GET head/00000002.json",  # is there a newer version?
    "GET ?prefix=in/",
    f"GET {DELTA}",
    "PUT w/00000002-NONCE.safetensors",
    "GET store.json",
    "PUT opt/00000002-NONCE.safetensors",
    "GET store.json",
    "GET head/00000001.json",  # the version before still stands
    "GET head/00000002.json",
    BESIDE.format(2),
    "PUT head/00000002.json",
    "GET head/00000001.json",
    "GET head/00000002.json",  # whose is it?
    f"DELETE {DELTA}",
    "GET ?prefix=w/",
    "GET ?prefix=opt/",
]
TAKE = [
    "GET head/00000002.json",
    "GET head/00000003.json",
    BESIDE.format(3),
    "GET store.json",
    "GET w/00000002-NONCE.safetensors",
]
NOTHING_NEW = ["GET head/00000003.json"]
NOTHING_TO_DO = ["GET head/00000003.json", "GET ?prefix=in/"]


def as_obstore_asks(requests: list[str]) -> list[str]:
    return [re.sub(r"prefix=head/.*", "prefix=head/", request) for request in requests]


def as_azure_is_asked(requests: list[str]) -> list[str]:
    """A deletion is a batch of one."""
    return [re.sub("^DELETE .*", "POST /devstoreaccount1/bucket", request) for request in as_obstore_asks(requests)]


# A large file goes ahead of the commit that names it.
UPLOAD = ["POST /preupload/main", "POST .git/info/lfs/objects/batch", "PUT /lfs/SHA256", "POST /lfs/SHA256"]


def as_the_hub_is_asked(requests: list[str]) -> list[str]:
    """The requests to a repository: a creation is a commit, and what is deleted waits for one."""
    asked: list[str] = []
    for request in requests:
        method, _, name = request.partition(" ")
        if name.startswith("?prefix="):
            asked.append(f"GET {name.removeprefix('?prefix=').partition('/')[0]}")
        elif name.startswith(("w/", "opt/")) and method == "PUT":
            asked += UPLOAD
        elif method == "PUT":
            # What the delta before left is deleted with the next commit, if it is there.
            asked += [f"HEAD {name}", *(["POST /paths-info/COMMIT"] if name == DELTA else [])]
            asked += [*(UPLOAD if name == DELTA else UPLOAD[:1]), "POST /commit/main"]
        elif method == "GET":
            asked += [request, *(["GET /lfs/SHA256"] if name.endswith(".safetensors") else [])]
    return asked


def test_a_round_asks_for_exactly_this(place: Place) -> None:
    expected = {
        "hf://namespace/model": as_the_hub_is_asked,
        "az://bucket": as_azure_is_asked,
        "gs://bucket": as_obstore_asks,
    }
    of_client = expected.get(place.url, list)
    proxy = FaultyProxy(place.address)
    with place.through(proxy) as behind:
        store = behind.open("run")
        _, (worker,), loop = together(1, 1, store=store)

        def asked() -> list[str]:
            requests = [shown(request) for request in proxy.asked]
            proxy.asked.clear()
            return requests

        asked()
        worker.train_and_send()
        assert asked() == of_client(SEND)
        assert loop.sync_once() == 1
        assert asked() == of_client(ROUND)
        worker.receive()
        assert asked() == of_client(TAKE)
        assert not perform(worker.node.poll(), store)
        assert asked() == of_client(NOTHING_NEW)
        assert loop.sync_once() == 0
        assert asked() == of_client(NOTHING_TO_DO)
        store.close()
