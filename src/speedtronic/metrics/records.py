"""What flows through the logger: one `Record` per event, written by `Sink`s; and what a hook looks like."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

LEVELS: Mapping[str, int] = {"DEBUG": 10, "INFO": 20, "WARNING": 30, "ERROR": 40, "CRITICAL": 50}
INFO = LEVELS["INFO"]
WARNING = LEVELS["WARNING"]
ERROR = LEVELS["ERROR"]

TRAIN_STEP = "train_step"
LOG = "log"

_EVENT_LEVELS: Mapping[str, int] = {
    "nonfinite": WARNING,
    "optimizer_step_skipped": WARNING,
    "shape_warning": WARNING,
    "interrupted": WARNING,
}


def event_level(event: str) -> int:
    """The level an event is shown at: WARNING for what a reader should not miss, else INFO."""
    return _EVENT_LEVELS.get(event, INFO)


class Record(NamedTuple):
    """One event on its way to the sinks.

    Attributes:
        event: the event's name; `log` for a message.
        level: one of `LEVELS`' numbers.
        payload: plain values only: None, bool, int, float (which may be non-finite), str, lists and dicts
            of them.
        elapsed_s: seconds since the logger was made.
        time: when it happened, in UTC.
    """

    event: str
    level: int
    payload: Mapping[str, Any]
    elapsed_s: float
    time: datetime


class Sink(Protocol):
    """Somewhere records are written. `write` may raise `OSError`; the logger reports it and goes on."""

    @property
    def name(self) -> str:
        """What a report about this sink calls it: a path, or `console`."""
        ...

    def write(self, record: Record) -> None: ...

    def close(self) -> None:
        """Release what is held open. A later `write` opens it again."""
        ...


@runtime_checkable
class TrainingHook(Protocol):
    """An object that wants to hear of every event."""

    def on_event(self, event: str, payload: dict[str, Any]) -> object: ...


Hook: TypeAlias = TrainingHook | Callable[[str, dict[str, Any]], object]


_PLAIN_TYPES = frozenset({type(None), bool, int, float, str})


def plain_payload(payload: Mapping[str, Any]) -> dict[str, Any]:
    """The payload in values that JSON knows: tensor and array scalars read, anything foreign as `str`."""
    return {key: value if type(value) in _PLAIN_TYPES else _plain(value) for key, value in payload.items()}


def _plain(value: Any) -> Any:
    if type(value) in _PLAIN_TYPES:
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return float(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, str):
        return str.__str__(value)
    return _scalar_or_text(value)


def _scalar_or_text(value: Any) -> Any:
    """A 0-dimensional tensor's or array's number, found by its shape so that neither library is imported."""
    if getattr(value, "ndim", None) == 0 and callable(getattr(value, "item", None)):
        value = value.item()
    return value if type(value) in _PLAIN_TYPES else str(value)
