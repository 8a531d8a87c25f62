"""The store on S3, against two real servers: `make test-stores`."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator

import pytest

from speedtronic.distributed.stores import Store, open_store, s3
from speedtronic.errors import StoreRefusedError
from tests.distributed.stores import servers
from tests.distributed.stores.conformance import StoreConformance

pytestmark = pytest.mark.stores

SERVERS = {"moto": servers.moto, "seaweed": servers.seaweed}
BUCKET = "bucket"


@pytest.fixture(scope="module", params=SERVERS)
def endpoint(request: pytest.FixtureRequest) -> Iterator[str]:
    with SERVERS[request.param]() as address:
        servers.make_bucket(address, BUCKET)
        yield address


@pytest.fixture(scope="module")
def client(endpoint: str) -> Iterator[Store]:
    """One store for all tests of a server: making a client costs more than most of them."""
    store = open_store(f"s3://{BUCKET}", endpoint=endpoint, **servers.CREDENTIALS)
    yield store
    store.close()


@pytest.fixture
def store(client: s3.S3Store) -> Store:
    """A folder of the bucket that no other test has, through the one client."""
    part = copy.copy(client)
    folder = f"runs/{os.urandom(8).hex()}"
    part._root, part._keys = f"{BUCKET}/{folder}", f"{folder}/"
    return part


class TestS3Store(StoreConformance):
    def test_objects_outside_the_prefix_are_not_listed(self, store: Store, endpoint: str) -> None:
        one, other = (
            open_store(f"s3://{BUCKET}/same{end}/", endpoint=endpoint, **servers.CREDENTIALS) for end in ("", "-2")
        )
        other.put_if_absent("head/1", b"x")
        assert one.list_after("").entries == ()
        assert one.get("head/1", limit=1) is None
        assert one.put_if_absent("head/1", b"y")
        one.close()
        other.close()

    def test_a_multipart_object_is_created_only_once(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(s3, "_PART", 5 * 2**20)
        data = os.urandom(11 * 2**20)
        assert store.put_if_absent("w/1", data)
        assert not store.put_if_absent("w/1", bytes(11 * 2**20))
        assert store.get("w/1", limit=len(data), size=len(data)) == data

    def test_a_missing_bucket_is_refused_by_name(self, endpoint: str) -> None:
        missing = open_store("s3://no-such-bucket/run", endpoint=endpoint, **servers.CREDENTIALS)
        with pytest.raises(StoreRefusedError, match="there is no bucket no-such-bucket"):
            missing.list_after("")
        with pytest.raises(StoreRefusedError, match="there is no bucket no-such-bucket"):
            missing.get("head/1", limit=1)
        missing.close()

    def test_a_closed_store_connects_again(self, endpoint: str) -> None:
        again = open_store(f"s3://{BUCKET}/closed", endpoint=endpoint, **servers.CREDENTIALS)
        again.close()
        assert again.list_after("none").entries == ()
        again.close()
        again.close()
        assert again.list_after("none").entries == ()
        again.close()
