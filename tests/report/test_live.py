"""The live report follows a log, for browsers on this machine only."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from speedtronic.errors import RunFolderError
from speedtronic.report.live import LiveReport
from speedtronic.runs import RunReader
from tests.support.logs import LogWriter


@pytest.fixture
def log(tmp_path: Path) -> LogWriter:
    log = LogWriter(tmp_path)
    log.start(0)
    log.step(1)
    return log


@pytest.fixture
def server(log: LogWriter) -> Iterator[LiveReport]:
    with LiveReport([RunReader(log.file.parent)]) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def get(server: LiveReport, path: str, host: str | None = None) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1])
    connection.request("GET", path, headers={"Host": host} if host is not None else {})
    answer = connection.getresponse()
    body = answer.read().decode("utf-8")
    connection.close()
    return answer.status, body


def test_it_serves_the_page_and_follows_the_log(server: LiveReport, log: LogWriter) -> None:
    status, page = get(server, "/")
    assert (status, "connect-src 'self'" in page) == (200, True)
    rows = []
    for step in (2, 3):
        log.step(step)
        rows.append(json.loads(get(server, "/data.json")[1])["runs"][0]["tables"]["steps"]["rows"])
    assert rows == [2, 3]


def test_it_answers_neither_other_names_nor_other_paths(server: LiveReport) -> None:
    port = server.server_address[1]
    assert server.server_address[0] == "127.0.0.1"
    assert get(server, "/", host=f"localhost:{port}")[0] == 200
    for host in ("evil.example", f"evil.example:{port}", "127.0.0.1"):
        assert get(server, "/data.json", host=host)[0] == 403, host
    for path in ("/metrics.jsonl", "/../secret", "/data.json?x"):
        assert get(server, path)[0] == 404, path


def test_a_log_that_is_gone_is_an_error_of_that_request_alone(server: LiveReport, log: LogWriter) -> None:
    text = log.file.read_bytes()
    log.file.unlink()
    status, body = get(server, "/data.json")
    assert (status, "cannot be read" in body) == (503, True)
    log.file.write_bytes(text)
    assert get(server, "/data.json")[0] == 200


def test_a_port_that_is_taken_is_said(server: LiveReport) -> None:
    with pytest.raises(RunFolderError, match="--port"):
        LiveReport([], server.server_address[1])
