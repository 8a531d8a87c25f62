"""What flows through the logger: one `Record` per event, written by `Sink`s; and what a hook looks like."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import datetime
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

LEVELS: Mapping[str, int] = {"DEBUG": 10, "INFO": 20, "WARNING": 30, "ERROR": 40, "CRITICAL": 50}
INFO = LEVELS["INFO"]
WARNING = LEVELS["WARNING"]
ERROR = LEVELS["ERROR"]

TRAIN_STEP = "train_step"
LOG = "log"

_EVENT_LEVELS: Mapping[str, int] = {
    "shape_profile": LEVELS["DEBUG"],
    "nonfinite": WARNING,
    "optimizer_step_skipped": WARNING,
    "shape_warning": WARNING,
    "interrupted": WARNING,
    "delta_upload_queued": LEVELS["DEBUG"],
    "delta_upload_skipped": WARNING,
    "delta_upload_failed": WARNING,
    "delta_rejected": WARNING,
}


def event_level(event: str) -> int:
    """The level an event is shown at: WARNING for what a reader should not miss, DEBUG for what few look for."""
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


_PLAIN_TYPES = frozenset({type(None), bool, float, str})
_LARGEST_INT = 2**1023  # beyond it lie numbers that are no float, and soon those that Python does not print
_DEEPEST = 32


def plain_payload(payload: Mapping[str, Any]) -> dict[str, Any]:
    """The payload in values that JSON knows: tensor and array scalars read, anything else as its text."""
    return {_text(key): value if type(value) in _PLAIN_TYPES else _plain(value, ()) for key, value in payload.items()}


def _plain(value: Any, above: tuple[int, ...]) -> Any:
    """`above` are the ids of the containers that the value lies in."""
    if type(value) in _PLAIN_TYPES:
        return value
    if isinstance(value, int):
        return int(value) if abs(value) < _LARGEST_INT else hex(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, str):
        return str.__str__(value)
    if not isinstance(value, Mapping | list | tuple | set | frozenset):
        return _scalar_or_text(value)
    if id(value) in above or len(above) == _DEEPEST:
        return "..."
    above = (*above, id(value))
    if isinstance(value, Mapping):
        return {_text(key): _plain(item, above) for key, item in value.items()}
    return [_plain(item, above) for item in value]


def _scalar_or_text(value: Any) -> Any:
    """A 0-dimensional tensor's or array's number, found by its shape so that neither library is imported."""
    scalar = value
    if getattr(value, "ndim", None) == 0 and callable(getattr(value, "item", None)):
        with suppress(Exception):  # such as that of a tensor without data: its text is what there is to say
            scalar = value.item()
    return _plain(scalar, ()) if isinstance(scalar, bool | int | float | str) else _text(value)


def _text(value: Any) -> str:
    try:
        return str(value)
    except Exception as error:  # noqa: BLE001 - foreign code: whatever a value raises must not end the run
        return f"<{type(value).__name__}: {type(error).__name__}>"
