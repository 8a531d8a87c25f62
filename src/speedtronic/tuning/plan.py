"""What a run may choose for its machine, what that was measured to be worth, and the plan that came of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from speedtronic.config import SpeedtronicConfig
from speedtronic.config.base import AutoSize
from speedtronic.errors import ConfigError

# Where `data.micro_batch_size: auto` begins: it fits nearly always, and is no bad size where nothing is measured.
FIRST_SIZE = 8
# Two ways that differ by less than this are as good as each other: it is about the noise of a short measurement.
MARGIN = 0.03


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Choices(_Record):
    """How a run runs. None of it changes what is computed, but for rounding.

    Attributes:
        micro_batch_size: `data.micro_batch_size`.
        merged: how many micro batches of an update run as one forward pass.
        threads: `run.threads`; None is torch's own number.
        precision: `precision.mode`.
        fused: `optimizer.fused`.
        compile, compile_mode, regional: `compile`, `compile_options.mode`, `compile_options.regional`.
        num_workers, prefetch_factor: those of `data`.
    """

    micro_batch_size: int = Field(ge=1)
    merged: int = Field(default=1, ge=1)
    threads: int | None = None
    precision: str = "auto"
    fused: bool | None = None
    compile: bool = False
    compile_mode: str | None = None
    regional: bool = False
    num_workers: int = 0
    prefetch_factor: int | None = None

    @classmethod
    def of(cls, config: SpeedtronicConfig) -> Self:
        """What a configuration says, with single micro batches; a size of `auto` begins at 8 or below."""
        size, target = config.data.micro_batch_size, config.data.target_batch_size
        if isinstance(size, AutoSize):
            size = max(n for n in range(1, FIRST_SIZE + 1) if target % n == 0)
        return cls(
            micro_batch_size=size,
            threads=config.run.threads,
            precision=config.precision.mode,
            fused=config.optimizer.fused,
            compile=config.compile,
            compile_mode=config.compile_options.mode,
            regional=config.compile_options.regional,
            num_workers=config.data.num_workers,
            prefetch_factor=config.data.prefetch_factor,
        )

    def but(self, **changes: Any) -> Choices:
        """These choices with some others."""
        return self.model_copy(update=changes)

    def applied_to(self, config: SpeedtronicConfig) -> SpeedtronicConfig:
        """A copy of a configuration that says what was chosen. `merged` has no key: the trainer gets it.

        Raises:
            ConfigError: a value is not one of its key, or does not fit the others.
        """
        copy = config.model_copy(deep=True)
        for section, key, value in (
            (copy.data, "micro_batch_size", self.micro_batch_size),
            (copy.run, "threads", self.threads),
            (copy.precision, "mode", self.precision),
            (copy.optimizer, "fused", self.fused),
            (copy, "compile", self.compile),
            (copy.compile_options, "mode", self.compile_mode),
            (copy.compile_options, "regional", self.regional),
            (copy.data, "num_workers", self.num_workers),
            (copy.data, "prefetch_factor", self.prefetch_factor),
        ):
            # What stays does not count as given.
            if value != section.plain()[key]:
                setattr(section, key, value)
        return copy.validate()

    def changes(self, base: Choices) -> dict[str, Any]:
        """What differs from `base`."""
        theirs = base.model_dump()
        return {key: value for key, value in self.model_dump().items() if value != theirs[key]}


class Measured(_Record):
    """One way to run, and how long it took.

    Attributes:
        choices: the way.
        step_seconds: seconds of an update, the median; None where it could not be measured.
        start_seconds: what its first updates took more than later ones, as compiling does.
        note: why it could not be measured, or was left early.
    """

    choices: Choices
    step_seconds: float | None
    start_seconds: float = 0.0
    note: str = ""

    def seconds(self, steps: int) -> float:
        """Of a run of so many updates; infinite where it was not measured."""
        return float("inf") if self.step_seconds is None else self.start_seconds + steps * self.step_seconds


class Plan(_Record):
    """How a run runs, and why.

    Attributes:
        choices: what was chosen.
        base: what the configuration says by itself.
        target: the step that the run was to reach.
        machine: what it was decided on: a plan holds where this is equal.
        key: of what the measurements depend on: model, shapes, configuration and machine.
        measured: all that was measured, `base` first; empty where the run is too short for it.
        complete: whether no way was left out for lack of time.
    """

    version: Literal[1] = 1
    choices: Choices
    base: Choices
    target: int
    machine: dict[str, str]
    key: str
    measured: tuple[Measured, ...] = ()
    complete: bool = False

    @property
    def worth_keeping(self) -> bool:
        """Whether any way could be measured: where none could, the fault may be in code that is mended next."""
        return any(row.step_seconds is not None for row in self.measured)

    @property
    def speedup(self) -> float | None:
        """How many times as fast a step is as that of the configuration; None where nothing was measured."""
        if not self.measured or self.measured[0].step_seconds is None:
            return None
        chosen = next((row for row in self.measured if row.choices == self.choices), None)
        return (
            None if chosen is None or not chosen.step_seconds else self.measured[0].step_seconds / chosen.step_seconds
        )

    def for_steps(self, steps: int, target: int) -> Plan:
        """The plan of a run of `steps` more updates, up to the step `target`, from the same measurements."""
        return self.model_copy(update={"choices": fastest(self.measured, steps).choices, "target": target})

    def table(self) -> str:
        """What was measured, as a table for people; the chosen row has a star."""
        lines = ["   ms/step  start s  how"]
        for row in self.measured:
            star = "*" if row.choices == self.choices else " "
            time = "–" if row.step_seconds is None else f"{1e3 * row.step_seconds:.2f}"
            how = in_words(row.choices.changes(self.base)) + (f" ({row.note})" if row.note else "")
            lines.append(f"{star}{time:>9}  {row.start_seconds:7.1f}  {how}")
        return "\n".join(lines)

    def to_json(self) -> str:
        """The plan as JSON, which `tune: PATH` reads."""
        return json.dumps(self.model_dump(), indent=2, ensure_ascii=False) + "\n"


def fastest(measured: Sequence[Measured], steps: int) -> Measured:
    """The way that takes the least time for so many updates; the earlier one, where they are as good as each other."""
    best = measured[0]
    for row in measured[1:]:
        if row.seconds(steps) < (1 - MARGIN) * best.seconds(steps):
            best = row
    return best


def in_words(changes: dict[str, Any]) -> str:
    """Choices for people."""
    return ", ".join(f"{key}={str(value).lower()}" for key, value in changes.items()) or "as configured"


def read_plan(path: Path) -> Plan:
    """Read a plan from a file of JSON.

    Raises:
        ConfigError: the file cannot be read, or is no plan.
    """
    try:
        return Plan.model_validate_json(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"tune: cannot read the plan {path}: {error.strerror or error}") from error
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in problem["loc"])
        raise ConfigError(
            f"tune: {path} is no plan of this version ({place + ': ' if place else ''}{problem['msg']}); make one with "
            "`speedtronic tune CONFIG -o FILE.json`"
        ) from error
