"""What `fit` returns."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, overload


class MetricRecords(Sequence[dict[str, Any]]):
    """A list of dicts that keeps its numbers in typed columns and makes each dict when it is asked for.

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

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...

    @overload
    def __getitem__(self, index: slice) -> list[dict[str, Any]]: ...

    def __getitem__(self, index: int | slice) -> dict[str, Any] | list[dict[str, Any]]:
        if isinstance(index, slice):
            return [self._record(row) for row in range(*index.indices(self._length))]
        if not -self._length <= index < self._length:
            raise IndexError(f"record {index} of {self._length}")
        return self._record(index % self._length)

    def _record(self, row: int) -> dict[str, Any]:
        return {key: column[row] for key, column in self._columns.items()}

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self._record(row) for row in range(self._length))

    def __add__(self, other: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        return [*self, *other]

    def __radd__(self, other: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        return [*other, *self]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]  # mutable, like a list

    def __repr__(self) -> str:
        return f"<{self._length} metric records of {', '.join(self._columns) or 'nothing'}>"


def _column_for(value: Any) -> array[float] | array[int] | list[Any]:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return []
    return array("q") if isinstance(value, int) else array("d")


@dataclass
class TrainResult:
    """The outcome of one `fit`.

    Attributes:
        steps: final absolute global step, including resumed state.
        samples: cumulative sample counter.
        tokens: cumulative token counter.
        final_loss: mean loss of the last update of this invocation; None when no update ran or it was not finite.
        elapsed_s: duration of this invocation in seconds.
        metrics: every metric record of this invocation, as a sequence of dicts.
        eval_loss: the last evaluation loss of this invocation, or None.
        interrupted_by: number of the signal that ended the run early, or None.
        save_error: why the last checkpoint could not be written, or None.
    """

    steps: int
    samples: int
    tokens: int
    final_loss: float | None
    elapsed_s: float
    metrics: Sequence[dict[str, Any]] = field(default_factory=MetricRecords)
    eval_loss: float | None = None
    interrupted_by: int | None = None
    save_error: str | None = None


def finite_or_none(value: float) -> float | None:
    """The value, or None for NaN and infinities."""
    return value if math.isfinite(value) else None
