"""Amazon S3, and servers that speak its protocol."""

from __future__ import annotations

from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from speedtronic.distributed.stores.base import PAGE, REQUEST_TIMEOUT, Listing, checked_prefix, expected_bytes
from speedtronic.distributed.stores.object import ObjectStore
from speedtronic.errors import MissingExtraError, StoreError, StoreRefusedError, StoreUnavailableError

_CONNECT_TIMEOUT = 15.0  # seconds
_SILENCE = 60.0  # seconds without a byte after which a connection is given up
# Larger objects are sent in parts of this size, of which so many are on their way and in memory at once.
_PART = 50 * 2**20
_PARTS_AT_ONCE = 2

# https://docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html
_CREDENTIALS = {"ExpiredToken", "InvalidToken", "InvalidAccessKeyId", "SignatureDoesNotMatch", "TokenRefreshRequired"}
_CLOCK = {"RequestTimeTooSkewed"}
_REGION = {"AuthorizationHeaderMalformed", "PermanentRedirect", "IllegalLocationConstraintException"}
_CAN_PASS = {"RequestTimeout", "IncompleteBody", "BadDigest", "SlowDown", "XAmzContentSHA256Mismatch"}
# 409: another creation of the same name is under way, and may yet fail.
_CAN_PASS_STATUS = {408, 409, 425, 429}
_CREDENTIALS_COME_FROM = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE or store_options.profile"


class S3Store(ObjectStore):
    """Objects in a bucket, created with `If-None-Match: *`, also where they are sent in parts.

    An upload in parts that is given up may leave its parts in the bucket, invisible and paid for: a lifecycle rule that
    ends incomplete multipart uploads after a day removes them. The names of a directory bucket are listed in no order,
    so those buckets do not do.

    Args:
        bucket: its name.
        path: what the keys of this store's objects begin with, without slashes around it; may be empty.
        endpoint: address of the server, where it is not Amazon's.
        client: further arguments of `s3fs.S3FileSystem`.

    Raises:
        MissingExtraError: s3fs is not installed.
    """

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
        self._server = _shown(endpoint) if endpoint else "Amazon S3"

    def list_after(self, prefix: str, marker: str = "", *, timeout: float = REQUEST_TIMEOUT) -> Listing:
        """As every store does; one request, however much comes before the marker."""
        checked_prefix(prefix)
        while True:
            page = self._page(prefix, marker, timeout)
            keys = [(f"{self._bucket}/{found['Key']}", int(found["Size"])) for found in page.get("Contents", ())]
            entries = tuple(self._entries(keys, prefix))
            more = bool(page.get("IsTruncated")) and bool(keys)
            if entries or not more:
                return Listing(entries, more)
            marker = page["Contents"][-1]["Key"].removeprefix(self._keys)  # a page of what is no object of ours

    def _page(self, prefix: str, marker: str, timeout: float) -> dict[str, Any]:
        after = {"StartAfter": self._keys + marker} if marker else {}
        try:
            page: dict[str, Any] = self._ask(
                timeout,
                "call_s3",
                "list_objects_v2",
                Bucket=self._bucket,
                Prefix=self._keys + prefix,
                MaxKeys=PAGE,
                **after,
            )
        except FileNotFoundError:
            raise self._no_such_place() from None
        return page

    def get(
        self,
        name: str,
        *,
        limit: int,
        size: int | None = None,
        sha256: str | None = None,
        timeout: float = REQUEST_TIMEOUT,
    ) -> bytes | None:
        try:
            return super().get(name, limit=limit, size=size, sha256=sha256, timeout=timeout)
        except _EmptyError:
            return expected_bytes(b"", limit, size, sha256)

    def close(self) -> None:
        creator = getattr(self._fs, "_s3creator", None)  # s3fs sets it with its first request
        if creator is not None:
            with suppress(TimeoutError):  # a connection that hangs ends with the process
                self._await(_CONNECT_TIMEOUT, creator.__aexit__, None, None, None)

    def _known(self, error: Exception) -> Exception | None:
        response = _response(error)
        if response is not None:
            status = int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
            return self._answered(status, str(response.get("Error", {}).get("Code", "")))
        return self._unanswered(error) or super()._known(error)

    def _answered(self, status: int, code: str) -> Exception:
        """What the server's refusal of a request means."""
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
        if code in _CAN_PASS or status in _CAN_PASS_STATUS:
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

    def _unanswered(self, error: Exception) -> StoreError | None:
        """What it means that a request could not be made, or was not answered."""
        import aiohttp
        from botocore import exceptions, parsers  # type: ignore[import-untyped]  # it has no types

        what = type(error).__name__
        if isinstance(error, exceptions.SSLError):
            return StoreRefusedError(
                f"{self._url}: the certificate of {self._server} is not trusted here; set AWS_CA_BUNDLE, or correct "
                "store_options.endpoint"
            )
        can_pass = (
            exceptions.HTTPClientError,
            exceptions.ConnectionError,
            exceptions.IncompleteReadError,
            parsers.ResponseParserError,
            aiohttp.ClientError,
        )
        if isinstance(error, can_pass):
            return StoreUnavailableError(f"{self._url}: no answer from {self._server} ({what})")
        if isinstance(error, exceptions.BotoCoreError):
            return StoreRefusedError(
                f"{self._url}: the request cannot be made ({what}); check the credentials ({_CREDENTIALS_COME_FROM}), "
                "store_options.region and the name of the bucket"
            )
        return None

    def _upload_options(self) -> dict[str, Any]:
        return {"chunksize": _PART, "max_concurrency": _PARTS_AT_ONCE}


class _EmptyError(Exception):
    """A part was asked for of an object that has no bytes."""


def _response(error: BaseException) -> dict[str, Any] | None:
    """What the server answered, where an error of s3fs has that behind it."""
    from botocore.exceptions import ClientError  # type: ignore[import-untyped]  # it has no types

    behind = error if isinstance(error, ClientError) else error.__cause__
    return dict(behind.response) if isinstance(behind, ClientError) else None


def _shown(endpoint: str) -> str:
    """An address without user and password."""
    parts = urlsplit(endpoint)
    return f"{parts.scheme}://{parts.hostname}" + (f":{parts.port}" if parts.port else "")
