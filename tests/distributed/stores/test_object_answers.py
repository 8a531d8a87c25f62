"""What the stores on obstore make of each answer of a server, and how many requests they make."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from speedtronic.distributed.stores import Store, open_store
from speedtronic.errors import StoreRefusedError, StoreUnavailableError
from tests.distributed.stores.servers import AZURITE_ACCOUNT, AZURITE_KEY
from tests.support.object_servers import KEY, Answer, GoogleStorage, Request, error, serving


class Answering(GoogleStorage):
    """Answers every request alike."""

    said: Answer | None = None
    silence: threading.Event | None = None

    def answer(self, request: Request) -> Answer:
        if self.silence is not None:
            self.silence.wait(60)
        if self.said is None:
            return super().answer(request)
        self.asked.append(request)
        return self.said


@pytest.fixture
def server() -> Answering:
    return Answering("bucket")


@pytest.fixture(params=["gs", "az"])
def store(request: pytest.FixtureRequest, server: Answering, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    monkeypatch.setenv("GOOGLE_BEARER_TOKEN", KEY)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", AZURITE_ACCOUNT)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", AZURITE_KEY)
    with serving(server) as address:
        yield open_store(f"{request.param}://bucket/run", endpoint=address)


REQUESTS: dict[str, Callable[[Store], object]] = {
    "put": lambda store: store.put_if_absent("head/1", b"x"),
    "get": lambda store: store.get("head/1", limit=10),
    "list": lambda store: store.list_after("head/"),
}


@pytest.mark.parametrize(
    ("status", "code", "says"),
    [
        (401, "AuthenticationRequired", "denies access; check the credentials .*(AZURE_STORAGE|GOOGLE_APPLICATION)"),
        (
            403,
            "AccessDenied",
            "denies access; check the credentials .*role Storage (Blob Data Contributor|Object User)",
        ),
        (404, "NoSuchBucket", "there is no such (bucket|container); make it, or correct"),
        (400, "InvalidArgument", "answers 400"),
    ],
)
def test_a_lasting_error_says_what_to_check(store: Store, server: Answering, status: int, code: str, says: str) -> None:
    for ask in REQUESTS.values():
        server.said = error(status, code)
        with pytest.raises(StoreRefusedError, match=says) as raised:
            ask(store)
        assert str(raised.value).startswith(store.url)
        assert "words of the server" not in str(raised.value)
        assert len(server.asked) == 1
        server.asked.clear()


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
@pytest.mark.parametrize("kind", REQUESTS)
def test_a_temporary_error_is_not_retried_by_the_library(
    store: Store, server: Answering, kind: str, status: int
) -> None:
    server.said = error(status, "Later")
    with pytest.raises(StoreUnavailableError, match=f"answers {status}"):
        REQUESTS[kind](store)
    assert len(server.asked) == 1


def test_a_silent_server_is_waited_for_until_the_timeout(store: Store, server: Answering) -> None:
    server.silence = threading.Event()
    with pytest.raises(StoreUnavailableError, match="no answer within"):
        store.get("head/1", limit=10, timeout=0.1)
    server.silence.set()


@pytest.mark.parametrize("store", ["gs"], indirect=True)
def test_an_object_is_created_on_condition_that_there_is_none(store: Store, server: Answering) -> None:
    assert store.put_if_absent("head/1", b"x")
    assert not store.put_if_absent("head/1", b"y")
    assert [request.headers["x-goog-if-generation-match"] for request in server.asked] == ["0", "0"]


def test_an_unreachable_server_is_temporary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOOGLE_BEARER_TOKEN", KEY)
    store = open_store("gs://bucket/run", endpoint="http://127.0.0.1:1")
    with pytest.raises(StoreUnavailableError, match="no answer from Google Cloud Storage"):
        store.get("head/1", limit=10)


def test_missing_credentials_say_where_they_come_from(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.delenv("GOOGLE_BEARER_TOKEN", raising=False)
    monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("GCE_METADATA_HOST", "GCE_METADATA_ROOT", "GCE_METADATA_IP"):
        monkeypatch.setenv(name, "127.0.0.1:1")
    store = open_store("gs://bucket/run")
    with pytest.raises(StoreRefusedError, match="there are no credentials.*GOOGLE_APPLICATION_CREDENTIALS"):
        store.put_if_absent("head/1", b"x")
