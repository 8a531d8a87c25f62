"""The report of runs that go on: a server on this machine alone, whose page asks for newer numbers."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from speedtronic.errors import RunFolderError, SpeedtronicError
from speedtronic.report.contents import contents
from speedtronic.report.page import data_text, report_page
from speedtronic.runs import RunReader

_HOST = "127.0.0.1"


class LiveReport(ThreadingHTTPServer):
    """Serves the report of some runs on the loopback address. Call `serve_forever`, and `server_close` at the end.

    Args:
        readers: of the runs. What was appended to their logs is read at each request.
        port: 0 takes a free one.

    Raises:
        RunFolderError: the port is taken, or needs rights that this process lacks.
    """

    daemon_threads = True

    def __init__(self, readers: Sequence[RunReader], port: int = 0) -> None:
        self._readers = readers
        self._reading = threading.Lock()
        try:
            super().__init__((_HOST, port), _Handler)
        except OSError as error:
            raise RunFolderError(
                f"port {port} cannot be used: {error.strerror or error}; name another with --port"
            ) from error

    @property
    def url(self) -> str:
        return f"http://{_HOST}:{self.server_address[1]}/"

    @property
    def hosts(self) -> frozenset[str]:
        """How a browser on this machine names this server."""
        return frozenset(f"{name}:{self.server_address[1]}" for name in (_HOST, "localhost"))

    def page(self) -> str:
        with self._reading:
            return report_page([reader.read() for reader in self._readers], live=True)

    def data(self) -> str:
        with self._reading:
            return data_text({**contents([reader.read() for reader in self._readers]), "live": True})


class _Handler(BaseHTTPRequestHandler):
    server: LiveReport
    server_version = "speedtronic"
    sys_version = ""

    def do_GET(self) -> None:  # noqa: N802 - the name that http.server looks for
        # A page of another site may have its name lead to this machine. Its requests name that site here.
        if self.headers.get("Host") not in self.server.hosts:
            self.send_error(HTTPStatus.FORBIDDEN)
            return
        answers = {
            "/": (self.server.page, "text/html; charset=utf-8"),
            "/data.json": (self.server.data, "application/json"),
        }
        if self.path not in answers:
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        write, kind = answers[self.path]
        try:
            body = write().encode("ascii" if kind == "application/json" else "utf-8")
        except SpeedtronicError as error:
            self.send_error(HTTPStatus.SERVICE_UNAVAILABLE, explain=str(error))
            return
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """The terminal stays quiet."""
