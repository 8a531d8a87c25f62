"""Servers for object storage that has no emulator: the Hub's gateway for S3, and Google's interface for XML.

Each does what its public documentation promises, and refuses the rest. What a client asked of it is kept.

https://huggingface.co/docs/hub/storage-buckets-s3
https://cloud.google.com/storage/docs/xml-api/put-object-upload
"""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Mapping
from contextlib import AbstractContextManager
from http.server import BaseHTTPRequestHandler
from typing import NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

from tests.support.loopback import LoopbackServer, address_of

KEY = "HFAKtesting"
_RANGE = re.compile(r"bytes=(\d+)-(\d+)")


class Answer(NamedTuple):
    status: int
    body: bytes = b""
    headers: Mapping[str, str] = {}


class Request(NamedTuple):
    method: str
    path: str  # without the query
    query: dict[str, str]
    headers: Mapping[str, str]
    body: bytes


def error(status: int, code: str) -> Answer:
    return Answer(status, f"<Error><Code>{code}</Code><Message>words of the server</Message></Error>".encode())


class ObjectServer:
    """Objects of some buckets, in memory.

    Attributes:
        objects: by bucket and key.
        asked: every request, in order.
    """

    base = ""  # of all paths

    def __init__(self, *buckets: str) -> None:
        self.objects: dict[str, dict[str, bytes]] = {bucket: {} for bucket in buckets}
        self.asked: list[Request] = []
        self._lock = threading.Lock()

    def answer(self, request: Request) -> Answer:
        with self._lock:
            self.asked.append(request)
            if (refusal := self.refusal(request)) is not None:
                return refusal
            bucket, _, key = unquote(request.path).removeprefix(self.base).lstrip("/").partition("/")
            if bucket not in self.objects:
                return error(404, "NoSuchBucket")
            objects = self.objects[bucket]
            match request.method:
                case "GET" if not key:
                    return self._list(bucket, request.query)
                case "GET":
                    return self._get(objects.get(key), request.headers.get("range"))
                case "PUT":
                    if self.is_exclusive(request) and key in objects:
                        return error(412, "PreconditionFailed")
                    objects[key] = request.body
                    return Answer(200, headers={"ETag": etag(request.body), "x-goog-generation": "1"})
                case "DELETE":
                    return self._delete(objects, key)
            return error(501, "NotImplemented")

    def refusal(self, request: Request) -> Answer | None:
        """What this service does not do."""
        raise NotImplementedError

    def is_exclusive(self, request: Request) -> bool:
        raise NotImplementedError

    def _delete(self, objects: dict[str, bytes], key: str) -> Answer:
        objects.pop(key, None)
        return Answer(204)

    def _get(self, data: bytes | None, wanted: str | None) -> Answer:
        if data is None:
            return error(404, "NoSuchKey")
        about = {"ETag": etag(data), "Last-Modified": "Tue, 01 Dec 2026 00:00:00 GMT", "x-goog-generation": "1"}
        match = _RANGE.fullmatch(wanted or "")
        if match is None:
            return Answer(200, data, about)
        begin, end = int(match[1]), min(int(match[2]), len(data) - 1)
        if begin >= len(data):
            return error(416, "InvalidRange")
        return Answer(206, data[begin : end + 1], {**about, "Content-Range": f"bytes {begin}-{end}/{len(data)}"})

    def _list(self, bucket: str, query: Mapping[str, str]) -> Answer:
        after = query.get("continuation-token") or query.get("start-after") or ""
        found = sorted(key for key in self.objects[bucket] if key.startswith(query.get("prefix", "")) and key > after)
        page = found[: int(query.get("max-keys", 1000))]
        more = len(found) > len(page)
        entries = "".join(
            f"<Contents><Key>{escape(key)}</Key><LastModified>2026-12-01T00:00:00.000Z</LastModified>"
            f"<ETag>{escape(etag(self.objects[bucket][key]))}</ETag><Size>{len(self.objects[bucket][key])}</Size>"
            "<StorageClass>STANDARD</StorageClass></Contents>"
            for key in page
        )
        token = f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>" if more else ""
        return Answer(
            200,
            f"<ListBucketResult><Name>{bucket}</Name><KeyCount>{len(page)}</KeyCount>"
            f"<IsTruncated>{str(more).lower()}</IsTruncated>{token}{entries}</ListBucketResult>".encode(),
            {"Content-Type": "application/xml"},
        )


