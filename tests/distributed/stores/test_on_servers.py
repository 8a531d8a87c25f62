"""Every store of a service through its real client, against a server of that service: `make test-stores`."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator

import pytest

from speedtronic.distributed.stores import Store
from speedtronic.distributed.stores.hub import HubStore
from speedtronic.distributed.stores.object import ObjectStore
from speedtronic.distributed.stores.s3 import S3Store
from speedtronic.errors import StoreRefusedError
from tests.distributed.stores.conformance import StoreConformance
from tests.distributed.stores.servers import ON_SERVERS, PLACES, Place


@pytest.fixture(scope="module", params=ON_SERVERS)
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    with PLACES[request.param]() as place:
        yield place


@pytest.fixture(scope="module")
def client(place: Place) -> Iterator[Store]:
    """One store for all tests of a server: making a client costs more than most of them."""
    store = place.open("")
    yield store
    store.close()


@pytest.fixture
def store(client: Store) -> Store:
    """A folder of the bucket that no other test has, through the one client."""
    part = copy.copy(client)
    folder = f"runs/{os.urandom(8).hex()}/"
    if isinstance(part, S3Store):
        part._keys = folder
    else:
        assert isinstance(part, (ObjectStore, HubStore))
        part._path = folder
    return part


class TestStoreOnAServer(StoreConformance):
    def test_objects_outside_the_prefix_are_not_listed(self, place: Place) -> None:
        one, other = (place.open(f"same{end}/") for end in ("", "-2"))
        other.put_if_absent("head/1", b"x")
        assert one.list_after("").entries == ()
        assert one.get("head/1", limit=1) is None
        assert one.put_if_absent("head/1", b"y")
        one.close()
        other.close()

    def test_a_missing_bucket_is_refused(self, place: Place) -> None:
        if place.url == "hf://namespace/model":
            pytest.skip("a repository is made where it is missing")
        missing = Place(place.url.replace("bucket", "nobucket").replace("nobuckets", "buckets"), place.options, "")
        store = missing.open("run")
        with pytest.raises(StoreRefusedError, match="there is no (bucket|such bucket|such container)"):
            store.list_after("")
        with pytest.raises(StoreRefusedError, match="there is no (bucket|such bucket|such container)"):
            store.get("head/1", limit=1)
        store.close()
