"""From an address or a configuration to a store. A new kind of store is opened here."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import SplitResult, unquote, urlsplit

from speedtronic.config import DistributedConfig
from speedtronic.distributed.stores.base import Store
from speedtronic.distributed.stores.folder import FolderStore
from speedtronic.distributed.stores.memory import MemoryStore
from speedtronic.distributed.stores.retrying import RetryingStore
from speedtronic.errors import ConfigError

_ADDRESSES = (
    "dir:///path, s3://bucket/prefix, hf://buckets/namespace/bucket/prefix, hf://namespace/name, "
    "az://container/prefix, gs://bucket/prefix or memory://name"
)
_BUCKETS = "buckets/"  # what follows hf:// where a storage bucket of the Hub is meant, and not a repository
_ON_THE_HUB = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9._-]+")
_OTHER_KINDS = {"datasets", "spaces", "models", "kernels"}  # of repositories on the Hub
_HUB_GATEWAY = "https://s3.hf.co"
# Options by the kind of an address, with their types.
_OPTIONS: Mapping[str, Mapping[str, type[str] | type[bool] | type[int]]] = {
    "s3": {
        **dict.fromkeys(("endpoint", "endpoint_url", "region", "profile", "key", "secret", "token"), str),
        **dict.fromkeys(("addressing_style", "checksum"), str),
        **{"anon": bool, "use_ssl": bool, "part_size": int},
    },
    "hf://buckets": dict.fromkeys(("endpoint", "endpoint_url", "profile", "key", "secret"), str),
    "hf": {"commits_an_hour": int},
    "az": dict.fromkeys(("account", "endpoint", "endpoint_url"), str),
    "gs": dict.fromkeys(("endpoint", "endpoint_url"), str),
    **dict.fromkeys(("dir", "file", "memory"), {}),
}
_RENAMED = {"endpoint", "endpoint_url", "region", "addressing_style", "checksum", "part_size"}  # s3fs has other names
_CHECKSUMS = ("when_supported", "when_required")
_SMALLEST_PART = 5  # MiB, of a multipart upload, by S3's rules


@dataclass(frozen=True)
class Keys:
    """The keys of the configuration that hold an address and its options, for messages."""

    address: str = "distributed.repo_id"
    options: str = "distributed.store_options"


EXCHANGE = Keys()
MIRROR = Keys("checkpoint.mirror", "checkpoint.mirror_options")


def open_store(url: str, **options: object) -> Store:
    """The store at an address. Nothing is asked of it yet, and nothing made.

    Args:
        url: `dir:///path` (or `dir://path`, relative to the working folder), `file:///path`, `s3://bucket/prefix`,
            `hf://buckets/namespace/bucket/prefix`, `hf://namespace/name/prefix` (or `namespace/name`),
            `az://container/prefix`, `gs://bucket/prefix`, `memory://name`.
        options: what the store needs; null counts as not given. S3: `endpoint` (or `endpoint_url`), `region`,
            `profile`, `key`, `secret`, `token`, `anon`, `use_ssl`, `addressing_style` (`path` or `virtual`),
            `checksum` (`when_supported` or `when_required`), `part_size` (MiB); AWS's own environment variables and
            files fill in for missing ones. A bucket of the Hub: `profile`, `key`, `secret`, `endpoint`. A
            repository of the Hub: `commits_an_hour`. Azure: `account`, `endpoint`. Google: `endpoint`.

    Raises:
        ConfigError: the address or an option is wrong.
        MissingExtraError: a library that the store needs is not installed.
        StoreRefusedError: its client does not start, for example without an account.
    """
    return open_configured(url, options, EXCHANGE)


def open_configured(url: str, options: Mapping[str, object], keys: Keys) -> Store:
    """`open_store` for an address and options that stand under some keys of the configuration."""
    check_address(url, options, keys)
    scheme, _, rest = _split(url)
    given = {key: value for key, value in options.items() if value is not None}
    endpoint = _endpoint(given, keys)
    match scheme:
        case "dir" | "file":
            return FolderStore(_folder(scheme, rest, keys))
        case "memory":
            return MemoryStore.shared(rest)
        case "hf" if rest.startswith(_BUCKETS):
            return _open_hub_bucket(rest.removeprefix(_BUCKETS), endpoint, given)
        case "hf":
            return _open_hub_repository(rest, given)
    parts = urlsplit(url)
    bucket, path = _bucket_of(parts), parts.path.strip("/")
    if scheme == "s3":
        return _open_s3(parts, endpoint, given)
    from speedtronic.distributed.stores.object import open_azure, open_google

    plain_url = f"{scheme}://{bucket}/{path}".rstrip("/")
    if scheme == "az":
        account = given.get("account")
        return open_azure(
            bucket, path, account=None if account is None else str(account), endpoint=endpoint, url=plain_url
        )
    return open_google(bucket, path, endpoint=endpoint, url=plain_url)


def check_address(url: str, options: Mapping[str, object], keys: Keys = EXCHANGE) -> None:
    """Check an address and its options, as far as they alone show whether `open_store` can take them.

    Args:
        keys: what the configuration calls them.

    Raises:
        ConfigError: the address or an option is wrong, or the Hub is meant and the environment says to stay off it.
    """
    scheme, separator, rest = _split(url)
    given = {key: value for key, value in options.items() if value is not None}
    if not separator:
        raise ConfigError(f"{keys.address}: not the address of a store; write {_ADDRESSES}")
    if scheme not in _OPTIONS:
        raise ConfigError(f"{keys.address}: {scheme}: is not a kind of store; write {_ADDRESSES}")
    parts = urlsplit(f"{scheme}://{rest}")
    if scheme in {"dir", "file"}:
        _folder(scheme, rest, keys)
    elif scheme != "memory":
        if parts.query or parts.fragment:
            raise ConfigError(
                f"{keys.address}: an address of {scheme} has no part after '?' or '#'; use {keys.options}"
            )
        if not parts.hostname:
            raise ConfigError(f"{keys.address}: the address names no bucket; write {scheme}://bucket/prefix")
        if parts.username is not None and scheme != "s3":
            raise ConfigError(f"{keys.address}: {scheme}: leave credentials to the environment, not to the address")
    if scheme == "hf":
        namespace, *name = [part for part in rest.removeprefix(_BUCKETS).split("/") if part]
        if not name or (namespace in _OTHER_KINDS and not rest.startswith(_BUCKETS)):
            raise ConfigError(
                f"{keys.address}: write hf://buckets/namespace/bucket, or hf://namespace/name for a repository of a "
                "model, and a prefix behind it"
            )
        if os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"}:
            raise ConfigError(
                f"{keys.address}: HF_HUB_OFFLINE is set, so the Hub is not asked; unset it, or use another store"
            )
    _check_options(given, "hf://buckets" if scheme == "hf" and rest.startswith(_BUCKETS) else scheme, keys)
    _endpoint(given, keys)


def _split(url: str) -> tuple[str, str, str]:
    """The scheme of an address, `://`, and the rest. A bare `namespace/name` is one of the Hub."""
    scheme, separator, rest = url.partition("://")
    if not separator and _ON_THE_HUB.fullmatch(url):
        return "hf", "://", url
    return scheme, separator, rest


def check_exchange(config: DistributedConfig) -> None:
    """Check what a configuration says of the store that nodes share, without asking it.

    Raises:
        ConfigError: see `check_address`; a token is given; or nobody knows among how many nodes commits are shared.
    """
    check_address(str(config.repo_id), config.store_options)
    _shared_budget(config)
    if config.token is not None:
        raise ConfigError(
            "distributed.token: remove it: credentials come from the environment or from a login, so that no file "
            "holds them (HF_TOKEN or `hf auth login`, AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, …)"
        )


def _shared_budget(config: DistributedConfig) -> dict[str, int]:
    """The share of the commits of a repository on the Hub that one node gets, where the configuration does not say it.

    Raises:
        ConfigError: nobody knows among how many nodes they are shared.
    """
    scheme, _, rest = _split(str(config.repo_id))
    if scheme != "hf" or rest.startswith(_BUCKETS) or "commits_an_hour" in config.store_options:
        return {}
    from speedtronic.distributed.stores.hub import BUDGET

    if config.expected_nodes is None:
        raise ConfigError(
            "distributed.expected_nodes: a repository on the Hub takes about 128 commits an hour from all nodes "
            "together; set it, so that each takes its share, or set distributed.store_options.commits_an_hour"
        )
    return {"commits_an_hour": max(1, BUDGET // (config.expected_nodes + 1))}  # and the master


def connect(config: DistributedConfig, store: Store | None = None, *, stopping: threading.Event | None = None) -> Store:
    """The store of a configuration, with retries, and proved before its first use. Nothing is asked of it yet.

    Args:
        config: `repo_id` and `store_options` say which store, `retry_…` how often and how fast a failed request is
            tried again.
        store: used instead of the configured one.
        stopping: ends the pauses between attempts, and the attempts.

    Raises:
        ConfigError, StoreRefusedError, MissingExtraError: there is no such store, or it cannot be opened here.
    """
    if store is None:
        check_exchange(config)
        store = open_store(str(config.repo_id), **_shared_budget(config), **config.store_options)
    return RetryingStore(
        store,
        initial=config.retry_initial,
        maximum=config.retry_max,
        attempts=config.retry_attempts,
        sleep=time.sleep if stopping is None else stopping.wait,
        give_up=(lambda: False) if stopping is None else stopping.is_set,
        prove=True,
    )


def _folder(scheme: str, rest: str, keys: Keys) -> str:
    """The path in an address: of `file` percent-encoded, of `dir` as it is."""
    if scheme == "dir" and rest:
        return os.path.expanduser(rest)
    host, slash, path = rest.partition("/")
    if scheme == "file" and slash and host in {"", "localhost"}:
        return "/" + unquote(path)
    raise ConfigError(f"{keys.address}: {scheme}: names no folder of this machine; write dir:///path")


def _bucket_of(parts: SplitResult) -> str:
    return parts.netloc.rpartition("@")[2]  # as it is written; `hostname` is in lower case


def _open_s3(parts: SplitResult, endpoint: str | None, options: dict[str, object]) -> Store:
    from speedtronic.distributed.stores.s3 import PART_SIZE, S3Store

    if parts.username is not None:
        options = {"key": unquote(parts.username), "secret": unquote(parts.password or ""), **options}
    client: dict[str, Any] = {key: options[key] for key in options.keys() - _RENAMED}
    if "region" in options:
        client["client_kwargs"] = {"region_name": options["region"]}
    config: dict[str, object] = {}
    if "addressing_style" in options:
        config["s3"] = {"addressing_style": options["addressing_style"]}
    if "checksum" in options:
        config |= _checksums(options["checksum"])
    part_size = PART_SIZE if "part_size" not in options else int(str(options["part_size"])) * 2**20
    return S3Store(
        _bucket_of(parts),
        parts.path.strip("/"),
        endpoint=endpoint,
        part_size=part_size,
        config_kwargs=config,
        **client,
    )


def _open_hub_bucket(address: str, endpoint: str | None, options: dict[str, object]) -> Store:
    """A storage bucket of the Hugging Face Hub, through its gateway for S3.

    https://huggingface.co/docs/hub/storage-buckets-s3 names these settings. It says that PutObject obeys conditions,
    and nothing of CompleteMultipartUpload, so each object is sent in one request.
    """
    from speedtronic.distributed.stores.s3 import S3Store

    namespace, bucket, *path = [part for part in address.split("/") if part]
    client: dict[str, Any] = {key: options[key] for key in {"profile", "key", "secret"} & options.keys()}
    return S3Store(
        bucket,
        "/".join(path),
        endpoint=f"{(endpoint or _HUB_GATEWAY).rstrip('/')}/{namespace}",
        url="/".join(["hf://buckets", namespace, bucket, *path]),
        part_size=None,
        client_kwargs={"region_name": "us-east-1"},
        config_kwargs={"s3": {"addressing_style": "path"}, **_checksums("when_required")},
        **client,
    )


def _open_hub_repository(address: str, options: dict[str, object]) -> Store:
    from speedtronic.distributed.stores.hub import BUDGET, HubStore

    namespace, name, *path = [part for part in address.split("/") if part]
    budget = int(str(options.get("commits_an_hour", BUDGET)))
    return HubStore(f"{namespace}/{name}", "/".join(path), budget=budget)


def _checksums(when: object) -> dict[str, object]:
    return {"request_checksum_calculation": when, "response_checksum_validation": when}


def _endpoint(options: Mapping[str, object], keys: Keys) -> str | None:
    if "endpoint" in options and "endpoint_url" in options:
        raise ConfigError(f"{keys.options}: endpoint and endpoint_url are the same; give one")
    endpoint = options.get("endpoint", options.get("endpoint_url"))
    if endpoint is None:
        return None
    if not re.match(r"https?://[^/]", str(endpoint)):
        raise ConfigError(f"{keys.options}.endpoint: write an address that begins with https:// or http://")
    if "@" in urlsplit(str(endpoint)).netloc:
        raise ConfigError(f"{keys.options}.endpoint: put user and password into {keys.options}.key and secret")
    return str(endpoint)


def _check_options(options: Mapping[str, object], scheme: str, keys: Keys) -> None:
    known = _OPTIONS[scheme]
    words = {str: "text", bool: "true or false", int: "a whole number"}
    for key, value in options.items():
        if key not in known:
            takes = f"it takes {', '.join(sorted(known))}" if known else "it takes none"
            raise ConfigError(
                f"{keys.options}.{key}: unknown to a store at {scheme}{'' if '://' in scheme else '://'}; {takes}"
            )
        if type(value) is not known[key]:
            raise ConfigError(f"{keys.options}.{key}: must be {words[known[key]]}")
    if (part_size := options.get("part_size")) is not None and int(str(part_size)) < _SMALLEST_PART:
        raise ConfigError(f"{keys.options}.part_size: must be at least {_SMALLEST_PART} (MiB)")
    if (budget := options.get("commits_an_hour")) is not None and int(str(budget)) < 1:
        raise ConfigError(f"{keys.options}.commits_an_hour: must be at least 1")
    if (checksum := options.get("checksum")) is not None and checksum not in _CHECKSUMS:
        raise ConfigError(f"{keys.options}.checksum: must be {' or '.join(_CHECKSUMS)}")
