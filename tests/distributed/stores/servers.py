"""Servers that speak the protocol of S3, on this machine, for as long as a test runs."""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

CREDENTIALS = {"key": "testing", "secret": "testing", "region": "us-east-1"}
_PATIENCE = 60.0  # seconds that a server is given to start on a busy machine


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
