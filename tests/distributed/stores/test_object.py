"""The store on a file system of fsspec that is not known better."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from speedtronic.distributed.stores import Store
from speedtronic.distributed.stores.object import ObjectStore
from speedtronic.errors import StoreRefusedError, StoreUnavailableError
from tests.distributed.stores.conformance import StoreConformance


class Exclusive(MemoryFileSystem):
    """Looks whether a name is free and takes it in one step, as object storage does."""

    lock = threading.Lock()

    def pipe_file(self, *args: object, **options: object) -> None:
        with self.lock:
            super().pipe_file(*args, **options)


class TestObjectStore(StoreConformance):
    @pytest.fixture
    def store(self) -> Iterator[Store]:
        fs = Exclusive(skip_instance_cache=True)
        yield ObjectStore(fs, "/bucket/run", "memory-of-fsspec://bucket/run")
        MemoryFileSystem.store.clear()
        MemoryFileSystem.pseudo_dirs[:] = [""]


class Failing(MemoryFileSystem):
    """A file system whose every call raises."""

    cachable = False

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def pipe_file(self, *args: object, **options: object) -> None:
        raise self.error

    cat_file = find = rm_file = pipe_file


class HttpError(Exception):
    """As gcsfs has it."""

    def __init__(self, code: int | str) -> None:
        super().__init__("secret")
        self.code = code


NoCredentials = type("DefaultCredentialsError", (Exception,), {"__module__": "google.auth.exceptions"})
Disconnected = type("ServerDisconnectedError", (Exception,), {"__module__": "aiohttp.client_exceptions"})


@pytest.mark.parametrize(
    ("error", "kind", "says"),
    [
        (HttpError(503), StoreUnavailableError, "the request failed \\(503\\)"),
        (HttpError("429"), StoreUnavailableError, "the request failed \\(429\\)"),
        (HttpError(401), StoreRefusedError, "access is denied"),
        (HttpError(400), StoreRefusedError, "cannot do what is asked of it"),
        (OSError("Forbidden: secret"), StoreRefusedError, "access is denied"),
        (NoCredentials("secret"), StoreRefusedError, "access is denied"),
        (Disconnected("secret"), StoreUnavailableError, "ServerDisconnectedError"),
        (PermissionError("secret"), StoreRefusedError, "access is denied; check the credentials"),
        (NotImplementedError("secret"), StoreRefusedError, "this file system cannot do what is asked of it"),
        (TypeError("secret"), StoreRefusedError, "pipe_file"),
        (TimeoutError("secret"), StoreUnavailableError, "no answer in time"),
        (ConnectionResetError("secret"), StoreUnavailableError, "ConnectionResetError"),
        (OSError(5, "secret"), StoreUnavailableError, "the request failed"),
        (KeyError("a bug"), KeyError, "a bug"),
    ],
)
def test_library_errors_become_store_errors(error: Exception, kind: type[Exception], says: str) -> None:
    store = ObjectStore(Failing(error), "bucket", "fake://bucket")
    with pytest.raises(kind, match=says) as raised:
        store.put_if_absent("head/1", b"x")
    assert "secret" not in str(raised.value)
    with pytest.raises(kind, match=says):
        store.get("head/1", limit=1)
    with pytest.raises(kind, match=says):
        store.list_after("head/")
    with pytest.raises(kind, match=says):
        store.delete("head/1")


def test_a_creation_in_a_missing_bucket_is_refused() -> None:
    store = ObjectStore(Failing(FileNotFoundError()), "bucket", "fake://bucket")
    with pytest.raises(StoreRefusedError, match="fake://bucket: there is no such bucket"):
        store.put_if_absent("head/1", b"x")
    assert store.list_after("head/").entries == ()
