"""What a run has logged, read back from its folder: its numbers as columns, its events, its configuration.

`runs.load("runs/quickstart")` reads a folder. `pandas.DataFrame(run.steps)` makes a table of its steps, and
`run.plot()` draws its loss. Needs no torch.
"""

from __future__ import annotations

import math
import os
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray
from pydantic_core import from_json

from speedtronic.config.run_folder import RUN_CONFIG, RUN_RECORD, is_of_a_run, run_id_in
from speedtronic.config.secrets import redacted
from speedtronic.config.sections import HELD_OUT
from speedtronic.config.text import parse
from speedtronic.durable.lock import holder_lives
from speedtronic.errors import ConfigError, MissingExtraError, RunFolderError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Column: TypeAlias = NDArray[np.float64]
Columns: TypeAlias = dict[str, Column]
Status: TypeAlias = Literal["running", "finished", "interrupted", "stopped", "ended"]

_STEP = "train_step"
_NOT_NUMBERS = frozenset({"event", "time", "run_id", "nonfinite", "elapsed_s"})
_OF_A_PASS = frozenset(
    {*_NOT_NUMBERS, "step", "set", "targets", "batches", "duration_s", "version", "best_version", "seconds"}
)
_SILENCE = 600.0  # seconds; a run on another machine that is silent for longer has most likely stopped
_DEEPEST = 3  # folders below the one that `find` searches


@dataclass(frozen=True)
class Run:
    """What a run has logged.

    Attributes:
        path: its folder, or the file of JSON lines that was named.
        name: `run.name` of its configuration; without one the name of the folder.
        run_id: its id; None where its lines have none.
        status: `running`; `finished`; `interrupted` by a signal; `stopped`, where it ended without a word; or `ended`,
            where it never trained, as the master of DumbDiLoCo.
        steps: the columns of `train_step`, one row for each step that was logged, in the order of steps. Where a
            run was resumed and trained a step again, the later numbers count. NaN stands for what is missing or not
            finite. `seconds` is the time since the run began, without the time between its processes.
        evals: the numbers of `eval`, in the same form; those of further sets are `SET/NAME`.
        events: all other records, in the order of the file, each with its `seconds`.
        config: its resolved configuration, secrets hidden; empty where its folder has none.
        unreadable: lines that are no JSON object, such as one that a kill cut.
    """

    path: Path
    name: str
    run_id: str | None
    status: Status
    steps: Columns
    evals: Columns
    events: list[dict[str, Any]]
    config: dict[str, Any]
    unreadable: int

    def last(self, *keys: str) -> float | None:
        """The last finite number of the first of these columns that has one: of `steps`, or `eval.…` of `evals`."""
        for key in keys:
            columns = self.evals if key.startswith("eval.") else self.steps
            column = columns.get(key.removeprefix("eval."), np.empty(0))
            finite = column[np.isfinite(column)]
            if len(finite):
                return float(finite[-1])
        return None

    def of(self, event: str) -> list[dict[str, Any]]:
        """All records of one event, but `train_step` and `eval`, which are columns."""
        return [record for record in self.events if record.get("event") == event]

    def plot(self, *columns: str, by: str = "step", ax: Axes | None = None) -> Axes:
        """Draw columns of `steps`; without a name the loss, and the loss on held-out data where there is one.

        Args:
            columns: their names.
            by: the column of the horizontal axis, such as `step`, `tokens` or `seconds`.
            ax: where to draw; None makes a figure.

        Raises:
            MissingExtraError: matplotlib is not installed.
            KeyError: the run has no such column.
        """
        try:
            import matplotlib.pyplot as plt
        except ImportError as error:
            raise MissingExtraError(
                "drawing needs matplotlib, which is not installed: install speedtronic[plot]"
            ) from error
        known = sorted(self.steps)
        for name in (*columns, by):
            if name not in self.steps:
                raise KeyError(f"{self.path} has no column {name!r}; it has {', '.join(known) or 'none'}")
        axes: Axes = plt.subplots(figsize=(8, 4))[1] if ax is None else ax
        for name in columns or (loss_column(self.steps),):
            axes.plot(self.steps[by], self.steps[name], label=f"{self.name}: {name}", linewidth=1)
        if not columns and len(self.evals.get("loss", ())):
            at = np.interp(self.evals["step"], self.steps["step"], self.steps[by])
            axes.plot(at, self.evals["loss"], "o--", label=f"{self.name}: eval", markersize=4, linewidth=1)
        axes.set_xlabel(by)
        axes.grid(visible=True, alpha=0.3)
        axes.legend()
        return axes


