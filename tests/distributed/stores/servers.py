"""Servers of object storage, on this machine, for as long as a test runs."""

from __future__ import annotations

import base64
import hashlib
import hmac
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest

from speedtronic.distributed.stores import Store, open_store
from tests.support.faulty_proxy import FaultyProxy, proxied
from tests.support.hub_server import TOKEN, Hub, serving_hub
from tests.support.object_servers import KEY, GoogleStorage, HubGateway, ObjectServer, serving

BUCKET = "bucket"
CREDENTIALS = {"key": "testing", "secret": "testing", "region": "us-east-1"}
AZURITE = Path(__file__).parents[3] / "build/azurite/node_modules/azurite/dist/src/blob/main.js"
# The account that every Azurite has; Microsoft publishes its key.
AZURITE_ACCOUNT = "devstoreaccount1"
AZURITE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
_PATIENCE = 60.0  # seconds that a server is given to start on a busy machine


@dataclass(frozen=True)
class Place:
    """Where stores of one kind lie.

    Attributes:
        url: of the bucket.
        options: that open a store there.
        address: of the server.
    """

    url: str
    options: Mapping[str, Any]
    address: str

    def open(self, path: str) -> Store:
        return open_store(f"{self.url}/{path}", **self.options)

    @contextmanager
    def through(self, proxy: FaultyProxy) -> Iterator[Place]:
        """The same place behind a proxy."""
        with proxied(proxy) as front:
            if "endpoint" not in self.options:
                with _as_hub(front):
                    yield Place(self.url, self.options, front)
                return
            endpoint = str(self.options["endpoint"]).replace(self.address, front)
            yield Place(self.url, {**self.options, "endpoint": endpoint}, front)


@contextmanager
def on_moto() -> Iterator[Place]:
    with moto() as address:
        make_bucket(address, BUCKET)
        yield Place(f"s3://{BUCKET}", {"endpoint": address, **CREDENTIALS}, address)


@contextmanager
def on_seaweed() -> Iterator[Place]:
    with seaweed() as address:
        make_bucket(address, BUCKET)
        yield Place(f"s3://{BUCKET}", {"endpoint": address, **CREDENTIALS}, address)


@contextmanager
def on_hub(objects: ObjectServer | None = None) -> Iterator[Place]:
    with serving(objects or HubGateway(BUCKET)) as address:
        yield Place(f"hf://buckets/namespace/{BUCKET}", {"endpoint": address, "key": KEY, "secret": "testing"}, address)


@contextmanager
def on_hub_repository(hub: Hub | None = None) -> Iterator[Place]:
    """A repository of a small Hub, for its real client."""
    with serving_hub(hub or Hub()) as address, _as_hub(address):
        yield Place("hf://namespace/model", {"commits_an_hour": 10**6}, address)


@contextmanager
def _as_hub(address: str) -> Iterator[None]:
    """Let the Hub's client, here and in processes that are started, take this server for the Hub."""
    from huggingface_hub import constants

    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"HF_ENDPOINT": address, "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1"}.items():
            patch.setenv(name, value)
        patch.delenv("HF_HUB_OFFLINE", raising=False)
        patch.setattr(constants, "ENDPOINT", address)
        patch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        yield


@contextmanager
def on_google(objects: ObjectServer | None = None) -> Iterator[Place]:
    with serving(objects or GoogleStorage(BUCKET)) as address, pytest.MonkeyPatch.context() as patch:
        patch.setenv("GOOGLE_BEARER_TOKEN", KEY)
        yield Place(f"gs://{BUCKET}", {"endpoint": address}, address)


@contextmanager
def on_azurite() -> Iterator[Place]:
    """Microsoft's emulator of Azure Blob Storage."""
    if not AZURITE.is_file():
        pytest.skip("Azurite is not installed here; `make test-stores` installs it")
    with _running(_azurite_command) as port, pytest.MonkeyPatch.context() as patch:
        address = f"http://127.0.0.1:{port}"
        patch.setenv("AZURE_STORAGE_ACCOUNT_NAME", AZURITE_ACCOUNT)
        patch.setenv("AZURE_STORAGE_ACCOUNT_KEY", AZURITE_KEY)
        _make_container(address, BUCKET)
        yield Place(f"az://{BUCKET}", {"endpoint": f"{address}/{AZURITE_ACCOUNT}"}, address)


PLACES: Mapping[str, Callable[[], AbstractContextManager[Place]]] = {
    "moto": on_moto,
    "seaweed": on_seaweed,
    "hub": on_hub,
    "repository": on_hub_repository,
    "azurite": on_azurite,
    "google": on_google,
}
ON_SERVERS = [pytest.param(name, marks=pytest.mark.stores) for name in PLACES]


