"""Every event that the trainer sends while its tests run has the keys that are written down for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from speedtronic.metrics import MetricLogger
from speedtronic.metrics.events import EVENTS


@pytest.fixture(autouse=True)
def _events_are_as_documented(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    wrong: list[str] = []
    emit = MetricLogger.emit

    def watched(logger: MetricLogger, event: str, payload: Mapping[str, Any] | None = None) -> None:
        kind, keys = EVENTS[event], set(payload or {})
        if event == "eval":  # each metric of a user's own is a key more
            keys -= {key for key, value in (payload or {}).items() if isinstance(value, float) and key == "accuracy"}
        if not set(kind.keys) <= keys <= {*kind.keys, *kind.sometimes}:
            wrong.append(f"{event}: {sorted(keys)}")
        emit(logger, event, payload)

    monkeypatch.setattr(MetricLogger, "emit", watched)
    yield
    assert not wrong