def load(path: str | os.PathLike[str]) -> Run:
    """Read what a run has logged.

    Args:
        path: the folder of a run whose `logging.json_file` was set, or a file of JSON lines.

    Raises:
        RunFolderError: there is no such folder, or it has no JSON lines.
    """
    return RunReader(path).read()


def find(directory: str | os.PathLike[str]) -> list[Path]:
    """The folders of runs in a folder, up to three levels deep, itself included, in the order of their names.

    Raises:
        RunFolderError: there is no such folder, or it cannot be read.
    """
    top = Path(directory)
    try:
        return sorted(_runs_below(top, _DEEPEST))
    except OSError as error:
        raise RunFolderError(f"{top}: {error.strerror or error}; name a folder that holds runs") from error


def _runs_below(folder: Path, levels: int) -> Iterator[Path]:
    if (folder / RUN_RECORD).is_file() or is_of_a_run(folder / RUN_CONFIG):
        yield folder
        return
    for entry in os.scandir(folder):
        if levels and entry.is_dir(follow_symlinks=False) and not entry.name.startswith("."):
            with suppress(PermissionError):
                yield from _runs_below(Path(entry.path), levels - 1)


def loss_column(steps: Mapping[str, Column]) -> str:
    """The column of the training loss: the mean since the line before where there is one, else that of the step."""
    return "interval_loss" if "interval_loss" in steps else "loss"


# ---------------------------------------------------------------------- reading


@dataclass
class _Rows:
    """Rows of numbers with the same keys, one behind the other; `elapsed_s` is last in each."""

    keys: tuple[str, ...]
    values: array[float] = field(default_factory=lambda: array("d"))

    def __len__(self) -> int:
        return len(self.values) // len(self.keys)


class _Log:
    """The lines of one run. A file may have those of several: of runs that followed each other, or that share it."""

    def __init__(self) -> None:
        self.blocks: list[_Rows] = []
        self.events: list[dict[str, Any]] = []
        self._rows = 0
        self._rows_before = 0  # the last event
        self._elapsed = 0.0  # of the line before
        self._offset = 0.0  # seconds of all processes before this one
        self._offsets: list[tuple[int, float]] = [(0, 0.0)]  # from a row on
        self._cuts: list[tuple[int, int, float]] = []  # a start: rows and events before it, and its step
        self._take: Callable[[dict[str, Any]], tuple[Any, ...]] = (
            lambda record: ()
        )  # the values of the last block's keys
        self._width = 0  # how many keys a record has whose numbers are those of the last block

    def add_step(self, record: dict[str, Any]) -> None:
        if isinstance(losses := record.get("losses"), dict):  # of several optimizers: a column for each
            rest = {key: value for key, value in record.items() if key != "losses"}
            record = rest | {f"losses/{name}": loss for name, loss in losses.items()}
        block = self.blocks[-1] if self.blocks else None
        if block is not None and len(record) == self._width:
            before = len(block.values)
            try:
                block.values.extend(self._take(record))
                self._rows += 1
                return
            except (KeyError, TypeError):  # it lacks a key, or a value is null
                del block.values[before:]
        # A step with other keys, or the first one. Keys that are new begin a block of their own.
        numbers = {key: _number(value) for key, value in record.items() if key not in _NOT_NUMBERS}
        if not math.isfinite(numbers.get("step", math.nan)):
            self.add_event(record)
            return
        if block is None or not numbers.keys() <= set(block.keys):
            block = _Rows((*numbers, "elapsed_s"))
            self.blocks.append(block)
            self._take, self._width = itemgetter(*block.keys), len(record)
        numbers["elapsed_s"] = _number(record.get("elapsed_s"))
        block.values.extend(numbers.get(key, math.nan) for key in block.keys)
        self._rows += 1

    def add_event(self, record: dict[str, Any]) -> None:
        if self._rows > self._rows_before:
            self._rows_before = self._rows
            self._elapsed = max(self._elapsed, self.blocks[-1].values[-1])
        elapsed = _number(record.get("elapsed_s"))
        if elapsed < self._elapsed:
            # The clock starts anew: another process goes on with the run.
            self._offset += self._elapsed
            self._offsets.append((self._rows, self._offset))
        if math.isfinite(elapsed):
            self._elapsed = elapsed
        if record.get("event") == "train_start":
            self._cuts.append((self._rows, len(self.events), _number(record.get("step"))))
        self.events.append({**record, "seconds": self._offset + self._elapsed})

    def steps(self) -> Columns:
        """The columns: of a step that was trained again, the later row."""
        keys = list(dict.fromkeys(key for block in self.blocks for key in block.keys))
        if not keys:
            return {}
        parts: dict[str, list[Column]] = {key: [] for key in keys}
        for block in self.blocks:
            table = np.frombuffer(block.values, dtype=np.float64).reshape(len(block), len(block.keys))
            for key in keys:
                missing = key not in block.keys
                parts[key].append(np.full(len(block), np.nan) if missing else table[:, block.keys.index(key)])
        columns = {key: np.concatenate(part) for key, part in parts.items()}
        starts, offsets = zip(*self._offsets, strict=True)
        which = np.searchsorted(starts, np.arange(self._rows), side="right") - 1
        columns["seconds"] = columns.pop("elapsed_s") + np.array(offsets)[which]
        kept = self._kept(columns["step"], [(row, step) for row, _, step in self._cuts])
        return columns if kept is None else {key: column[kept] for key, column in columns.items()}

    def evals(self) -> Columns:
        """The numbers of all evaluations, as `steps` gives those of steps.

        Those of one set have their own names: of the held-out part, or of the first set where nothing was held out.
        `SET/NAME` are those of the other sets.
        """
        sets = [record.get("set") for record in self.events if record.get("event") == "eval"]
        first = HELD_OUT if HELD_OUT in sets else next(iter(sets), None)
        places: list[int] = []
        records: list[dict[str, Any]] = []
        for place, record in enumerate(self.events):
            if record.get("event") != "eval":
                continue
            if record.get("set") == first or not records:
                places.append(place)
                records.append(dict(record))
            else:
                numbers = ((key, value) for key, value in record.items() if key not in _OF_A_PASS)
                records[-1] |= {f"{record.get('set')}/{key}": value for key, value in numbers}
        names = list(
            dict.fromkeys(
                key
                for record in records
                for key, value in record.items()
                if key not in _NOT_NUMBERS and _is_number(value)
            )
        )
        columns = {name: np.array([_number(record.get(name)) for record in records]) for name in names}
        if "step" not in columns:
            return columns
        cuts = [(int(np.searchsorted(places, event)), step) for _, event, step in self._cuts]
        kept = self._kept(columns["step"], cuts)
        return columns if kept is None else {key: column[kept] for key, column in columns.items()}

    def others(self) -> list[dict[str, Any]]:
        return [record for record in self.events if record.get("event") != "eval"]

    @staticmethod
    def _kept(step: Column, cuts: Sequence[tuple[int, float]]) -> NDArray[np.intp] | None:
        """The rows that count, in the order of steps; None for all as they are.

        Args:
            step: of each row.
            cuts: for each start, how many rows were before it, and its step: what they have beyond it was lost.
        """
        counts = np.ones(len(step), dtype=bool)
        for rows, start in cuts:
            counts[:rows] &= ~(step[:rows] > start)
        if counts.all() and bool(np.all(np.diff(step) > 0)):
            return None
        rows_left = np.flatnonzero(counts)
        # `unique` keeps the first of equal steps, and the last one is wanted.
        newest_first = rows_left[::-1]
        return newest_first[np.unique(step[newest_first], return_index=True)[1]]


