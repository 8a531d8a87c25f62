"""What only S3 has, against two real servers: `make test-stores`."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from speedtronic.distributed.stores import open_store
from speedtronic.errors import StoreRefusedError
from tests.distributed.stores import servers
from tests.distributed.stores.servers import BUCKET

pytestmark = pytest.mark.stores

SERVERS = {"moto": servers.moto, "seaweed": servers.seaweed}


@pytest.fixture(scope="module", params=SERVERS)
def endpoint(request: pytest.FixtureRequest) -> Iterator[str]:
    with SERVERS[request.param]() as address:
        servers.make_bucket(address, BUCKET)
        yield address


class TestS3Store:
    def test_a_multipart_object_is_created_only_once(self, endpoint: str) -> None:
        store = open_store(f"s3://{BUCKET}/parts", endpoint=endpoint, part_size=5, **servers.CREDENTIALS)
        data = os.urandom(11 * 2**20)
        assert store.put_if_absent("w/1", data)
        assert not store.put_if_absent("w/1", bytes(11 * 2**20))
        assert store.get("w/1", limit=len(data), size=len(data)) == data
        store.close()

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
