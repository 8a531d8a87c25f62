"""Azure Blob Storage and Google Cloud Storage, through obstore."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

from speedtronic.distributed.stores.base import (
    PAGE,
    REQUEST_TIMEOUT,
    Buffer,
    Entry,
    Listing,
    checked_name,
    checked_prefix,
    expected_bytes,
    first_page,
    is_name,
)
from speedtronic.distributed.stores.timeouts import BoundedCalls
from speedtronic.errors import MissingExtraError, StoreRefusedError, StoreUnavailableError

if TYPE_CHECKING:
    from obstore.store import AzureStore, GCSStore

_CONNECT_TIMEOUT = timedelta(seconds=15)
_SILENCE = timedelta(seconds=60)  # without a byte, after which a connection is given up
_LONGEST = timedelta(days=1)  # of one request; each has a timeout of its own, by its size
_CHUNK = 2**20  # bytes of an object that is too long to be read whole

_TEMPORARY = {408, 425, 429, *range(500, 600)}  # statuses of HTTP
_STATUS = re.compile(r"(?:status code|error response): ([1-5][0-9]{2})\b")
_NO_PLACE = ("ContainerNotFound", "NoSuchBucket", "bucket does not exist")
# Where there are no keys, obstore looks for those that Azure and Google give to their own machines.
_NO_KEYS = ("token request", "metadata.google.internal", "169.254.169.254", "MissingCredential")


class Service(NamedTuple):
    """What a user has to know of a service to repair an error.

    Attributes:
        name: what people call it.
        place: what it calls a bucket.
        credentials: where credentials come from.
        rights: what they must be allowed to do.
    """

    name: str
    place: str
    credentials: str
    rights: str


AZURE = Service(
    "Azure Blob Storage",
    "container",
    "AZURE_STORAGE_ACCOUNT_KEY, AZURE_STORAGE_SAS_KEY, AZURE_CLIENT_ID with AZURE_CLIENT_SECRET and AZURE_TENANT_ID, "
    "or the identity of the machine",
    "the role Storage Blob Data Contributor on the container",
)
GOOGLE = Service(
    "Google Cloud Storage",
    "bucket",
    "GOOGLE_APPLICATION_CREDENTIALS, the login of gcloud, or the identity of the machine",
    "the role Storage Object User on the bucket",
)


class ObjectStore:
    """Objects in a container of Azure or in a bucket of Google, each created by one request and only if it is new.

    Azure's condition is `If-None-Match: *` on Put Blob, up to 5000 MiB; Google's `x-goog-if-generation-match: 0`.

    Args:
        client: a store of obstore for the container or the bucket, which makes no request again.
        path: what the names of this store's objects begin with, without slashes around it; may be empty.
        url: for messages, without secrets.
        service: which one it is.
    """

    def __init__(self, client: AzureStore | GCSStore, path: str, url: str, service: Service) -> None:
        self._client = client
        self._path = f"{path}/" if path else ""
        self._url = url
        self._service = service
        self._calls = BoundedCalls(url)

    @property
    def url(self) -> str:
        return self._url

    def put_if_absent(self, name: str, data: Buffer, *, timeout: float = REQUEST_TIMEOUT) -> bool:
        import obstore

        path = self._path + checked_name(name)
        try:
            self._ask(timeout, lambda: obstore.put(self._client, path, data, mode="create", use_multipart=False))
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
        path = self._path + checked_name(name)
        most = limit if size is None else min(limit, size)
        try:
            data = self._ask(timeout, lambda: self._read(path, most, partial=partial))
        except FileNotFoundError:
            return None
        return expected_bytes(data, limit, size, sha256, partial=partial)

    def _read(self, path: str, most: int, *, partial: bool) -> bytes | None:
        """An object; where it is longer than `most`, None, or with `partial` its first bytes."""
        import obstore

        answer = obstore.get(self._client, path)
        if answer.meta["size"] <= most:
            return bytes(answer.bytes())
        if not partial:
            return None
        begun = bytearray()
        for chunk in answer.stream(min_chunk_size=_CHUNK):
            begun += chunk
            if len(begun) > most:
                break
        return bytes(begun)

    def list_after(self, prefix: str, marker: str = "", *, timeout: float = REQUEST_TIMEOUT) -> Listing:
        """As every store does. Google begins after the marker; Azure may list what comes before it too."""
        checked_prefix(prefix)
        try:
            listing: Listing = self._ask(timeout, lambda: first_page(self._entries(prefix, marker)))
        except FileNotFoundError:
            raise self._no_such_place() from None
        return listing

    def _entries(self, prefix: str, marker: str) -> Iterator[Entry]:
        import obstore

        # Both services list by whole names, in the order of their bytes. obstore takes folders alone as prefixes, and
        # begins after a name: everything with the prefix comes after the prefix without its last letter.
        folder = prefix.rpartition("/")[0]
        after = self._path + max(marker, prefix[:-1])
        pages = obstore.list(
            self._client, prefix=(self._path + folder).rstrip("/") or None, offset=after or None, chunk_size=PAGE
        )
        for page in pages:
            for found in page:
                name = str(found["path"]).removeprefix(self._path)
                if name > prefix and not name.startswith(prefix):
                    return
                if is_name(name) and name.startswith(prefix) and name > marker:
                    yield Entry(name, int(found["size"]))

    def delete(self, name: str, *, timeout: float = REQUEST_TIMEOUT) -> None:
        import obstore

        path = self._path + checked_name(name)
        with suppress(FileNotFoundError):
            self._ask(timeout, lambda: obstore.delete(self._client, path))

    def close(self) -> None:
        """Nothing to close: obstore ends its connections with the object."""

    def _no_such_place(self) -> StoreRefusedError:
        place = self._service.place
        return StoreRefusedError(f"{self._url}: there is no such {place}; make it, or correct distributed.repo_id")

    def _ask(self, timeout: float, call: Callable[[], Any]) -> Any:
        """The result of a call, within a timeout.

        Raises:
            FileExistsError, FileNotFoundError: the name is taken, or free.
            StoreError: anything else that can go wrong; the message says what to check.
        """
        from obstore import exceptions

        try:
            return self._calls.within(timeout, call)
        except (exceptions.AlreadyExistsError, exceptions.PreconditionError):
            raise FileExistsError from None
        except (FileNotFoundError, exceptions.NotFoundError) as error:
            if any(word in str(error) for word in _NO_PLACE):
                raise self._no_such_place() from None
            raise FileNotFoundError from None
        except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError):
            raise self._denied() from None
        except exceptions.BaseError as error:
            # What obstore says may hold addresses with secrets in them, so it is not shown.
            raise self._failure(str(error)) from None

    def _denied(self) -> StoreRefusedError:
        service = self._service
        return StoreRefusedError(
            f"{self._url}: {service.name} denies access; check the credentials ({service.credentials}), and that they "
            f"have {service.rights}"
        )

    def _failure(self, said: str) -> StoreRefusedError | StoreUnavailableError:
        """The meaning of an error for which obstore has no class: it says the status, if there was an answer."""
        found = _STATUS.search(said)
        if any(word in said for word in _NO_KEYS):
            return StoreRefusedError(
                f"{self._url}: there are no credentials for {self._service.name}; they come from "
                f"{self._service.credentials}"
            )
        if found is None:
            return StoreUnavailableError(f"{self._url}: no answer from {self._service.name}")
        status = int(found[1])
        if status == 404:
            return self._no_such_place()
        if status in _TEMPORARY:
            return StoreUnavailableError(f"{self._url}: {self._service.name} answers {status}")
        if status in {401, 403}:
            return self._denied()
        return StoreRefusedError(f"{self._url}: {self._service.name} answers {status}")


def open_azure(container: str, path: str, *, account: str | None, endpoint: str | None, url: str) -> ObjectStore:
    """A container of Azure. Credentials come from the environment.

    Args:
        account: of the storage; None: that of the environment.
        endpoint: address of the server, with the account in it, if it is not Azure's.

    Raises:
        MissingExtraError: obstore is not installed.
        StoreRefusedError: it cannot be opened, as where no account is named.
    """
    try:
        from obstore.store import AzureStore
    except ImportError as error:
        raise MissingExtraError("a store on Azure needs obstore; install speedtronic[azure]") from error
    config: dict[str, Any] = {}
    if account is not None:
        config["account_name"] = account
    if endpoint is not None:
        config["endpoint"] = endpoint
    try:
        client = AzureStore(container, client_options=_client_options(endpoint), retry_config=_NO_RETRIES, **config)
    except Exception as error:  # noqa: BLE001 - foreign code, and its message may hold secrets
        raise StoreRefusedError(
            f"{url}: cannot be opened ({type(error).__name__}); name the account in store_options.account or "
            f"AZURE_STORAGE_ACCOUNT_NAME, and check the credentials ({AZURE.credentials})"
        ) from None
    return ObjectStore(client, path, url, AZURE)


def open_google(bucket: str, path: str, *, endpoint: str | None, url: str) -> ObjectStore:
    """A bucket of Google. Credentials come from the environment.

    Args:
        endpoint: address of the server, if it is not Google's.

    Raises:
        MissingExtraError: obstore is not installed.
        StoreRefusedError: it cannot be opened.
    """
    try:
        from obstore.store import GCSStore
    except ImportError as error:
        raise MissingExtraError("a store on Google Cloud needs obstore; install speedtronic[gcs]") from error
    config: dict[str, Any] = {} if endpoint is None else {"base_url": endpoint}
    try:
        client = GCSStore(bucket, client_options=_client_options(endpoint), retry_config=_NO_RETRIES, **config)
    except Exception as error:  # noqa: BLE001 - foreign code, and its message may hold secrets
        raise StoreRefusedError(
            f"{url}: cannot be opened ({type(error).__name__}); check the credentials ({GOOGLE.credentials})"
        ) from None
    return ObjectStore(client, path, url, GOOGLE)


_NO_RETRIES: Any = {"max_retries": 0, "retry_timeout": _LONGEST}  # `RetryingStore` is the one place of retries


def _client_options(endpoint: str | None) -> Any:
    return {
        "connect_timeout": _CONNECT_TIMEOUT,
        "read_timeout": _SILENCE,
        "timeout": _LONGEST,
        "allow_http": endpoint is not None and endpoint.startswith("http://"),
    }