class RunReader:
    """Reads a run's log, and each time what was appended since.

    Args:
        path: as for `load`.
        tail: read only so many bytes of the end at first; None reads everything.

    Raises:
        RunFolderError: as `load`.
    """

    def __init__(self, path: str | os.PathLike[str], *, tail: int | None = None) -> None:
        self.path = Path(path)
        self.file = _log_in(self.path)
        self._tail = tail
        self._begin()

    def _begin(self) -> None:
        self._logs: dict[str | None, _Log] = {}
        self._last_id: str | None = None
        self._offset = 0
        self._identity: tuple[int, int] | None = None
        self._unreadable = 0

    def read(self) -> Run:
        """The run, with all lines that are complete by now.

        Raises:
            RunFolderError: its log cannot be read.
        """
        try:
            modified = self._read_lines()
        except OSError as error:
            raise RunFolderError(f"{self.file}: cannot be read: {error.strerror or error}") from error
        folder = self.path if self.path.is_dir() else self.file.parent
        own = run_id_in(folder)
        run_id = own if own in self._logs else self._last_id
        log = self._logs.get(run_id, _Log())
        config = _config_in(folder)
        section = config.get("run")
        name = section.get("name") if isinstance(section, dict) else None
        return Run(
            path=self.path,
            name=name if isinstance(name, str) else folder.absolute().name,
            run_id=run_id,
            status=_status(log, folder, time.time() - modified),
            steps=log.steps(),
            evals=log.evals(),
            events=log.others(),
            config=config,
            unreadable=self._unreadable,
        )

    def _read_lines(self) -> float:
        """Take all new lines. Returns when the file was last written, in seconds since 1970."""
        with self.file.open("rb") as file:
            status = os.fstat(file.fileno())
            identity = (status.st_dev, status.st_ino)
            if self._identity not in (None, identity) or status.st_size < self._offset:
                self._begin()  # another run has taken its place
            if self._identity is None and self._tail is not None and status.st_size > self._tail:
                file.seek(status.st_size - self._tail)
                self._offset = file.tell() + len(file.readline())  # the first line is cut
            self._identity = identity
            file.seek(self._offset)
            self._take(file)
        return status.st_mtime

    def _take(self, lines: Iterator[bytes]) -> None:
        run_id: object = None
        log: _Log | None = None
        for line in lines:
            if not line.endswith(b"\n"):
                return  # it is being written, or never was to its end
            self._offset += len(line)
            try:
                record = from_json(line, cache_strings="none")  # four times as fast as `json`, and as exact
                own_id = record.get("run_id")
                event = record["event"]
            except (ValueError, AttributeError, KeyError):
                self._unreadable += not line.isspace()
                continue
            if log is None or own_id != run_id:
                run_id = own_id
                self._last_id = own_id if isinstance(own_id, str) else None
                log = self._logs.setdefault(self._last_id, _Log())
            if event == _STEP:
                log.add_step(record)
            else:
                log.add_event(record)


