"""Every event as one line of strict JSON, for programs to read."""

from __future__ import annotations

import json
import math
import os
from typing import Any

from speedtronic.metrics.appendfile import AppendFile
from speedtronic.metrics.records import Record

_encode = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode


class JsonlSink:
    """Appends one object for each record: `{"event": …, <payload>, "elapsed_s": …, "time": …, "run_id": …}`.

    `event`, `elapsed_s` (seconds since the logger was made), `time` (UTC, ISO 8601) and `run_id` (where the record has
    one) mean the same on every line, and replace payload keys of the same name. JSON has no NaN and no infinity: such a
    number is written as null, and its key is listed under `nonfinite`.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._file = AppendFile(path)

    @property
    def name(self) -> str:
        return str(self._file.path)

    def write(self, record: Record) -> None:
        self._file.write_line(encode_line(record).encode("ascii"))

    def close(self) -> None:
        self._file.close()


def encode_line(record: Record) -> str:
    """The line of a record, without its newline, in ASCII."""
    fields = {
        "event": record.event,
        **record.payload,
        "elapsed_s": round(record.elapsed_s, 6),
        "time": record.time.isoformat(timespec="milliseconds"),
    }
    if record.run_id is not None:
        fields["run_id"] = record.run_id
    fields["event"] = record.event  # again: a payload key of this name has replaced it
    try:
        return _encode(fields)
    except ValueError:
        # A number is NaN or infinite. That is rare, so look for it only now.
        nonfinite: list[str] = []
        finite = {key: _null_if_nonfinite(value, key, nonfinite) for key, value in fields.items()}
        return _encode({**finite, "nonfinite": nonfinite})


def _null_if_nonfinite(value: Any, path: str, nonfinite: list[str]) -> Any:
    """The value with None for NaN and infinity. Appends their paths (`eval.loss`, `losses.3`) to `nonfinite`."""
    if isinstance(value, float) and not math.isfinite(value):
        nonfinite.append(path)
        return None
    if isinstance(value, dict):
        return {key: _null_if_nonfinite(item, f"{path}.{key}", nonfinite) for key, item in value.items()}
    if isinstance(value, list):
        return [_null_if_nonfinite(item, f"{path}.{index}", nonfinite) for index, item in enumerate(value)]
    return value
