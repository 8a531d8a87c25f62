"""A server of HTTP that passes requests on to another one, and lets some of them fail. It keeps what was asked."""

from __future__ import annotations

import http.client
import random
import threading
from contextlib import AbstractContextManager
from http.server import BaseHTTPRequestHandler
from typing import NamedTuple
from urllib.parse import urlsplit

from tests.support.loopback import LoopbackServer, address_of

_OF_A_CONNECTION = {"connection", "keep-alive", "transfer-encoding", "content-length", "expect"}


class Asked(NamedTuple):
    method: str
    target: str


class FaultyProxy:
    """A proxy in front of an address.

    Args:
        address: of the server.
        failing: share of the requests that fail: half of them before they reach the server, half after they took
            effect there. Half of each are answered with 503, of the others the connection is closed.
        seed: of what is drawn. Which request meets which fault depends on their order.

    Attributes:
        asked: every request, in order.
        failed: how many failed.
    """

    def __init__(self, address: str, *, failing: float = 0.0, seed: int = 0) -> None:
        self.host = urlsplit(address).netloc
        self.failing = failing
        self.asked: list[Asked] = []
        self.failed = 0
        self._random = random.Random(seed)
        self._lock = threading.Lock()

    def drawn(self, asked: Asked) -> tuple[bool, bool, bool]:
        """Whether a request fails, whether before it took effect, and whether with an answer."""
        with self._lock:
            self.asked.append(asked)
            fails = self._random.random() < self.failing
            self.failed += fails
            return fails, self._random.random() < 0.5, self._random.random() < 0.5


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = 2**16  # an answer is sent at once: in two pieces it would wait for an acknowledgement of the first
    server: _Server

    def handle_expect_100(self) -> bool:
        wanted = super().handle_expect_100()
        self.wfile.flush()
        return wanted

    def respond(self) -> None:
        proxy = self.server.proxy
        body = self._body()
        fails, before, answers = proxy.drawn(Asked(self.command, self.path))
        if fails and before:
            self._fail(answers)
            return
        behind = http.client.HTTPConnection(proxy.host, timeout=60)
        behind.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
        for name, value in self.headers.items():
            if name.lower() not in _OF_A_CONNECTION:
                behind.putheader(name, value)
        if body or self.command in {"PUT", "POST"}:
            behind.putheader("Content-Length", str(len(body)))
        behind.endheaders(body)
        response = behind.getresponse()
        content = response.read()
        behind.close()
        if fails:
            self._fail(answers)
            return
        self.send_response(response.status)
        for name, value in response.getheaders():
            if name.lower() not in _OF_A_CONNECTION:
                self.send_header(name, value)
        length = response.getheader("Content-Length") if self.command == "HEAD" else str(len(content))
        if response.status != 204:
            self.send_header("Content-Length", length or "0")
        self.end_headers()
        self.wfile.write(content)

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def _fail(self, answers: bool) -> None:
        self.close_connection = True
        if answers:
            self.send_response(503)
            self.send_header("Content-Length", "0")
            self.send_header("Connection", "close")
            self.end_headers()

    do_GET = do_PUT = do_DELETE = do_HEAD = do_POST = respond  # noqa: N815 - names that the library looks for

    def log_message(self, *words: object) -> None:
        """Nothing is said."""


class _Server(LoopbackServer):
    def __init__(self, proxy: FaultyProxy) -> None:
        super().__init__(_Handler)
        self.proxy = proxy


def proxied(proxy: FaultyProxy) -> AbstractContextManager[str]:
    """The address of a proxy."""
    return address_of(_Server(proxy))
