"""Records as lines for people: `step  120/1000  loss 2.3145  lr 3.00e-04  12.3k tok/s  grad_norm 0.523`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from speedtronic.metrics.events import EVENTS
from speedtronic.metrics.records import ERROR, LOG, TRAIN_START, TRAIN_STEP, WARNING, Record

_RATES = {"steps_per_sec": "steps/s", "samples_per_sec": "samples/s", "tokens_per_sec": "tok/s"}
_LONGEST_TEXT = 200
_LONGEST_ETA = 1e10  # seconds, three centuries

# What a line shows of a step of the trainer; the JSON lines, trackers and hooks get all.
_SHOWN = ("step", "loss", "lr", "tokens_per_sec", "grad_norm")
_OF_THE_TRAINER = frozenset({*EVENTS[TRAIN_STEP].keys, *EVENTS[TRAIN_STEP].sometimes} - {"losses"})

# Text may come from anywhere: a path, an error, a generated sample. Control characters are escaped, so that they cannot
# control the terminal.
_VISIBLE = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}
_VISIBLE_ONE_LINE = {**_VISIBLE, ord("\n"): "\\n", ord("\t"): "\\t"}


class LineFormat:
    """Makes the line of each record, with the numbers of steps below each other.

    It remembers from `train_start` how many steps there will be, and how wide each number was.

    Args:
        fields: what the line of a step shows, in this order; the usual ones and a user's own without it.
    """

    def __init__(self, fields: Sequence[str] | None = None) -> None:
        self._fields = fields
        self._target: object = None
        self._widths: dict[str, int] = {}

    def line(self, record: Record) -> str:
        """The line of a record, without its newline and without values that are None. A message may have newlines."""
        payload = record.payload
        if record.event == LOG and "message" in payload:
            return _prefix(record.level) + str(payload["message"]).translate(_VISIBLE)
        if record.event == TRAIN_START:
            self._target = payload.get("target_steps")
            self._widths = {"step": 2 * len(str(self._target)) + 1}
        if record.event == TRAIN_STEP:
            payload = self._of_step(payload)
        if record.event in (TRAIN_START, TRAIN_STEP) and type(payload.get("step")) is type(self._target) is int:
            of_all = f"{payload['step']}/{self._target}"
            payload = {key: value for key, value in {**payload, "step": of_all}.items() if key != "target_steps"}
        words = [self._word(key, value, record.event) for key, value in payload.items() if value is not None]
        if record.event != TRAIN_STEP:
            words.insert(0, record.event)
        return _prefix(record.level) + "  ".join(words)

    def _of_step(self, payload: Mapping[str, Any]) -> Mapping[str, Any]:
        """What the line shows of a step, the loss and the rates as they were since the line before."""
        of_interval = {key: payload.get(f"interval_{key}", value) for key, value in payload.items()}
        if self._fields is not None:
            return {key: of_interval.get(key) for key in self._fields}
        if "interval_loss" not in payload:
            return payload
        # Batches without tokens have samples.
        rate = "tokens_per_sec" if of_interval.get("tokens_per_sec") else "samples_per_sec"
        shown = {key: of_interval.get(key) for key in [rate if key == "tokens_per_sec" else key for key in _SHOWN]}
        return {**shown, **{key: value for key, value in payload.items() if key not in _OF_THE_TRAINER}}

    def _word(self, key: str, value: Any, event: str) -> str:
        before, text, after = _field(key, value)
        if event == TRAIN_STEP:
            self._widths[key] = max(self._widths.get(key, 0), len(text))
            text = text.rjust(self._widths[key])
        return f"{before}{text}{after}"


def _prefix(level: int) -> str:
    if level >= ERROR:
        return "error: "
    return "warning: " if level >= WARNING else ""


def _field(key: str, value: Any) -> tuple[str, str, str]:
    """A value as text, with the words before and after it."""
    if key in _RATES and isinstance(value, int | float):
        return "", short_number(value), f" {_RATES[key]}"
    if key == "peak_memory_bytes" and isinstance(value, int | float):
        return "", short_bytes(value), ""
    if key == "eta_s" and isinstance(value, int | float):
        return "eta ", duration(value), ""
    if key == "losses" and isinstance(value, Mapping):
        return "", ", ".join(f"{name} {_format_float('loss', loss)}" for name, loss in value.items()), ""
    if type(value) is float:
        text = _format_float(key, value)
    elif type(value) is int:
        text = _format_int(key, value)
    else:
        text = str(value).translate(_VISIBLE_ONE_LINE)
        text = text if len(text) <= _LONGEST_TEXT else text[: _LONGEST_TEXT - 3] + "..."
    return f"{key} ", text, ""


def _format_float(key: str, value: float) -> str:
    if key.endswith("loss") and 1e-3 <= abs(value) < 1e6:
        return f"{value:.4f}"
    if key == "lr" or key.startswith("lr_"):
        return f"{value:.2e}"
    if key == "grad_norm" and 1e-3 <= value < 1e6:
        return f"{value:.3f}"
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
