"""What experiment trackers have in common: the numbers that they get, their methods, and the hook around one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from speedtronic.errors import MissingExtraError
from speedtronic.metrics.records import ENDS, TRAIN_START, TRAIN_STEP, plain_payload

_NO_CURVES = frozenset({TRAIN_START, *ENDS})  # each comes once
_OF_THE_LINE = frozenset({"event", "elapsed_s", "time", "run_id", "nonfinite", "step"})


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker knows of a run.

    Attributes:
        run_id: the run's own, which a resumed run has too.
        name: `run.name`.
        folder: where the tracker may write.
        config: the configuration as plain values, without secrets.
    """

    run_id: str
    name: str
    folder: Path
    config: Mapping[str, Any]


@dataclass(frozen=True)
class Point:
    """The numbers of one event, named `train/loss` or `eval/loss`."""

    event: str
    step: int
    numbers: Mapping[str, float]
    time: datetime


class Tracker(Protocol):
    """One run in a tracker, always called on one thread. Each method may raise anything, and may take any time."""

    def log(self, point: Point) -> None: ...

    def flush(self) -> None:
        """Return when the tracker has what was logged. If this raises, all since the last flush is logged again."""

    def close(self) -> None: ...


def point_of(event: str, payload: Mapping[str, Any], at: datetime) -> Point | None:
    """The finite numbers of an event with a step; None if it has no step, no numbers, or no place on a curve.

    Args:
        payload: plain values. Numbers inside mappings count too: `{"sets": {"books": {"loss": 2.0}}}` of an
            evaluation becomes `eval/sets/books/loss`.
    """
    step = payload.get("step")
    if event in _NO_CURVES or not isinstance(step, int):
        return None
    values = {key: value for key, value in payload.items() if key not in _OF_THE_LINE}
    numbers = dict(_numbers("train" if event == TRAIN_STEP else event, values))
    return Point(event, step, numbers, at) if numbers else None


def _numbers(name: str, value: Any) -> Iterator[tuple[str, float]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _numbers(f"{name}/{key}", item)
    elif isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < float("inf"):
        yield name, float(value)


def import_tracker(module: str) -> ModuleType:
    """Import a tracker's package, or a module of it. The extra has the name of the package.

    Raises:
        MissingExtraError: it is not installed.
    """
    require_tracker(module.partition(".")[0])
    return import_module(module)


def require_tracker(package: str) -> None:
    """Raise MissingExtraError if a tracker's package is not installed; nothing is imported."""
    spec = find_spec(package)
    # A folder of this name, as wandb makes one where it runs, is found too, but as a package without a file.
    if spec is None or spec.origin is None:
        raise MissingExtraError(f"the tracker {package} is not installed; install speedtronic[{package}]")


class TrackerHook:
    """A hook that sends each event's numbers to a tracker, which it opens at the first of them.

    Args:
        open_tracker: opens the tracker.
    """

    def __init__(self, open_tracker: Callable[[], Tracker]) -> None:
        self._open = open_tracker
        self._tracker: Tracker | None = None

    def on_event(self, event: str, payload: dict[str, Any]) -> None:
        point = point_of(event, plain_payload(payload), datetime.now(UTC))
        if point is not None:
            if self._tracker is None:
                self._tracker = self._open()
            self._tracker.log(point)
        elif event in ENDS and self._tracker is not None:
            self._tracker.flush()

    def close(self) -> None:
        """Finish the run in the tracker. A later event opens it again."""
        tracker, self._tracker = self._tracker, None
        if tracker is not None:
            tracker.flush()
            tracker.close()
