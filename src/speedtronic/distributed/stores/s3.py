"""Amazon S3, and other servers with its protocol."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any, ClassVar
from urllib.parse import urlsplit

from speedtronic.distributed.stores.base import PAGE, REQUEST_TIMEOUT, Listing, checked_prefix, expected_bytes
from speedtronic.distributed.stores.object import ObjectStore
from speedtronic.errors import MissingExtraError, StoreError, StoreRefusedError, StoreUnavailableError

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


class S3Store(ObjectStore):
    """Objects in a bucket, created with `If-None-Match: *`, also if they are sent in parts.

    A multipart upload that is given up may leave its parts in the bucket, invisible and paid for: a lifecycle rule that
    ends incomplete multipart uploads after a day removes them. Directory buckets are not supported, because they list
    names in no order.

    Args:
        bucket: its name.
        path: what the keys of this store's objects begin with, without slashes around it; may be empty.
        endpoint: address of the server, if it is not Amazon's.
        client: further arguments of `s3fs.S3FileSystem`.

    Raises:
        MissingExtraError: s3fs is not installed.
    """

    # Larger objects are sent in parts of this size, two of which are in memory at once.
    _upload_options: ClassVar[Mapping[str, Any]] = {"chunksize": 50 * 2**20, "max_concurrency": 2}

    def __init__(self, bucket: str, path: str, *, endpoint: str | None = None, **client: Any) -> None:
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
        fs = s3fs.S3FileSystem(
            endpoint_url=endpoint,
            config_kwargs=config,
            use_listings_cache=False,
            skip_instance_cache=True,
            **client,
        )
        fs.retries = 1  # `RetryingStore` is the one place of retries
        root = f"{bucket}/{path}".rstrip("/")
        super().__init__(fs, root, f"s3://{root}")
        self._bucket = bucket
        self._keys = f"{path}/" if path else ""
        self._server = "Amazon S3"
        if endpoint:  # without user and password
            parts = urlsplit(endpoint)
            self._server = f"{parts.scheme}://{parts.hostname}" + (f":{parts.port}" if parts.port else "")

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
            keys = [(f"{self._bucket}/{found['Key']}", int(found["Size"])) for found in page.get("Contents", ())]
            entries = tuple(self._entries(keys, prefix))
            more = bool(page.get("IsTruncated")) and bool(keys)
            if entries or not more:
                return Listing(entries, more)
            # All names of the page are foreign: go on to the next page.
            marker = page["Contents"][-1]["Key"].removeprefix(self._keys)

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
        try:
            return super().get(name, limit=limit, size=size, sha256=sha256, partial=partial, timeout=timeout)
        except _EmptyError:
            return expected_bytes(b"", limit, size, sha256, partial=partial)

    def close(self) -> None:
        creator = getattr(self._fs, "_s3creator", None)  # s3fs sets it with its first request
        if creator is not None:
            with suppress(TimeoutError):  # a hanging connection ends with the process
                self._await(_CONNECT_TIMEOUT, creator.__aexit__, None, None, None)

    def _translated(self, error: Exception) -> Exception | None:
        from botocore.exceptions import ClientError  # type: ignore[import-untyped]  # it has no types

        cause = error if isinstance(error, ClientError) else error.__cause__
        if isinstance(cause, ClientError):
            status = int(cause.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
            return self._refusal(status, str(cause.response.get("Error", {}).get("Code", "")))
        return self._failure(error) or super()._translated(error)

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
        return None


class _EmptyError(Exception):
    """A range was requested of an object that has no bytes."""
