"""Amazon S3, and other servers with its protocol, through s3fs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from speedtronic.distributed.stores.base import (
    PAGE,
    REQUEST_TIMEOUT,
    Buffer,
    Entry,
    Listing,
    checked_name,
    checked_prefix,
    expected_bytes,
    is_name,
)
from speedtronic.errors import MissingExtraError, StoreError, StoreRefusedError, StoreUnavailableError

PART_SIZE = 50 * 2**20  # bytes; larger objects are sent in parts of this size, two of which are in memory at once
LARGEST_PUT = 5 * 2**30 - 1  # bytes that one request can carry

_CONNECT_TIMEOUT = 15.0  # seconds
_SILENCE = 60.0  # seconds without a byte after which a connection is given up

# https://docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html
_CREDENTIALS = {"ExpiredToken", "InvalidToken", "InvalidAccessKeyId", "SignatureDoesNotMatch", "TokenRefreshRequired"}
_CLOCK = {"RequestTimeTooSkewed"}
_REGION = {"AuthorizationHeaderMalformed", "PermanentRedirect", "IllegalLocationConstraintException"}
_TEMPORARY = {"RequestTimeout", "IncompleteBody", "BadDigest", "SlowDown", "XAmzContentSHA256Mismatch"}
# 409: another creation of the same name is in progress, and may still fail.
_TEMPORARY_STATUS = {408, 409, 425, 429}
_CREDENTIALS_COME_FROM = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE or store_options.profile"


class S3Store:
    """Objects in a bucket, created with `If-None-Match: *`, also if they are sent in parts.

    A multipart upload that is given up may leave its parts in the bucket, invisible and paid for: a lifecycle rule that
    ends incomplete multipart uploads after a day removes them. Directory buckets are not supported, because they list
    names in no order.

    Args:
        bucket: its name.
        path: what the keys of this store's objects begin with, without slashes around it; may be empty.
        endpoint: address of the server, if it is not Amazon's.
        url: for messages, without secrets; None: `s3://bucket/path`.
        part_size: bytes; objects of at least twice as many are sent in parts of this size. None: in one request, and
            an object that is too large for one is refused.
        client: further arguments of `s3fs.S3FileSystem`.

    Raises:
        MissingExtraError: s3fs is not installed.
    """

    def __init__(
        self,
        bucket: str,
        path: str,
        *,
        endpoint: str | None = None,
        url: str | None = None,
        part_size: int | None = PART_SIZE,
        **client: Any,
    ) -> None:
        try:
            import s3fs  # type: ignore[import-untyped]  # it has no types
        except ImportError as error:
            raise MissingExtraError("a store on S3 needs s3fs; install speedtronic[s3]") from error
        config = {
            "connect_timeout": _CONNECT_TIMEOUT,
            "read_timeout": _SILENCE,
            "retries": {"total_max_attempts": 1},
            **client.pop("config_kwargs", {}),
        }
        self._fs = s3fs.S3FileSystem(
            endpoint_url=endpoint,
            config_kwargs=config,
            use_listings_cache=False,
            skip_instance_cache=True,
            **client,
        )
        self._fs.retries = 1  # `RetryingStore` is the one place of retries
        self._bucket = bucket
        self._keys = f"{path}/" if path else ""
        self._url = url or f"s3://{bucket}/{path}".rstrip("/")
        self._part_size = part_size
        self._server = "Amazon S3"
        if endpoint:  # without user and password
            parts = urlsplit(endpoint)
            self._server = f"{parts.scheme}://{parts.hostname}" + (f":{parts.port}" if parts.port else "")

    @property
    def url(self) -> str:
        return self._url

    def put_if_absent(self, name: str, data: Buffer, *, timeout: float = REQUEST_TIMEOUT) -> bool:
        path = self._path(checked_name(name))
        if self._part_size is None and memoryview(data).nbytes > LARGEST_PUT:
            raise StoreRefusedError(
                f"{self._url}: {name} has {memoryview(data).nbytes} bytes, and this store takes at most {LARGEST_PUT} "
                "in one object; use another store, or a smaller model"
            )
        # s3fs takes no views, and sends in parts what has twice the size of a part.
        content = data if isinstance(data, (bytes, bytearray)) else bytes(data)
        chunk = LARGEST_PUT + 1 if self._part_size is None else self._part_size
        try:
            # Not `open(path, "xb")`, which overwrites where nothing is written.
            self._ask(timeout, "pipe_file", path, content, mode="create", chunksize=chunk, max_concurrency=2)
        except FileExistsError:
            return False
        except FileNotFoundError:
            raise self._no_such_place() from None
        return True

    def get(
        self,
        name: str,
        *,
        limit: int,
        size: int | None = None,
        sha256: str | None = None,
        partial: bool = False,
        timeout: float = REQUEST_TIMEOUT,
    ) -> bytes | None:
        path = self._path(checked_name(name))
        end = 1 + (limit if size is None else min(limit, size))
        try:
            data: bytes = self._ask(timeout, "cat_file", path, start=0, end=end)
        except FileNotFoundError:
            return None
        except _EmptyError:
            data = b""
        return expected_bytes(data, limit, size, sha256, partial=partial)

    def list_after(self, prefix: str, marker: str = "", *, timeout: float = REQUEST_TIMEOUT) -> Listing:
        """As every store does; one request, however much comes before the marker."""
        checked_prefix(prefix)
        while True:
            try:
                page: dict[str, Any] = self._ask(
                    timeout,
                    "call_s3",
                    "list_objects_v2",
                    Bucket=self._bucket,
                    Prefix=self._keys + prefix,
                    MaxKeys=PAGE,
                    **({"StartAfter": self._keys + marker} if marker else {}),
                )
            except FileNotFoundError:
                raise self._no_such_place() from None
            keys: list[dict[str, Any]] = page.get("Contents", [])
            entries = tuple(self._entries(keys, prefix))
            more = bool(page.get("IsTruncated")) and bool(keys)
            if entries or not more:
                return Listing(entries, more)
            # All names of the page are foreign: go on to the next page.
            marker = keys[-1]["Key"].removeprefix(self._keys)

    def delete(self, name: str, *, timeout: float = REQUEST_TIMEOUT) -> None:
        path = self._path(checked_name(name))
        with suppress(FileNotFoundError):
            self._ask(timeout, "rm_file", path)

    def close(self) -> None:
        from fsspec.asyn import sync  # type: ignore[import-untyped]  # it has no types

        creator = getattr(self._fs, "_s3creator", None)  # s3fs sets it with its first request
        if creator is not None:
            with suppress(TimeoutError):  # a hanging connection ends with the process
                sync(self._fs.loop, creator.__aexit__, None, None, None, timeout=_CONNECT_TIMEOUT)

    def _path(self, name: str) -> str:
        return f"{self._bucket}/{self._keys}{name}"

    def _entries(self, keys: Iterable[Mapping[str, Any]], prefix: str) -> Iterable[Entry]:
        """The objects among some keys: those with valid names, under `prefix`."""
        for found in keys:
            name = str(found["Key"]).removeprefix(self._keys)
            if is_name(name) and name.startswith(prefix):
                yield Entry(name, int(found["Size"]))

    def _no_such_place(self) -> StoreRefusedError:
        return StoreRefusedError(f"{self._url}: there is no such bucket; make it, or correct the address")

    def _ask(self, timeout: float, method: str, *args: Any, **options: Any) -> Any:
        """Call a method of the file system, within a timeout.

        Raises:
            FileExistsError, FileNotFoundError: the name is taken, or free.
            StoreError: anything else that can go wrong; the message says what to check.
        """
        from fsspec.asyn import sync

        try:
            return sync(self._fs.loop, getattr(self._fs, f"_{method}"), *args, timeout=timeout, **options)
        except Exception as error:  # noqa: BLE001 - foreign code; an unknown error is a bug, and is raised again
            known = self._translated(error)
            if known is None or known is error:
                raise
            # The library's message may hold addresses with secrets in them, so it is not shown.
            raise known from None

    def _translated(self, error: Exception) -> Exception | None:
        """An error of the file system as an error of a store; None if it is a bug."""
        from botocore.exceptions import ClientError  # type: ignore[import-untyped]  # it has no types

        cause = error if isinstance(error, ClientError) else error.__cause__
        if isinstance(cause, ClientError):
            status = int(cause.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
            return self._refusal(status, str(cause.response.get("Error", {}).get("Code", "")))
        if isinstance(error, (StoreError, FileExistsError, FileNotFoundError)):
            return error
        return self._failure(error)

    def _refusal(self, status: int, code: str) -> Exception:
        """The meaning of an error that the server answered."""
        said = f"{self._url}: {self._server} answers {status} {code}".rstrip()
        if status == 412:
            return FileExistsError()
        if status == 416:
            return _EmptyError()
        if code == "NoSuchBucket":
            return StoreRefusedError(
                f"{said}: there is no bucket {self._bucket}; make it, or correct distributed.repo_id or "
                "store_options.endpoint"
            )
        if status == 404:
            return FileNotFoundError()
        if code in _CLOCK:
            return StoreRefusedError(f"{said}: this machine's clock is wrong; set it")
        if code in _REGION or status == 301:
            return StoreRefusedError(
                f"{said}: the bucket lies in another region; set store_options.region or AWS_DEFAULT_REGION"
            )
        if code in _TEMPORARY or status in _TEMPORARY_STATUS:
            return StoreUnavailableError(said)
        if code in _CREDENTIALS or status in {401, 403}:
            return StoreRefusedError(
                f"{said}: check the credentials ({_CREDENTIALS_COME_FROM}), and that they may do s3:ListBucket, "
                "s3:GetObject, s3:PutObject and s3:DeleteObject there"
            )
        if status == 501:
            return StoreRefusedError(f"{said}: this server cannot create an object only where there is none")
        if status >= 500:
            return StoreUnavailableError(said)
        return StoreRefusedError(said)

    def _failure(self, error: Exception) -> StoreError | None:
        """The meaning of an error of a request that could not be made, or was not answered."""
        import aiohttp
        from botocore import exceptions, parsers  # type: ignore[import-untyped]  # it has no types

        what = type(error).__name__
        if isinstance(error, exceptions.SSLError):
            return StoreRefusedError(
                f"{self._url}: the certificate of {self._server} is not trusted here; set AWS_CA_BUNDLE, or correct "
                "store_options.endpoint"
            )
        temporary = (
            exceptions.HTTPClientError,
            exceptions.ConnectionError,
            exceptions.IncompleteReadError,
            parsers.ResponseParserError,
            aiohttp.ClientError,
        )
        if isinstance(error, temporary):
            return StoreUnavailableError(f"{self._url}: no answer from {self._server} ({what})")
        if isinstance(error, exceptions.BotoCoreError):
            return StoreRefusedError(
                f"{self._url}: the request cannot be made ({what}); check the credentials ({_CREDENTIALS_COME_FROM}), "
                "store_options.region and the name of the bucket"
            )
        if isinstance(error, PermissionError):
            return StoreRefusedError(f"{self._url}: access is denied; check the credentials and what they may do")
        if isinstance(error, TimeoutError):
            return StoreUnavailableError(f"{self._url}: no answer in time")
        if isinstance(error, OSError):
            return StoreUnavailableError(f"{self._url}: the request failed ({what})")
        return None


class _EmptyError(Exception):
    """A range was requested of an object that has no bytes."""
