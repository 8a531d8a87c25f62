"""From an address to a store."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from speedtronic.config import DistributedConfig
from speedtronic.distributed.stores import FolderStore, MemoryStore, open_store
from speedtronic.distributed.stores.hub import HubStore
from speedtronic.distributed.stores.object import ObjectStore
from speedtronic.distributed.stores.open import connect
from speedtronic.distributed.stores.s3 import S3Store
from speedtronic.errors import ConfigError, MissingExtraError, StoreRefusedError, StoreUnavailableError
from tests.support.counting_store import CountingStore
from tests.support.failing import Failing


def test_a_folder_is_named_by_dir_or_file_and_not_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for url, folder in {
        "dir:///mnt/a b/%20": "/mnt/a b/%20",
        "dir://runs/store": f"{tmp_path}/runs/store",
        "dir://~/store": f"{tmp_path}/home/store",
        "file:///mnt/a%20b": "/mnt/a b",
        "file://localhost/mnt": "/mnt",
    }.items():
        store = open_store(url)
        assert isinstance(store, FolderStore)
        assert store.url == f"dir://{folder}"
    assert list(tmp_path.iterdir()) == []


def test_a_null_option_counts_as_not_given() -> None:
    assert isinstance(open_store("memory://x", token=None), MemoryStore)


def test_s3_addresses_take_their_options() -> None:
    store = open_store(
        "s3://Bucket.with-dots/some/prefix/",
        endpoint="https://minio.example:9000",
        region="eu-central-1",
        key="k",
        secret="s",
        token="t",
        addressing_style="path",
        use_ssl=True,
    )
    assert isinstance(store, S3Store)
    assert store.url == "s3://Bucket.with-dots/some/prefix"
    fs = store._fs
    assert (fs.endpoint_url, fs.key, fs.secret, fs.token) == ("https://minio.example:9000", "k", "s", "t")
    assert fs.client_kwargs == {"region_name": "eu-central-1"}
    assert fs.config_kwargs["s3"] == {"addressing_style": "path"}
    assert fs.config_kwargs["retries"] == {"total_max_attempts": 1}
    assert fs.dircache.use_listings_cache is False
    assert open_store("s3://b")._fs is not open_store("s3://b")._fs  # type: ignore[attr-defined]


def test_a_bucket_of_the_hub_is_reached_as_its_gateway_asks() -> None:
    store = open_store("hf://buckets/someone/Bucket/some/prefix/", profile="hub")
    assert isinstance(store, S3Store)
    assert store.url == "hf://buckets/someone/Bucket/some/prefix"
    fs = store._fs
    assert fs.endpoint_url == "https://s3.hf.co/someone"
    assert fs.client_kwargs == {"region_name": "us-east-1"}
    assert fs.config_kwargs["s3"] == {"addressing_style": "path"}
    assert fs.config_kwargs["request_checksum_calculation"] == "when_required"
    assert fs.config_kwargs["response_checksum_validation"] == "when_required"


@pytest.mark.parametrize("url", ["org/name", "hf://org/name", "hf://org/name/some/prefix"])
def test_a_repository_of_the_hub_is_opened_by_its_client(url: str) -> None:
    store = open_store(url, commits_an_hour=7)
    assert isinstance(store, HubStore)
    assert store.url == (url if "://" in url else f"hf://{url}")
    assert (store._repository, store._budget) == ("org/name", 7)


def test_the_nodes_share_the_commits_of_a_repository() -> None:
    assert connect(settings(repo_id="hf://org/name", expected_nodes=9))._store._budget == 10  # type: ignore[attr-defined]
    assert (
        connect(settings(repo_id="org/name", store_options={"commits_an_hour": 3}))._store._budget == 3  # type: ignore[attr-defined]
    )
    with pytest.raises(ConfigError, match="distributed.expected_nodes: .*128 commits an hour"):
        connect(settings(repo_id="hf://org/name"))


def test_a_token_in_the_configuration_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="distributed.token: remove it: credentials come from the environment"
    ) as said:
        connect(settings(token="hf_secret"))
    assert "hf_secret" not in str(said.value)


def test_azure_and_google_take_their_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "c2VjcmV0")
    azure = open_store("az://Container/some/prefix/", account="mine")
    google = open_store("gs://bucket")
    assert isinstance(azure, ObjectStore)
    assert isinstance(google, ObjectStore)
    assert (azure.url, google.url) == ("az://Container/some/prefix", "gs://bucket")
    assert azure._client.retry_config["max_retries"] == 0  # type: ignore[index]
    for name in ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT_KEY"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(StoreRefusedError, match="az://container/x: cannot be opened.*AZURE_STORAGE_ACCOUNT_NAME"):
        open_store("az://container/x")


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("", "not the address of a store"),
        ("/mnt/store", "not the address of a store; write dir:///path"),
        ("dir://", "names no folder"),
        ("file://other-machine/path", "names no folder of this machine"),
        ("s3:///prefix", "names no bucket"),
        ("s3://bucket/x?versionId=secret", "no part after"),
        ("s3://bucket/x#secret", "no part after"),
        ("nonsense://bucket", "nonsense: is not a kind of store"),
        ("abfs://container/x", "abfs: is not a kind of store; write dir:///path"),
        ("gs://user:secret@bucket/x", "leave credentials to the environment"),
        ("hf://datasets/org/name", "write hf://buckets/namespace/bucket, or hf://namespace/name"),
        ("hf://org", "write hf://buckets/namespace/bucket, or hf://namespace/name"),
        ("hf://buckets/org", "write hf://buckets/namespace/bucket"),
    ],
)
def test_an_invalid_address_is_refused_without_showing_its_secrets(url: str, says: str) -> None:
    with pytest.raises(ConfigError, match=f"distributed.repo_id: .*{says}") as raised:
        open_store(url)
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize(
    ("url", "options", "says"),
    [
        ("dir:///x", {"region": "hush"}, "store_options.region: unknown to a store at dir://; it takes none"),
        ("s3://b", {"endpont": "hush"}, "store_options.endpont: unknown to a store at s3://; it takes .*endpoint"),
        ("s3://b", {"endpoint": "minio:9000/hush"}, "store_options.endpoint: write an address that begins with"),
        ("s3://b", {"endpoint": "http://a", "endpoint_url": "http://b"}, "are the same; give one"),
        ("s3://b", {"endpoint": "https://user:hush@minio"}, "store_options.endpoint: put user and password into .*key"),
        ("s3://b", {"region": 1}, "store_options.region: must be text"),
        ("s3://b", {"anon": "yes"}, "store_options.anon: must be true or false"),
        ("gs://b", {"profile": "hush"}, "store_options.profile: unknown to a store at gs://"),
        ("s3://b", {"part_size": 4}, "store_options.part_size: must be at least 5"),
        ("s3://b", {"part_size": "hush"}, "store_options.part_size: must be a whole number"),
        ("s3://b", {"checksum": "hush"}, "store_options.checksum: must be when_supported or when_required"),
        ("hf://buckets/a/b", {"part_size": 5}, "store_options.part_size: unknown to a store at hf://buckets;"),
        ("hf://a/b", {"endpoint": "hush"}, "store_options.endpoint: unknown to a store at hf://; it takes commits"),
        ("hf://a/b", {"commits_an_hour": 0}, "store_options.commits_an_hour: must be at least 1"),
    ],
)
def test_a_wrong_option_is_named_without_its_value(url: str, options: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says) as raised:
        open_store(url, **options)
    assert "hush" not in str(raised.value)


def test_a_missing_library_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(MissingExtraError, match=r"install speedtronic\[s3\]"):
        open_store("s3://bucket")
    for missing, url, extra in (
        ("obstore.store", "gs://bucket", "gcs"),
        ("obstore.store", "az://container", "azure"),
        ("huggingface_hub", "hf://org/name", "hub"),
    ):
        monkeypatch.setitem(sys.modules, missing, None)
        with pytest.raises(MissingExtraError, match=rf"install speedtronic\[{extra}\]"):
            open_store(url)


def test_stores_need_no_torch() -> None:
    code = (
        "import sys, speedtronic.distributed.stores as stores\n"
        "stores.open_store('memory://x'); stores.open_store('dir:///x')\n"
        "assert not {'torch', 'fsspec', 's3fs', 'botocore', 'obstore', 'huggingface_hub'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# ---------------------------------------------------------------------- from a configuration

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
