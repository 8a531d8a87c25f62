"""What was measured before: a line of JSON for each time, and a drawing of all of them."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from speedtronic import __version__
from speedtronic.bench.figures import Outcome
from speedtronic.errors import DataError, MissingExtraError

PACKAGES = ("torch", "numpy", "tokenizers", "transformers", "lightning", "accelerate")


class Record(BaseModel):
    """What one command measured.

    Attributes:
        date: when it began.
        quick: the smallest sizes; no figure means anything.
        versions: of Speedtronic, Python, and the packages that figures depend on.
        machine: what tells machines apart, as in the plans of `tune`.
        rows: what came of each row.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    date: datetime
    quick: bool
    versions: dict[str, str]
    machine: dict[str, str]
    rows: dict[str, Outcome]

    def line(self) -> str:
        """It as a line of JSON."""
        return self.model_dump_json(exclude_none=True)

    def on(self) -> str:
        """The machine in words."""
        return ", ".join(
            f"{value} {name}" if name in {"cores", "threads"} else value for name, value in self.machine.items()
        )


def versions() -> dict[str, str]:
    """Those that are installed here."""
    found = {"speedtronic": __version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def now() -> datetime:
    return datetime.now(UTC).replace(microsecond=0)


def read(path: Path) -> list[Record]:
    """The records of a file, oldest first.

    Raises:
        DataError: it cannot be read, or a line of it is no record.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise DataError(f"cannot read the history {path}: {error.strerror or error}") from error
    records = []
    for number, line in enumerate(lines, 1):
        try:
            records.append(Record.model_validate_json(line))
        except ValidationError as error:
            problem = error.errors()[0]
            raise DataError(
                f"{path}: line {number} is no record of `speedtronic bench` ({problem['msg']}): remove it"
            ) from error
    return records


Series = dict[str, list[tuple[datetime, float]]]
"""Values of a figure over time, by machine."""


def panels(records: Sequence[Record]) -> dict[str, tuple[float, Series]]:
    """For each figure with a goal: the goal, and its values. Quick records are left out."""
    found: dict[str, tuple[float, Series]] = {}
    for record in records:
        for row, outcome in record.rows.items() if not record.quick else ():
            for figure in outcome.figures:
                if figure.goal is not None:
                    title = f"{row}: {figure.name}, goal {'≤' if figure.at_most is not None else '≥'} {figure.goal:g}"
                    _, series = found.setdefault(title, (figure.goal, {}))
                    series.setdefault(record.on(), []).append((record.date, figure.value))
    return found


def draw(records: Sequence[Record], path: Path) -> None:
    """Draw all figures that have a goal over time into an SVG file.

    Raises:
        MissingExtraError: matplotlib is not installed.
        DataError: there is nothing to draw.
        OSError: the file cannot be written.
    """
    drawn = panels(records)
    if not drawn:
        raise DataError("the history has no figure with a goal: measure first, and without --quick")
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtraError(
            "drawing needs matplotlib, which is not installed: install speedtronic[plot]"
        ) from error
    columns = min(3, len(drawn))
    rows = -(-len(drawn) // columns)
    machines = list(dict.fromkeys(record.on() for record in records))
    # Text stays text, and the same records give the same file.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "speedtronic", "font.size": 7}):
        page = Figure(figsize=(3.6 * columns, 1.8 * rows + 0.3 * len(machines)), layout="constrained")
        for axes, (title, (goal, series)) in zip(
            page.subplots(rows, columns, squeeze=False).flat, drawn.items(), strict=False
        ):
            for machine, points in series.items():
                dates, values = zip(*points, strict=True)
                axes.plot(dates, values, ".-", color=f"C{machines.index(machine)}", label=machine)
            axes.axhline(goal, color="0.4", linestyle="--", linewidth=0.8)
            axes.set_title(title, fontsize=7)
            axes.set_ylim(bottom=0)
            axes.tick_params(axis="x", labelrotation=30)
        for axes in page.axes[len(drawn) :]:
            axes.remove()
        known = {
            label: line for axes in page.axes for line, label in zip(*axes.get_legend_handles_labels(), strict=True)
        }
        page.legend(known.values(), known.keys(), loc="outside lower left", frameon=False)
        page.savefig(path, format="svg", metadata={"Date": None})
