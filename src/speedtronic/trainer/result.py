"""What `fit` returns."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, overload


class MetricRecords:
    """Metric records in typed columns, while `fit` runs; iterating makes a dict of each.

    A record of ten numbers takes 80 bytes here and about 500 as a dict. The first record fixes the keys.
    """

    def __init__(self) -> None:
        self._columns: dict[str, array[float] | array[int] | list[Any]] = {}
        self._length = 0

    def append(self, record: dict[str, Any]) -> None:
        """Add one record. Its keys are those of the first one; a value may change between number and None."""
        if not self._columns:
            self._columns = {key: _column_for(value) for key, value in record.items()}
        if record.keys() != self._columns.keys():
            raise ValueError(f"keys {sorted(record)} differ from those of the first record {sorted(self._columns)}")
        for key, value in record.items():
            column = self._columns[key]
            try:
                column.append(value)
            except (TypeError, OverflowError):
                # The typed column cannot hold this value, so it becomes a list.
                self._columns[key] = [*column, value]
        self._length += 1

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for row in range(self._length):
            yield {key: column[row] for key, column in self._columns.items()}


def _column_for(value: Any) -> array[float] | array[int] | list[Any]:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return []
    return array("q") if isinstance(value, int) else array("d")


class _ListWhenRead:
    """A field of a dataclass that keeps `MetricRecords` as they are, and is a list of dicts from its first read on."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, instance: None, owner: type) -> tuple[()]: ...

    @overload
    def __get__(self, instance: object, owner: type) -> list[dict[str, Any]]: ...

    def __get__(self, instance: object | None, owner: type) -> list[dict[str, Any]] | tuple[()]:
        if instance is None:
            return ()  # what the dataclass takes for the default
        kept = instance.__dict__[self._name]
        if not isinstance(kept, list):
            instance.__dict__[self._name] = kept = list(kept)
        return kept

    def __set__(self, instance: object, value: Iterable[dict[str, Any]]) -> None:
        instance.__dict__[self._name] = value


@dataclass
class TrainResult:
    """The outcome of one `fit`.

    Attributes:
        steps: final absolute global step, including resumed state.
        samples: cumulative sample counter.
        tokens: cumulative token counter.
        final_loss: mean loss of the last update of this invocation; None when no update ran or it was not finite.
        elapsed_s: duration of this invocation in seconds.
        metrics: every metric record of this invocation, a list of dicts. It is made when it is first read.
        eval_loss: the last evaluation loss of this invocation, or None.
        interrupted_by: number of the signal that ended the run early, or None.
        save_error: why the last checkpoint could not be written, or None.
    """

    steps: int
    samples: int
    tokens: int
    final_loss: float | None
    elapsed_s: float
    metrics: list[dict[str, Any]] = _ListWhenRead()  # type: ignore[assignment]  # reading it gives such a list
    eval_loss: float | None = None
    interrupted_by: int | None = None
    save_error: str | None = None


def finite_or_none(value: float) -> float | None:
    """The value, or None for NaN and infinities."""
    return value if math.isfinite(value) else None
