"""Where the stores of tortured runs lie: in folders, or in a server of S3 on this machine. Of what ever was in a store,
nothing is lost there."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.distributed.stores.servers import CREDENTIALS, make_bucket, moto

_PREFIX = "run/"


@dataclass(frozen=True)
class Place:
    """A store.

    Attributes:
        url, options: of it.
        kept: where what was deleted from a folder store is kept.
        poll_interval: seconds.
        gather: makes folders of all objects that ever were in it.
    """

    url: str
    kept: Path
    poll_interval: float
    gather: Callable[[], list[Path]]
    options: Mapping[str, str] = field(default_factory=dict)


def in_folder(folder: Path) -> Place:
    """A store in a folder of its own. The tortured processes keep what they delete; see `machine`."""
    store, kept = folder / "store", folder / "kept"
    return Place(f"dir://{store}", kept, 0.05, lambda: [store, kept])


@contextmanager
def on_s3() -> Iterator[Callable[[Path], Place]]:
    """A server of S3, and what makes a store there, in a bucket that keeps all versions of each object."""
    keys = {"AWS_ACCESS_KEY_ID": CREDENTIALS["key"], "AWS_SECRET_ACCESS_KEY": CREDENTIALS["secret"]}
    before = {name: os.environ.get(name) for name in keys}
    os.environ.update(keys)
    try:
        with moto() as endpoint:
            yield lambda folder: _new_bucket(endpoint, folder)
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _new_bucket(endpoint: str, folder: Path) -> Place:
    bucket = f"{folder.parent.name}-{folder.name}".lower()
    make_bucket(endpoint, bucket)
    client = _client(endpoint)
    client.put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": "Enabled"})
    options = {"endpoint": endpoint, "region": CREDENTIALS["region"]}

    def gather() -> list[Path]:
        return _download(client, bucket, folder / "kept")

    return Place(f"s3://{bucket}/{_PREFIX.rstrip('/')}", folder / "unused", 0.2, gather, options)


def _client(endpoint: str) -> Any:
    import boto3

    return boto3.client("s3", endpoint_url=endpoint, region_name=CREDENTIALS["region"])


def _download(client: Any, bucket: str, kept: Path) -> list[Path]:
    """Every version of every object; those of one name in folders of their own."""
    folders: list[Path] = []
    for page in client.get_paginator("list_object_versions").paginate(Bucket=bucket, Prefix=_PREFIX):
        for version in page.get("Versions", ()):
            name, number = version["Key"].removeprefix(_PREFIX), 0
            while (file := kept / str(number) / name).exists():
                number += 1
            folders += [kept / str(number)] if number == len(folders) else []
            file.parent.mkdir(parents=True, exist_ok=True)
            body = client.get_object(Bucket=bucket, Key=version["Key"], VersionId=version["VersionId"])["Body"]
            file.write_bytes(body.read())
    return folders
