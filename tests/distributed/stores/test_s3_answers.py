"""What the S3 store makes of each answer of a server, and how many requests it makes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from speedtronic.distributed.stores import Store, open_store
from speedtronic.errors import StoreRefusedError, StoreUnavailableError

SECRET = "very-secret-key"
KEY = "AKIDEXAMPLE"


@dataclass
class Answers:
    """A server's side: what it answers next, and what it was asked."""

    status: int = 200
    code: str = ""
    body: bytes = b""
    bodies: list[bytes] = field(default_factory=list)  # one for each request, before `body`
    promised: int | None = None  # bytes that Content-Length says, where that is not the body's
    silence: threading.Event | None = None  # waited for before the answer
    asked: list[tuple[str, str]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    port: int = 0

    def content(self) -> bytes:
        error = f"<Error><Code>{self.code}</Code><Message>words of the server {SECRET}</Message></Error>"
        if self.code:
            return error.encode()
        return self.bodies.pop(0) if self.bodies else self.body


def handler_of(answers: Answers) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self) -> None:
            answers.asked.append((self.command, self.path))
            answers.headers.append(dict(self.headers.items()))
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if answers.silence is not None:
                answers.silence.wait(60)
            content = answers.content()
            self.send_response(answers.status)
            self.send_header("Content-Length", str(answers.promised or len(content)))
            self.end_headers()
            self.wfile.write(content)
            self.close_connection = answers.promised is not None

        do_GET = do_PUT = do_DELETE = do_HEAD = do_POST = answer  # noqa: N815 - names that the library looks for

        def log_message(self, *words: object) -> None:
            """Nothing is said."""

    return Handler


class Server(ThreadingHTTPServer):
    def handle_error(self, request: object, client_address: object) -> None:
        """A client that went away is what some of the tests are about."""


