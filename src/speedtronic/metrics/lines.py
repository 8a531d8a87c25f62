"""Records as lines for people: `step 120  loss 2.3145  lr 3.00e-04  12.3k tok/s`."""

from __future__ import annotations

from typing import Any

from speedtronic.metrics.records import ERROR, LOG, TRAIN_STEP, WARNING, Record

_RATES = {"steps_per_sec": "steps/s", "samples_per_sec": "samples/s", "tokens_per_sec": "tok/s"}
_COUNTS_OF_TOKENS = frozenset({"tokens", "tokens_per_sec"})
_LONGEST_TEXT = 200

# Text may come from anywhere: a path, an error, a generated sample. Control characters are escaped, so that they cannot
# control the terminal.
_VISIBLE = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}
_VISIBLE_ONE_LINE = {**_VISIBLE, ord("\n"): "\\n", ord("\t"): "\\t"}


def format_line(record: Record) -> str:
    """The line of a record, without its newline and without values that are None. A message may contain newlines."""
    if record.event == LOG and "message" in record.payload:
        return _prefix(record.level) + str(record.payload["message"]).translate(_VISIBLE)
    shown = ((key, value) for key, value in record.payload.items() if value is not None)
    # Data without tokens have no rate of them.
    words = [_field(key, value) for key, value in shown if value or key not in _COUNTS_OF_TOKENS]
    if record.event != TRAIN_STEP:
        words.insert(0, record.event)
    return _prefix(record.level) + "  ".join(words)


def _prefix(level: int) -> str:
    if level >= ERROR:
        return "error: "
    return "warning: " if level >= WARNING else ""


def _field(key: str, value: Any) -> str:
    if key in _RATES and isinstance(value, int | float):
        return f"{short_number(value)} {_RATES[key]}"
    if type(value) is float:
        text = _format_float(key, value)
    elif type(value) is int:
        text = short_bytes(value) if key.endswith("_bytes") else str(value)
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