def etag(data: bytes) -> str:
    return f'"{hashlib.md5(data).hexdigest()}"'


class HubGateway(ObjectServer):
    """The gateway to the storage buckets of one namespace on the Hub, with its limits.

    Buckets are parts of the path; the region is `us-east-1`; PutObject obeys conditions and GetObject does not know
    them; nothing is promised of uploads in parts, nor of checksums in trailers, and there is no user metadata.
    """

    base = "/namespace"

    def refusal(self, request: Request) -> Answer | None:
        headers = request.headers
        if not request.path.startswith(f"{self.base}/"):
            return error(404, "NoSuchBucket")
        if f"Credential={KEY}/" not in headers.get("authorization", ""):
            return error(403, "InvalidAccessKeyId")
        if "/us-east-1/s3/aws4_request" not in headers["authorization"]:
            return error(400, "AuthorizationHeaderMalformed")
        if "aws-chunked" in headers.get("content-encoding", "") or "x-amz-trailer" in headers:
            return error(501, "NotImplemented")
        if any(name.startswith(("x-amz-meta-", "x-amz-checksum-", "x-amz-sdk-checksum-")) for name in headers):
            return error(501, "NotImplemented")
        if request.method == "GET" and any(name.startswith("if-") for name in headers):
            return error(501, "NotImplemented")
        if request.method == "POST" or "uploadId" in request.query or "uploads" in request.query:
            return error(501, "NotImplemented")
        return None

    def is_exclusive(self, request: Request) -> bool:
        return request.headers.get("if-none-match") == "*"


class GoogleStorage(ObjectServer):
    """Google Cloud Storage as its XML interface describes it, of which conditions are a part."""

    def refusal(self, request: Request) -> Answer | None:
        if request.headers.get("authorization") != f"Bearer {KEY}":
            return error(401, "AuthenticationRequired")
        return error(501, "NotImplemented") if request.method == "POST" else None

    def is_exclusive(self, request: Request) -> bool:
        return request.headers.get("x-goog-if-generation-match") == "0"

    def _delete(self, objects: dict[str, bytes], key: str) -> Answer:
        if key not in objects:
            return error(404, "NoSuchKey")
        return super()._delete(objects, key)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = 2**16  # an answer is sent at once: in two pieces it would wait for an acknowledgement of the first
    server: _Server

    def handle_expect_100(self) -> bool:
        wanted = super().handle_expect_100()
        self.wfile.flush()
        return wanted

    def respond(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(parts.query, keep_blank_values=True).items()}
        headers = {name.lower(): value for name, value in self.headers.items()}
        answer = self.server.objects.answer(Request(self.command, parts.path, query, headers, body))
        self.send_response(answer.status)
        for name, value in answer.headers.items():
            self.send_header(name, value)
        if answer.status != 204:
            self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()
        self.wfile.write(answer.body)

    do_GET = do_PUT = do_DELETE = do_HEAD = do_POST = respond  # noqa: N815 - names that the library looks for

    def log_message(self, *words: object) -> None:
        """Nothing is said."""


class _Server(LoopbackServer):
    def __init__(self, objects: ObjectServer) -> None:
        super().__init__(_Handler)
        self.objects = objects


def serving(objects: ObjectServer) -> AbstractContextManager[str]:
    """The address of a server of these objects."""
    return address_of(_Server(objects))
