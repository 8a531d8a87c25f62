"""A logger that keeps what it is told, and can be waited on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

from speedtronic.metrics import MetricLogger
from tests.support.models import Silence

SOON = 10.0  # seconds that a test waits for a thread before it fails


class Listening(MetricLogger):
    """Events and messages in their order; each is there for other threads as soon as it was sent."""

    def __init__(self) -> None:
        super().__init__(stream=Silence())
        self._change = threading.Condition()
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.words: list[tuple[str, str]] = []

    def emit(self, event: str, payload: Mapping[str, Any] | None = None) -> None:
        with self._change:
            self.events.append((event, dict(payload or {})))
            self._change.notify_all()
        super().emit(event, payload)

    def _log(self, level: int, message: str) -> None:
        with self._change:
            self.words.append(({20: "INFO", 30: "WARNING", 40: "ERROR"}[level], message))
            self._change.notify_all()

    def of(self, event: str) -> list[dict[str, Any]]:
        with self._change:
            return [payload for name, payload in self.events if name == event]

    def said(self, part: str, level: str | None = None) -> list[str]:
        """The messages that contain `part`."""
        with self._change:
            return [text for of, text in self.words if part in text and level in (None, of)]

    def wait_for(self, condition: Callable[[], object]) -> None:
        """Wait until something that was told makes `condition` true."""
        with self._change:
            assert self._change.wait_for(lambda: bool(condition()), SOON), (self.events, self.words)

    def wait_for_event(self, event: str, count: int = 1) -> None:
        self.wait_for(lambda: len(self.of(event)) >= count)

    def wait_for_word(self, part: str, level: str | None = None) -> None:
        self.wait_for(lambda: self.said(part, level))
