"""From an address or a configuration to a store. A new kind of store is opened here."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Mapping, Set
from urllib.parse import SplitResult, unquote, urlsplit

from speedtronic.config import DistributedConfig
from speedtronic.distributed.stores.base import Store
from speedtronic.distributed.stores.folder import FolderStore
from speedtronic.distributed.stores.memory import MemoryStore
from speedtronic.distributed.stores.object import ObjectStore
from speedtronic.distributed.stores.retrying import RetryingStore
from speedtronic.errors import ConfigError, MissingExtraError, NotBuiltError, StoreRefusedError

_ADDRESSES = "dir:///path, s3://bucket/prefix, gs://bucket/prefix or memory://name"
_ON_THE_HUB = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9._-]+")
_S3_OPTIONS = {
    *("endpoint", "endpoint_url", "region", "profile", "key", "secret", "token"),
    *("anon", "use_ssl", "addressing_style"),
}
_RENAMED = {"endpoint", "endpoint_url", "region", "addressing_style"}  # s3fs has other names for these
_GCS_OPTIONS = {"endpoint", "endpoint_url", "project", "token"}
_SWITCHES = {"anon", "use_ssl"}


def open_store(url: str, **options: object) -> Store:
    """The store at an address. Nothing is asked of it yet, and nothing made.

    Args:
        url: `dir:///path` (or `dir://path`, relative to the working folder), `file:///path`, `s3://bucket/prefix`,
            `gs://bucket/prefix`, `memory://name`, or any address of an fsspec file system that creates exclusively.
        options: what the store needs; null counts as not given. S3: `endpoint` (or `endpoint_url`), `region`,
            `profile`, `key`, `secret`, `token`, `anon`, `use_ssl`, `addressing_style` (`path` or `virtual`); AWS's own
            environment variables and files fill in for missing ones. Google: `endpoint`, `project`, `token`. Other file
            systems: the arguments of their constructors.

    Raises:
        ConfigError: the address or an option is wrong.
        NotBuiltError: this kind of store is not built yet.
        MissingExtraError: a library that the store needs is not installed.
    """
    check_address(url, options)
    scheme, _, rest = url.partition("://")
    given = {key: value for key, value in options.items() if value is not None}
    match scheme:
        case "dir" | "file":
            return FolderStore(_folder(scheme, rest))
        case "memory":
            return MemoryStore.shared(rest)
    parts = urlsplit(url)
    match scheme:
        case "s3":
            return _open_s3(parts, given)
        case "gs" | "gcs":
            endpoint = _endpoint(given)
            client = {key: given[key] for key in {"project", "token"} & given.keys()}
            if endpoint is not None:
                client["endpoint_url"] = endpoint
            return _over_fsspec("gcs", parts, client, remedy="install speedtronic[gcs]")
    return _over_fsspec(parts.scheme, parts, given, remedy="install what fsspec names for it")


def check_address(url: str, options: Mapping[str, object]) -> None:
    """Check an address and its options, as far as they alone show whether `open_store` can take them.

    Raises:
        ConfigError: the address or an option is wrong.
        NotBuiltError: this kind of store is not built yet.
    """
    scheme, separator, rest = url.partition("://")
    given = {key: value for key, value in options.items() if value is not None}
    if scheme == "hf" or (not separator and _ON_THE_HUB.fullmatch(url)):
        raise NotBuiltError(
            "distributed.repo_id: stores on the Hugging Face Hub are not part of this version yet; use dir:///path or "
            "s3://bucket/prefix"
        )
    if not separator:
        raise ConfigError(f"distributed.repo_id: not the address of a store; write {_ADDRESSES}")
    match scheme:
        case "dir" | "file":
            _check_options(given, set(), scheme)
            _folder(scheme, rest)
            return
        case "memory":
            _check_options(given, set(), scheme)
            return

    parts = urlsplit(url)
    if parts.query or parts.fragment:
        raise ConfigError(
            f"distributed.repo_id: an address of {parts.scheme} has no part after '?' or '#'; use store_options"
        )
    if not parts.hostname:
        raise ConfigError(f"distributed.repo_id: the address names no bucket; write {parts.scheme}://bucket/prefix")
    match scheme:
        case "s3":
            _check_options(given, _S3_OPTIONS, "s3")
            _endpoint(given)
        case "gs" | "gcs":
            _check_options(given, _GCS_OPTIONS, "gs")
            _endpoint(given)
        case _ if parts.username is not None:
            raise ConfigError(f"distributed.repo_id: {parts.scheme}: put user and password into store_options")


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
        assert config.repo_id is not None, "an enabled configuration has one"
        store = open_store(config.repo_id, **config.store_options)
    return RetryingStore(
        store,
        initial=config.retry_initial,
        maximum=config.retry_max,
        attempts=config.retry_attempts,
        sleep=time.sleep if stopping is None else stopping.wait,
        give_up=(lambda: False) if stopping is None else stopping.is_set,
        prove=True,
    )


def _folder(scheme: str, rest: str) -> str:
    """The path in an address: of `file` percent-encoded, of `dir` as it is."""
    if scheme == "dir" and rest:
        return os.path.expanduser(rest)
    host, slash, path = rest.partition("/")
    if scheme == "file" and slash and host in {"", "localhost"}:
        return "/" + unquote(path)
    raise ConfigError(f"distributed.repo_id: {scheme}: names no folder of this machine; write dir:///path")


def _bucket_of(parts: SplitResult) -> str:
    return parts.netloc.rpartition("@")[2]  # as it is written; `hostname` is in lower case


def _open_s3(parts: SplitResult, options: dict[str, object]) -> Store:
    from speedtronic.distributed.stores.s3 import S3Store

    if parts.username is not None:
        options = {"key": unquote(parts.username), "secret": unquote(parts.password or ""), **options}
    endpoint = _endpoint(options)
    client: dict[str, object] = {key: options[key] for key in _S3_OPTIONS & options.keys() - _RENAMED}
    if "region" in options:
        client["client_kwargs"] = {"region_name": options["region"]}
    if "addressing_style" in options:
        client["config_kwargs"] = {"s3": {"addressing_style": options["addressing_style"]}}
    return S3Store(_bucket_of(parts), parts.path.strip("/"), endpoint=endpoint, **client)


def _over_fsspec(protocol: str, parts: SplitResult, options: Mapping[str, object], *, remedy: str) -> Store:
    try:
        import fsspec  # type: ignore[import-untyped]  # it has no types

        kind = fsspec.get_filesystem_class(protocol)
    except ImportError as error:
        raise MissingExtraError(f"a store at {protocol}:// needs a library that is missing; {remedy}") from error
    except ValueError:
        raise ConfigError(f"distributed.repo_id: {protocol}: is not a kind of store; write {_ADDRESSES}") from None
    try:
        fs = kind(use_listings_cache=False, skip_instance_cache=True, **options)
    except Exception as error:  # noqa: BLE001 - foreign code, and its message may hold secrets
        raise StoreRefusedError(
            f"{protocol}://{_bucket_of(parts)}: cannot be opened ({type(error).__name__}); check store_options"
        ) from None
    root = f"{_bucket_of(parts)}{parts.path}".rstrip("/")
    return ObjectStore(fs, root, f"{parts.scheme}://{root}")


def _endpoint(options: Mapping[str, object]) -> str | None:
    if "endpoint" in options and "endpoint_url" in options:
        raise ConfigError("distributed.store_options: endpoint and endpoint_url are the same; give one")
    endpoint = options.get("endpoint", options.get("endpoint_url"))
    if endpoint is None:
        return None
    if not re.match(r"https?://[^/]", str(endpoint)):
        raise ConfigError("distributed.store_options.endpoint: write an address that begins with https:// or http://")
    if "@" in urlsplit(str(endpoint)).netloc:
        raise ConfigError("distributed.store_options.endpoint: put user and password into store_options.key and secret")
    return str(endpoint)


def _check_options(options: Mapping[str, object], known: Set[str], scheme: str) -> None:
    for key, value in options.items():
        if key not in known:
            takes = f"it takes {', '.join(sorted(known))}" if known else "it takes none"
            raise ConfigError(f"distributed.store_options.{key}: unknown to a store at {scheme}://; {takes}")
        if isinstance(value, bool) != (key in _SWITCHES) or not isinstance(value, (bool, str)):
            what = "true or false" if key in _SWITCHES else "text"
            raise ConfigError(f"distributed.store_options.{key}: must be {what}")
