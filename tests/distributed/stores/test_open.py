"""From an address to a store."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import fsspec
import pytest

from speedtronic.config import DistributedConfig
from speedtronic.distributed.stores import FolderStore, MemoryStore, open_store
from speedtronic.distributed.stores.object import ObjectStore
from speedtronic.distributed.stores.open import connect
from speedtronic.distributed.stores.s3 import S3Store
from speedtronic.errors import ConfigError, MissingExtraError, NotBuiltError, StoreRefusedError, StoreUnavailableError
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


def test_credentials_in_an_address_are_not_shown_when_opening_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def unopenable(**_: object) -> object:
        raise RuntimeError("user:hunter2")

    monkeypatch.setattr(fsspec, "get_filesystem_class", lambda protocol: unopenable)
    with pytest.raises(StoreRefusedError, match="gcs://bucket: cannot be opened") as caught:
        open_store("gs://user:hunter2@bucket/run")
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("url", ["org/name", "hf://org/name", "hf://datasets/org/name"])
def test_the_hub_is_not_built_yet(url: str) -> None:
    with pytest.raises(NotBuiltError, match="not part of this version yet; use dir:///path"):
        open_store(url)


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
        ("abfs://user:secret@container/x", "put user and password into store_options"),
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
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(MissingExtraError, match=r"install speedtronic\[gcs\]"):
        open_store("gs://bucket")
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(MissingExtraError, match="install what fsspec names"):
        open_store("abfs://container")


def test_other_file_systems_are_opened_through_fsspec() -> None:
    store = open_store("local://bucket/prefix")
    assert isinstance(store, ObjectStore)
    assert store.url == "local://bucket/prefix"


def test_stores_need_no_torch() -> None:
    code = (
        "import sys, speedtronic.distributed.stores as stores\n"
        "stores.open_store('memory://x'); stores.open_store('dir:///x')\n"
        "assert not {'torch', 'fsspec', 's3fs', 'botocore'} & sys.modules.keys()"
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