def _log_in(path: Path) -> Path:
    """The file of JSON lines that a run's folder has."""
    if path.is_file():
        return path
    if not path.is_dir():
        raise RunFolderError(f"{path}: there is no such run; name the folder of a run, or its file of JSON lines")
    section = _config_in(path).get("logging")
    named = section.get("json_file") if isinstance(section, dict) else None
    if isinstance(named, str) and (path / named).is_file():
        return path / named
    found = sorted(path.glob("*.jsonl"))
    if len(found) == 1:
        return found[0]
    if found:
        raise RunFolderError(f"{path}: has several logs; name one of {', '.join(file.name for file in found)}")
    raise RunFolderError(
        f"{path}: has no JSON lines, so nothing is known of its steps; train with logging.json_file=metrics.jsonl"
    )


def _config_in(folder: Path) -> dict[str, Any]:
    file = folder / RUN_CONFIG
    try:
        data = parse(file.read_text(encoding="utf-8"), str(file)).data
    except (OSError, ValueError, ConfigError):
        return {}
    return redacted(data) if isinstance(data, dict) else {}  # the user's own may have secrets


def _status(log: _Log, folder: Path, silent: float) -> Status:
    """How a run ended, or that it has not.

    Args:
        log: its lines.
        folder: of the run.
        silent: seconds since its last line.
    """
    ending: Status | None = None
    otherwise: Status = "stopped" if log.blocks else "ended"
    for record in log.events:
        if record.get("event") == "train_start":
            ending, otherwise = None, "stopped"
        elif record.get("event") == "interrupted":
            ending = "interrupted"
        elif record.get("event") == "train_end" and ending is None:
            ending = "finished"
    lives = holder_lives(folder)
    if lives is None:
        lives = silent < _SILENCE
    return ending or ("running" if lives else otherwise)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _number(value: object) -> float:
    """A number as a float; NaN for anything else."""
    if isinstance(value, int | float):
        try:
            return float(value)
        except OverflowError:
            return math.nan
    return math.nan


@dataclass(frozen=True)
class Summary:
    """One line about a run, from the end of its log.

    Attributes:
        path: its folder.
        status: as of `Run`; None where it left no log.
        step: the last step that was logged.
        target: how many steps it should take.
        loss: the last training loss.
        eval_loss: the last loss on held-out data.
        tokens: that it was trained on.
        written: when its log was last written, in seconds since 1970; of its folder without one.
    """

    path: Path
    status: Status | None
    step: int | None
    target: int | None
    loss: float | None
    eval_loss: float | None
    tokens: int | None
    written: float


_TAIL = 2**18  # bytes: some hundred lines


def summary(folder: Path) -> Summary:
    """What the end of a run's log says. It reads at most 256 KiB.

    Raises:
        OSError: the folder is gone.
    """
    section = _config_in(folder).get("run")
    planned = section.get("max_steps") if isinstance(section, dict) else None
    target = planned if isinstance(planned, int) else None
    try:
        reader = RunReader(folder, tail=_TAIL)
        run = reader.read()
        written = reader.file.stat().st_mtime
    except RunFolderError:
        return Summary(folder, None, None, target, None, None, None, folder.stat().st_mtime)
    starts = run.of("train_start")
    step, tokens = run.last("step"), run.last("tokens")
    told = starts[-1].get("target_steps") if starts else None
    return Summary(
        path=folder,
        status=run.status,
        step=None if step is None else int(step),
        target=told if isinstance(told, int) else target,
        loss=run.last("interval_loss", "loss"),
        eval_loss=run.last("eval.loss"),
        tokens=None if tokens is None else int(tokens),
        written=written,
    )
