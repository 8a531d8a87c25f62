"""Records as lines for people: `step 120/1000  loss 2.3145  lr 3.00e-04  12.3k tok/s  eta 0:01:10`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from speedtronic.metrics.records import ERROR, LOG, TRAIN_START, TRAIN_STEP, WARNING, Record

_RATES = {"steps_per_sec": "steps/s", "samples_per_sec": "samples/s", "tokens_per_sec": "tok/s"}
_LONGEST_TEXT = 200
_LONGEST_ETA = 1e10  # seconds, three centuries

# What the trainer's steps have for programs; the JSON lines and the hooks get it. A line shows the interval's loss and
# rate instead of those of the step and of the whole run, and one learning rate.
_FOR_PROGRAMS = frozenset(
    {*_RATES, *(f"interval_{rate}" for rate in _RATES), "samples", "tokens", "micro_batches", "lr_applied"}
)

# Text may come from anywhere: a path, an error, a generated sample. Control characters are escaped, so that they cannot
# control the terminal.
_VISIBLE = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}
_VISIBLE_ONE_LINE = {**_VISIBLE, ord("\n"): "\\n", ord("\t"): "\\t"}


class LineFormat:
    """Makes the line of each record. It remembers from `train_start` how many steps there will be."""

    def __init__(self) -> None:
        self._target: object = None

    def line(self, record: Record) -> str:
        """The line of a record, without its newline and without values that are None. A message may have newlines."""
        payload = record.payload
        if record.event == LOG and "message" in payload:
            return _prefix(record.level) + str(payload["message"]).translate(_VISIBLE)
        if record.event == TRAIN_START:
            self._target = payload.get("target_steps")
        if record.event == TRAIN_STEP and "interval_loss" in payload:
            payload = _for_people(payload)
        if record.event in (TRAIN_START, TRAIN_STEP) and type(payload.get("step")) is type(self._target) is int:
            of_all = f"{payload['step']}/{self._target}"
            payload = {key: value for key, value in {**payload, "step": of_all}.items() if key != "target_steps"}
        words = [_field(key, value) for key, value in payload.items() if value is not None]
        if record.event != TRAIN_STEP:
            words.insert(0, record.event)
        return _prefix(record.level) + "  ".join(words)


def _for_people(payload: Mapping[str, Any]) -> dict[str, Any]:
    """What a line shows of a step of the trainer."""
    shown = {key: value for key, value in payload.items() if key not in _FOR_PROGRAMS}
    shown["loss"] = shown.pop("interval_loss")
    memory, eta = shown.pop("peak_memory_bytes", None), shown.pop("eta_s", None)
    # Batches without tokens have samples.
    rate = "tokens_per_sec" if payload.get("interval_tokens_per_sec") else "samples_per_sec"
    return {**shown, rate: payload.get(f"interval_{rate}"), "peak_memory_bytes": memory, "eta_s": eta}


def _prefix(level: int) -> str:
    if level >= ERROR:
        return "error: "
    return "warning: " if level >= WARNING else ""


def _field(key: str, value: Any) -> str:
    if key in _RATES and isinstance(value, int | float):
        return f"{short_number(value)} {_RATES[key]}"
    if key == "peak_memory_bytes" and isinstance(value, int | float):
        return short_bytes(value)
    if key == "eta_s" and isinstance(value, int | float):
        return f"eta {duration(value)}"
    if type(value) is float:
        text = _format_float(key, value)
    elif type(value) is int:
        text = _format_int(key, value)
    else:
        text = str(value).translate(_VISIBLE_ONE_LINE)
        text = text if len(text) <= _LONGEST_TEXT else text[: _LONGEST_TEXT - 3] + "..."
    return f"{key} {text}"


def _format_float(key: str, value: float) -> str:
    if key.endswith("loss") and 1e-3 <= abs(value) < 1e6:
        return f"{value:.4f}"
    if key == "lr" or key.startswith("lr_"):
        return f"{value:.2e}"
    if key.endswith("_bytes"):
        return short_bytes(value)
    if key.endswith("_s"):
        return f"{value:.1f}"
    return f"{value:.4g}"


def _format_int(key: str, value: int) -> str:
    if key.endswith("_bytes"):
        return short_bytes(value)
    return short_number(value) if key == "parameters" else str(value)


def duration(seconds: float) -> str:
    """Seconds as `0:01:10`, or with days before them; `?` for what is no time that anyone would wait."""
    if not math.isfinite(seconds) or abs(seconds) >= _LONGEST_ETA:
        return "?"
    return str(timedelta(seconds=round(seconds)))


def short_number(value: float) -> str:
    """Three or four digits and a thousands letter: `950`, `12.3k`, `4.56M`."""
    for limit, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.3g}{letter}" if abs(value) < 1e12 else f"{value:.3g}"
    return f"{value:.3g}"


def short_bytes(count: float) -> str:
    """Bytes in powers of 1000: `950 B`, `1.2 GB`."""
    for limit, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if abs(count) >= limit:
            return f"{count / limit:.1f} {unit}"
    return f"{count:.0f} B"