@contextmanager
def moto() -> Iterator[str]:
    """The address of a moto server. A process of its own, since it has warnings and threads of its own."""
    with _running(_moto_command) as port:
        yield f"http://127.0.0.1:{port}"


@contextmanager
def seaweed() -> Iterator[str]:
    """The address of a SeaweedFS server with a gateway for S3."""
    with _running(_seaweed_command) as port:
        yield f"http://127.0.0.1:{port}"


def _moto_command(folder: str, ports: list[int]) -> list[str]:
    return [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(ports[0])]


def _seaweed_command(folder: str, ports: list[int]) -> list[str]:
    listeners = ("s3.port", "master.port", "volume.port", "filer.port")
    options = [f"-{name}={port}" for name, port in zip(listeners, ports[:4], strict=True)]
    options += [f"-{name}.grpc={port}" for name, port in zip(listeners, ports[4:], strict=True)]
    return [
        str(Path(sys.executable).parent / "weed"),
        "server",
        f"-dir={folder}",
        "-ip=127.0.0.1",
        "-ip.bind=127.0.0.1",
        "-master.telemetry=false",
        "-master.volumeSizeLimitMB=64",
        "-volume.max=100",
        "-volume.preStopSeconds=0",
        "-filer",
        f"-filer.localSocket={folder}/filer.sock",
        "-s3",
        f"-s3.localSocket={folder}/s3.sock",
        "-s3.port.iceberg=0",
        "-s3.port.lance=0",
        *options,
    ]


def _azurite_command(folder: str, ports: list[int]) -> list[str]:
    return [
        "node",
        str(AZURITE),
        *("--blobHost", "127.0.0.1", "--blobPort", str(ports[0])),
        *("--location", folder, "--silent", "--skipApiVersionCheck", "--disableTelemetry"),
    ]


def _make_container(address: str, name: str) -> None:
    """Make a container by a plain request, signed with the account's key.

    https://learn.microsoft.com/rest/api/storageservices/authorize-with-shared-key
    """
    about = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-08-06"}
    named = "".join(f"{header}:{value}\n" for header, value in sorted(about.items()))
    resource = f"/{AZURITE_ACCOUNT}/{AZURITE_ACCOUNT}/{name}\nrestype:container"
    kind = "application/octet-stream"
    signed = "PUT" + 5 * "\n" + kind + 7 * "\n" + named + resource
    digest = hmac.new(base64.b64decode(AZURITE_KEY), signed.encode(), hashlib.sha256).digest()
    about["Content-Type"] = kind
    about["Authorization"] = f"SharedKey {AZURITE_ACCOUNT}:{base64.b64encode(digest).decode()}"
    url = f"{address}/{AZURITE_ACCOUNT}/{name}?restype=container"
    with urllib.request.urlopen(urllib.request.Request(url, data=b"", headers=about, method="PUT"), timeout=30):
        pass


def make_bucket(endpoint: str, name: str) -> None:
    """Make a bucket by a plain request of the S3 client."""
    import boto3

    client = boto3.client(
        "s3",
        endpoint_url=endpoint,
        aws_access_key_id=CREDENTIALS["key"],
        aws_secret_access_key=CREDENTIALS["secret"],
        region_name=CREDENTIALS["region"],
    )
    client.create_bucket(Bucket=name)
    client.close()


@contextmanager
def _running(command: Callable[[str, list[int]], list[str]]) -> Iterator[int]:
    """The first port of a server, once it answers there; it is ended with the block."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, ExitStack() as stack:
        for tries_left in reversed(range(3)):
            ports = _free_ports(8)  # which another process may take before the server does
            log = Path(folder) / "log.txt"
            output = stack.enter_context(log.open("wb"))
            arguments = command(folder, ports)
            process = subprocess.Popen(arguments, cwd=folder, stdout=output, stderr=output)
            stack.callback(process.wait)
            stack.callback(process.kill)
            if _answers(f"http://127.0.0.1:{ports[0]}/", process):
                yield ports[0]
                return
            if not tries_left:
                raise RuntimeError(f"{arguments[0]} does not answer:\n{log.read_text(errors='replace')[-2000:]}")


def _answers(address: str, process: subprocess.Popen[bytes]) -> bool:
    deadline = time.monotonic() + _PATIENCE
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(address, timeout=5):
                return True
        except urllib.error.HTTPError as error:
            if error.code < 500:
                return True
        except OSError:
            pass
        time.sleep(0.1)
    return False


def _free_ports(number: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
