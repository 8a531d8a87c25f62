"""The types around the logger: a `Record` for each event, the `Sink`s that write it, the hooks; and plain payloads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import datetime
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

LEVELS: Mapping[str, int] = {"DEBUG": 10, "INFO": 20, "WARNING": 30, "ERROR": 40, "CRITICAL": 50}
DEBUG = LEVELS["DEBUG"]
INFO = LEVELS["INFO"]
WARNING = LEVELS["WARNING"]
ERROR = LEVELS["ERROR"]

TRAIN_START = "train_start"
TRAIN_STEP = "train_step"
TRAIN_END = "train_end"
ENDS = frozenset({TRAIN_END, "interrupted"})  # of a run
LOG = "log"


class Record(NamedTuple):
    """One event on its way to the sinks.

    Attributes:
        event: the event's name; `log` for a message.
        level: one of `LEVELS`' numbers.
        payload: plain values only: None, bool, int, float (NaN and infinity too), str, lists and dicts of them.
        elapsed_s: seconds since the logger was made.
        time: when it happened, in UTC.
        run_id: of the run that it belongs to.
    """

    event: str
    level: int
    payload: Mapping[str, Any]
    elapsed_s: float
    time: datetime
    run_id: str | None = None


class Sink(Protocol):
    """A place that records are written to. `write` may raise `OSError`; the logger reports it and goes on."""

    @property
    def name(self) -> str:
        """The name of this sink in reports: a path, or `console`."""
        ...

    def write(self, record: Record) -> None: ...

    def close(self) -> None:
        """Close the files. A later `write` opens them again."""
        ...


@runtime_checkable
class TrainingHook(Protocol):
    """An object that is called on every event."""

    def on_event(self, event: str, payload: dict[str, Any]) -> object: ...


Hook: TypeAlias = TrainingHook | Callable[[str, dict[str, Any]], object]


_PLAIN_TYPES = frozenset({type(None), bool, float, str})
_LARGEST_INT = 2**1023  # a larger int does not fit a float, and Python refuses to print a much larger one
_DEEPEST = 32  # containers inside each other


def plain_payload(payload: Mapping[str, Any]) -> dict[str, Any]:
    """The payload in values that JSON knows. Scalars of tensors and arrays are read; other objects become text."""
    return {
        # Most values are plain already: this check saves them a call.
        _text(key): value if type(value) in _PLAIN_TYPES else _plain_value(value, ())
        for key, value in payload.items()
    }


def _plain_value(value: Any, above: tuple[int, ...]) -> Any:
    """`above` holds the ids of the containers around the value."""
    if type(value) in _PLAIN_TYPES:
        return value
    # Subclasses, such as an enum or a NumPy float, become the plain type.
    if isinstance(value, int):
        return int(value) if abs(value) < _LARGEST_INT else hex(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, str):
        return str.__str__(value)
    if not isinstance(value, Mapping | list | tuple | set | frozenset):
        return _scalar_or_text(value)
    # A container inside itself, or too many inside each other.
    if id(value) in above or len(above) == _DEEPEST:
        return "..."
    above = (*above, id(value))
    if isinstance(value, Mapping):
        return {_text(key): _plain_value(item, above) for key, item in value.items()}
    return [_plain_value(item, above) for item in value]


def _scalar_or_text(value: Any) -> Any:
    """The number of a 0-dimensional tensor or array, recognised by its shape so that neither library is imported."""
    scalar = value
    if getattr(value, "ndim", None) == 0 and callable(getattr(value, "item", None)):
        with suppress(Exception):  # such as the error of a tensor without data: then write its text
            scalar = value.item()
    return _plain_value(scalar, ()) if isinstance(scalar, bool | int | float | str) else _text(value)


def _text(value: Any) -> str:
    try:
        return str(value)
    except Exception as error:  # noqa: BLE001 - `str` runs the value's own code, whose errors must not end the run
        return f"<{type(value).__name__}: {type(error).__name__}>"
