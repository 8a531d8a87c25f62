"""Every event as one line of strict JSON: what programs read."""

from __future__ import annotations

import json
import math
import os
from typing import Any

from speedtronic.metrics.appendfile import AppendFile
from speedtronic.metrics.records import Record

_encode = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode


class JsonlSink:
    """Appends `{"event": …, <the payload's keys>, "elapsed_s": …, "time": …}` per record, at every level.

    `event`, `elapsed_s` (seconds since the logger was made) and `time` (UTC, ISO 8601) mean the same on
    every line; a payload key of one of these names gives way. JSON has no NaN and no infinity: such a
    number is written as null and its key listed under `nonfinite`.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._file = AppendFile(path)

    @property
    def name(self) -> str:
        return str(self._file.path)

    def write(self, record: Record) -> None:
        self._file.write_line(_encode_line(record).encode("ascii"))

    def close(self) -> None:
        self._file.close()


def _encode_line(record: Record) -> str:
    line = {
        "event": record.event,
        **record.payload,
        "elapsed_s": round(record.elapsed_s, 6),
        "time": record.time.isoformat(timespec="milliseconds"),
    }
    line["event"] = record.event
    try:
        return _encode(line)
    except ValueError:
        nonfinite: list[str] = []
        finite = {key: _finite(value, key, nonfinite) for key, value in line.items()}
        return _encode({**finite, "nonfinite": nonfinite})


def _finite(value: Any, path: str, nonfinite: list[str]) -> Any:
    """The value with None for NaN and infinity; their paths (`eval.loss`, `losses.3`) go into the list."""
    if isinstance(value, float) and not math.isfinite(value):
        nonfinite.append(path)
        return None
    if isinstance(value, dict):
        return {key: _finite(item, f"{path}.{key}", nonfinite) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item, f"{path}.{index}", nonfinite) for index, item in enumerate(value)]
    return value