@pytest.fixture(scope="module")
def server() -> Iterator[Answers]:
    answers = Answers()
    with Server(("127.0.0.1", 0), handler_of(answers)) as listening:
        answers.port = listening.server_address[1]
        thread = threading.Thread(target=listening.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield answers
        listening.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def client(server: Answers) -> Iterator[Store]:
    address = f"http://127.0.0.1:{server.port}"
    store = open_store("s3://bucket/run", endpoint=address, region="us-east-1", key=KEY, secret=SECRET)
    yield store
    store.close()


@pytest.fixture
def answers(server: Answers) -> Answers:
    fresh = Answers(port=server.port)
    server.__dict__.update(fresh.__dict__)
    return server


REQUESTS: dict[str, Callable[[Store], object]] = {
    "put": lambda store: store.put_if_absent("head/1", b"x"),
    "get": lambda store: store.get("head/1", limit=10),
    "list": lambda store: store.list_after("head/"),
    "delete": lambda store: store.delete("head/1"),
}
WILL_NOT_PASS = [
    (401, "Unauthorized", "check the credentials"),
    (403, "AccessDenied", "check the credentials.*AWS_ACCESS_KEY_ID.*store_options.profile.*s3:PutObject"),
    (403, "SignatureDoesNotMatch", "check the credentials"),
    (400, "ExpiredToken", "check the credentials"),
    (403, "RequestTimeTooSkewed", "clock"),
    (404, "NoSuchBucket", "there is no bucket bucket; make it, or correct"),
    (400, "AuthorizationHeaderMalformed", "set store_options.region"),
    (501, "NotImplemented", "cannot create an object only where there is none"),
    (400, "InvalidRequest", "answers 400 InvalidRequest"),
]
CAN_PASS = [
    (500, "InternalError"),
    (502, "BadGateway"),
    (503, "SlowDown"),
    (503, "ServiceUnavailable"),
    (504, "GatewayTimeout"),
    (429, "TooManyRequests"),
    (400, "IncompleteBody"),
    (409, "ConditionalRequestConflict"),
]


@pytest.mark.parametrize(("status", "code", "says"), WILL_NOT_PASS)
@pytest.mark.parametrize("kind", REQUESTS)
def test_a_lasting_error_says_what_to_check(
    client: Store, answers: Answers, kind: str, status: int, code: str, says: str
) -> None:
    answers.status, answers.code = status, code
    with pytest.raises(StoreRefusedError, match=says) as raised:
        REQUESTS[kind](client)
    assert str(raised.value).startswith(f"s3://bucket/run: http://127.0.0.1:{answers.port} answers {status} {code}")
    assert SECRET not in str(raised.value)
    assert KEY not in str(raised.value)
    assert raised.value.__suppress_context__, "what the library says is not shown"
    assert len(answers.asked) == 1


@pytest.mark.parametrize(("status", "code"), CAN_PASS)
@pytest.mark.parametrize("kind", REQUESTS)
def test_a_temporary_error_is_not_retried_by_the_library(
    client: Store, answers: Answers, kind: str, status: int, code: str
) -> None:
    answers.status, answers.code = status, code
    with pytest.raises(StoreUnavailableError, match=f"answers {status} {code}"):
        REQUESTS[kind](client)
    assert len(answers.asked) == 1


def test_a_server_timeout_is_temporary(client: Store, answers: Answers) -> None:
    answers.status, answers.code = 400, "RequestTimeout"
    with pytest.raises(StoreUnavailableError, match="no answer in time"):
        client.put_if_absent("head/1", b"x")


def test_an_object_is_created_on_condition_that_there_is_none(client: Store, answers: Answers) -> None:
    assert client.put_if_absent("head/1", b"x")
    assert [(method, path.partition("?")[0]) for method, path in answers.asked] == [("PUT", "/bucket/run/head/1")]
    assert answers.headers[0]["If-None-Match"] == "*"
    answers.status, answers.code = 412, "PreconditionFailed"
    assert not client.put_if_absent("head/1", b"x")


def test_a_missing_object_is_told_apart_from_a_missing_bucket(client: Store, answers: Answers) -> None:
    answers.status, answers.code = 404, "NoSuchKey"
    assert client.get("head/1", limit=10) is None
    client.delete("head/1")


def test_a_listing_that_is_not_found_means_a_missing_bucket(client: Store, answers: Answers) -> None:
    answers.status, answers.code = 404, "NotFound"
    with pytest.raises(StoreRefusedError, match="no such bucket"):
        client.list_after("head/")
    with pytest.raises(StoreRefusedError, match="no such bucket"):
        client.put_if_absent("head/1", b"x")


def test_a_page_of_foreign_keys_is_skipped(client: Store, answers: Answers) -> None:
    key = "<Contents><Key>run/head/{}</Key><Size>7</Size></Contents>"
    page = "<ListBucketResult><IsTruncated>{}</IsTruncated>{}</ListBucketResult>"
    bodies = [page.format("true", key.format(".foreign")), page.format("false", key.format("1") + key.format("a b"))]
    answers.bodies = [body.encode() for body in bodies]
    assert client.list_after("head/") == ((("head/1", 7),), False)
    assert "start-after=run%2Fhead%2F.foreign" in answers.asked[1][1]


def test_at_most_one_byte_above_the_limit_is_requested(client: Store, answers: Answers) -> None:
    answers.body = b"x" * 11
    assert client.get("head/1", limit=10) is None
    assert client.get("head/1", limit=1000, size=4) is None
    assert [headers["Range"] for headers in answers.headers] == ["bytes=0-10", "bytes=0-4"]


def test_a_poll_is_one_request_that_begins_after_the_marker(client: Store, answers: Answers) -> None:
    answers.body = (
        b"<ListBucketResult><IsTruncated>false</IsTruncated><Contents><Key>run/head/00004999.json</Key>"
        b"<Size>7</Size></Contents></ListBucketResult>"
    )
    assert client.list_after("head/", "head/00004998.json") == ((("head/00004999.json", 7),), False)
    ((method, path),) = answers.asked
    assert method == "GET"
    assert "start-after=run%2Fhead%2F00004998.json" in path
    assert "prefix=run%2Fhead%2F" in path


def test_a_silent_server_is_waited_for_until_the_timeout(client: Store, answers: Answers) -> None:
    answers.silence = threading.Event()
    with pytest.raises(StoreUnavailableError, match="no answer"):
        client.get("head/1", limit=10, timeout=0.1)
    answers.silence.set()


@pytest.mark.parametrize("kind", ["get", "list"])
def test_an_interrupted_answer_is_temporary(client: Store, answers: Answers, kind: str) -> None:
    answers.body, answers.promised = b"x", 5
    with pytest.raises(StoreUnavailableError, match="no answer from"):
        REQUESTS[kind](client)


def test_an_unreachable_server_is_temporary(answers: Answers) -> None:
    store = open_store("s3://bucket/run", endpoint="http://127.0.0.1:1", region="us-east-1", key=KEY, secret=SECRET)
    with pytest.raises(StoreUnavailableError, match=r"no answer from http://127\.0\.0\.1:1"):
        store.get("head/1", limit=10)
    store.close()


def test_missing_credentials_say_where_they_come_from(answers: Answers, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, "/nonexistent")
    store = open_store("s3://bucket/run", endpoint=f"http://127.0.0.1:{answers.port}", region="us-east-1")
    with pytest.raises(StoreRefusedError, match="NoCredentialsError.*AWS_ACCESS_KEY_ID"):
        store.get("head/1", limit=10)
    store.close()
    with pytest.raises(StoreRefusedError, match="ProfileNotFound.*AWS_PROFILE or store_options.profile"):
        open_store("s3://bucket/run", profile="no-such-profile", region="us-east-1").get("head/1", limit=10)
    assert answers.asked == []


def test_an_address_with_secrets_is_used_and_never_shown(answers: Answers) -> None:
    answers.status, answers.code = 403, "AccessDenied"
    store = open_store(
        f"s3://{KEY}:{SECRET}@bucket/run", endpoint=f"http://127.0.0.1:{answers.port}", region="us-east-1"
    )
    assert store.url == "s3://bucket/run"
    with pytest.raises(StoreRefusedError) as raised:
        store.get("head/1", limit=10)
    assert SECRET not in str(raised.value)
    assert KEY in answers.headers[0]["Authorization"]
    store.close()
