"""A headless Chromium, driven through its DevTools protocol over a pipe: no driver to install.

The protocol: https://chromedevtools.github.io/devtools-protocol/. With `--remote-debugging-pipe` Chromium reads JSON
messages from its descriptor 3 and writes them to 4, each with a zero byte behind it.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
from collections import deque
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest

PROGRAM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
)
needs_chromium = pytest.mark.skipif(PROGRAM is None, reason="no Chromium on this machine: `apt-get install chromium`")

# `pass_fds` keeps the numbers of descriptors, and Chromium wants 3 and 4.
_MOVE_PIPES = """
import os, sys
from fcntl import F_DUPFD, fcntl
high = [fcntl(int(number), F_DUPFD, 10) for number in sys.argv[1:3]]
for number, wanted in zip(high, (3, 4)):
    os.dup2(number, wanted)
    os.close(number)
os.execv(sys.argv[3], sys.argv[3:])
"""
_PATIENCE = 60.0  # seconds for one answer


class Browser:
    """One page of a headless Chromium.

    Attributes:
        problems: what the console said as a warning or an error, what the page's policy refused, and exceptions.
        requests: the addresses that the page asked for.
    """

    def __init__(self, width: int = 1280, height: int = 900, *, dark: bool = False, pixels: float = 1) -> None:
        self.problems: list[str] = []
        self.requests: list[str] = []
        self._events: deque[dict[str, Any]] = deque()
        self._number = 0
        self._received = b""
        self._session: str | None = None
        self._profile = tempfile.mkdtemp(prefix="chromium-")
        to_read, self._to = os.pipe()
        self._from, to_write = os.pipe()
        command = [
            *(sys.executable, "-c", _MOVE_PIPES, str(to_read), str(to_write)),
            str(PROGRAM),
            "--headless=new",
            "--remote-debugging-pipe",
            f"--user-data-dir={self._profile}",
            *("--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--hide-scrollbars"),
            *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
            "about:blank",
        ]
        self._process = subprocess.Popen(
            command, pass_fds=(to_read, to_write), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(to_read)
        os.close(to_write)
        pages = [target for target in self.call("Target.getTargets")["targetInfos"] if target["type"] == "page"]
        target = pages[0]["targetId"] if pages else self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.resize(width, height, pixels=pixels)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._to)
        os.close(self._from)
        shutil.rmtree(self._profile, ignore_errors=True)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Ask for something, and wait for the answer."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode("utf-8") + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer["error"])
                result: dict[str, Any] = answer["result"]
                return result
            self._note(answer)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._received:
            ready, _, _ = select.select([self._from], [], [], _PATIENCE)
            assert ready, "Chromium does not answer"
            part = os.read(self._from, 2**20)
            assert part, "Chromium has ended"
            self._received += part
        message, _, self._received = self._received.partition(b"\0")
        answer: dict[str, Any] = json.loads(message)
        return answer

    def _note(self, event: dict[str, Any]) -> None:
        name, said = event.get("method"), event.get("params", {})
        if name == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(said["exceptionDetails"]))
        elif name == "Runtime.consoleAPICalled" and said["type"] in ("error", "warning", "assert"):
            self.problems.append(json.dumps(said["args"]))
        elif name == "Log.entryAdded" and said["entry"]["level"] in ("error", "warning"):
            self.problems.append(said["entry"]["text"])
        elif name == "Network.requestWillBeSent":
            self.requests.append(said["request"]["url"])
        elif name is not None:
            self._events.append(event)

    def open(self, address: str) -> None:
        """Open a page, and wait until it is loaded."""
        self._events.clear()
        self.call("Page.navigate", url=address)
        while not any(event["method"] == "Page.loadEventFired" for event in self._events):
            self._note(self._next())

    def resize(self, width: int, height: int, *, pixels: float = 1) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=pixels,
            mobile=width < 600,
        )

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression on the page."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def point(self, x: float, y: float) -> None:
        """Move the pointer there, and wait until the page has drawn what follows."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        self.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))")

    def drag(self, x: float, y: float, to_x: float) -> None:
        self.point(x, y)
        self.call("Input.dispatchMouseEvent", type="mousePressed", x=x, y=y, button="left", clickCount=1)
        self.point((x + to_x) / 2, y)
        self.point(to_x, y)
        self.call("Input.dispatchMouseEvent", type="mouseReleased", x=to_x, y=y, button="left", clickCount=1)
        self.point(to_x, y)

    def picture(self, file: Path, *, whole: bool = False) -> None:
        """Write what the page looks like as PNG."""
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        file.write_bytes(base64.b64decode(shot["data"]))
