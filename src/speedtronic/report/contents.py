"""What a report shows: of each run its facts, its tables of numbers, its events and its configuration; and the charts.

All of it is plain data for JSON. A table's columns are little-endian numbers in base64.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from speedtronic import __version__
from speedtronic.config import SpeedtronicConfig
from speedtronic.metrics.lines import duration, short_bytes, short_number
from speedtronic.metrics.records import LEVELS, WARNING
from speedtronic.report.sampling import bucket_percentiles, moving_average, spike_rows
from speedtronic.runs import Column, Columns, Run, loss_column

_BUCKETS = 800  # for one run: more than pixels of a wide screen can tell apart, as each has a low and a high
_FEWEST_BUCKETS = 150
_WINDOW = 50  # that of a smoothed curve is this part of the run
_SMOOTHED = ("loss", "grad_norm", "throughput")
_STEP_TIMES = 120  # buckets at most, of at least ten rows each
_MOST_MARKS = 400  # of one kind of event
_MOST_MESSAGES = 200
_MOST_SAMPLES = 50

X = ("step", "tokens", "seconds")
_DATA_KEYS = {
    "tokenizer": "tokenizer",
    "block_size": "tokens in a sample",
    "micro_batch_size": "samples in a micro batch",
    "target_batch_size": "samples in an update",
    "validation_fraction": "held-out share",
    "shuffle": "shuffled",
}
# Counts need more digits than a float32 has.
_EXACT = frozenset({*X, "samples"})


class Series(NamedTuple):
    """One curve of each run in a chart: a column of one of the run's tables.

    Attributes:
        table: the key of the table.
        column: of it.
        label: in the legend.
        style: `line`, `faint`, `dashed`, or `dots`.
    """

    table: str
    column: str
    label: str
    style: str = "line"


class Chart(NamedTuple):
    """One chart.

    Attributes:
        title: what it shows.
        hint: what a reader may not know.
        unit: how its numbers are written: `number`, `bytes`, `percent`, `seconds`, `rate` or `lr`.
        series: its curves.
        wide: whether it takes the whole width.
    """

    title: str
    hint: str
    unit: str
    series: tuple[Series, ...]
    wide: bool = False


_CHARTS = (
    Chart(
        "Loss",
        "of training, and on held-out data",
        "number",
        (
            Series("steps", "loss", "training", "faint"),
            Series("steps", "loss_smoothed", "training, smoothed"),
            Series("evals", "loss", "held out", "dots"),
        ),
        wide=True,
    ),
    Chart("Learning rate", "that the update used", "lr", (Series("steps", "lr", "learning rate"),)),
    Chart(
        "Gradient norm",
        "before clipping",
        "number",
        (Series("steps", "grad_norm", "of a step", "faint"), Series("steps", "grad_norm_smoothed", "smoothed")),
    ),
    Chart(
        "Throughput",
        "without evaluations",
        "rate",
        (Series("steps", "throughput", "of a step", "faint"), Series("steps", "throughput_smoothed", "smoothed")),
    ),
    Chart(
        "Time of a step",
        "percentiles of neighbours",
        "seconds",
        (
            Series("times", "p50", "50%"),
            Series("times", "p95", "95%", "dashed"),
            Series("times", "p99", "99%", "faint"),
        ),
    ),
    Chart("Memory", "the most so far", "bytes", (Series("steps", "peak_memory_bytes", "peak memory"),)),
    Chart(
        "Model FLOP utilisation",
        "share of the device's peak that the model's own arithmetic used",
        "percent",
        (Series("steps", "mfu", "utilisation"),),
    ),
)
_NODE_CHARTS = (
    Chart(
        "Version",
        "of the global weights that a node trains from",
        "number",
        (Series("installs", "version", "version"),),
    ),
    Chart(
        "Staleness",
        "rounds behind, with new weights",
        "number",
        (Series("installs", "staleness", "staleness"), Series("installs", "pending", "pending deltas", "dashed")),
    ),
    Chart("Bytes sent", "pseudo-gradients that the store has", "bytes", (Series("sent", "bytes", "sent"),)),
    Chart("Versions published", "by the master", "number", (Series("outer", "version", "version"),)),
    Chart(
        "A version's deltas",
        "those that entered, and those that were refused",
        "number",
        (Series("outer", "deltas", "entered"), Series("outer", "rejected", "refused", "dashed")),
    ),
)


def contents(runs: Sequence[Run]) -> dict[str, Any]:
    """Everything that the page needs to show some runs, in values for JSON."""
    buckets = max(_FEWEST_BUCKETS, _BUCKETS // max(1, len(runs)))
    names = labels(runs)
    shown = [_run(run, name, buckets) for run, name in zip(runs, names, strict=True)]
    return {
        "version": __version__,
        "runs": shown,
        "charts": [_plain(chart) for chart in (*_with_metrics(_CHARTS, runs),) if _has_numbers(chart, shown)],
        "node_charts": [_plain(chart) for chart in _NODE_CHARTS if _has_numbers(chart, shown)],
        "defaults": _flat(SpeedtronicConfig().to_dict()),
    }


def labels(runs: Sequence[Run]) -> list[str]:
    """A name for each run that no other has: its own, its folder's where two are called the same, or with a number."""
    own = [run.name for run in runs]
    if len(set(own)) < len(own):
        own = [f"{run.name} ({run.path})" for run in runs]
    return [name if own.count(name) == 1 else f"{name} #{place}" for place, name in enumerate(own, 1)]


def _with_metrics(charts: Iterable[Chart], runs: Sequence[Run]) -> Iterable[Chart]:
    """The charts, and behind the loss one for each further number that an evaluation gave."""
    known = {*X, "loss", "targets", "batches", "duration_s", "version", "best_version"}
    metrics = dict.fromkeys(name for run in runs for name in run.evals if name not in known)
    loss, *others = charts
    counted = {unit for run in runs if (unit := _throughput(run.steps)[0])}
    others = [
        each._replace(hint=f"{' or '.join(counted)} a second") if each.title == "Throughput" else each
        for each in others
    ]
    found = (Chart(f"Held out: {name}", "", "number", (Series("evals", name, name, "dots"),)) for name in metrics)
    return [loss, *found, *others]


def _has_numbers(chart: Chart, runs: Sequence[Mapping[str, Any]]) -> bool:
    return any(
        series.column in run["tables"].get(series.table, {"columns": {}})["columns"]
        for run in runs
        for series in chart.series
    )


def _plain(chart: Chart) -> dict[str, Any]:
    return {**chart._asdict(), "series": [series._asdict() for series in chart.series]}


def _run(run: Run, label: str, buckets: int) -> dict[str, Any]:
    places = _Places(run)
    return {
        "label": label,
        "status": run.status,
        "facts": _facts(run),
        "tables": {name: table for name, table in _tables(run, places, buckets).items() if table is not None},
        "marks": _marks(run, places),
        "config": _flat(run.config),
        "environment": _environment(run),
        "data": _data(run),
        "node": _node(run),
        "samples": [
            {"step": record.get("step"), "prompt": _text(record.get("prompt")), "text": _text(record.get("text"))}
            for record in run.of("sample")[-_MOST_SAMPLES:]
        ],
        "messages": _messages(run),
    }


# ---------------------------------------------------------------------- tables


class _Places:
    """Where an event lies on each of the horizontal axes, between the steps that were logged around it."""

    def __init__(self, run: Run) -> None:
        self._steps = run.steps

    def of(self, columns: Columns) -> Columns:
        """Columns with all of `X` that can be told. They have `seconds`, and may have `step`."""
        steps = self._steps
        found = dict(columns)
        if "step" not in found and "step" in steps:
            found["step"] = np.round(np.interp(found["seconds"], steps["seconds"], steps["step"]))
        if "tokens" not in found and "step" in found and "tokens" in steps:
            found["tokens"] = np.interp(found["step"], steps["step"], steps["tokens"])
        return found

    def of_records(self, records: Sequence[Mapping[str, Any]], *keys: str) -> Columns:
        """The numbers of records under some keys, as columns, and where they lie."""
        with_step = bool(records) and all("step" in record for record in records)
        names = ("seconds", "step", *keys) if with_step else ("seconds", *keys)
        return self.of({name: np.array([_number(record.get(name)) for record in records]) for name in names})


def _tables(run: Run, places: _Places, buckets: int) -> dict[str, dict[str, Any] | None]:
    sent = run.of("delta_uploaded")
    uploads = places.of_records(sent, "bytes")
    uploads["bytes"] = np.cumsum(np.nan_to_num(uploads["bytes"]))
    return {
        "steps": _steps_table(run.steps, buckets),
        "times": _times_table(run.steps),
        "evals": _table(places.of(run.evals)) if len(run.evals.get("loss", ())) else None,
        "installs": _table(places.of_records(run.of("global_installed"), "version", "staleness", "pending")),
        "sent": _table(uploads),
        "outer": _table(places.of_records(run.of("outer_step"), "version", "deltas", "nodes", "fraction", "rejected")),
    }


def _steps_table(steps: Columns, buckets: int) -> dict[str, Any] | None:
    if not steps:
        return None
    loss = steps.get(loss_column(steps), np.full(len(steps["step"]), np.nan))
    columns: Columns = {
        **{name: steps[name] for name in (*X, "samples") if name in steps},
        "loss": loss,
        **{name: steps[name] for name in ("grad_norm", "peak_memory_bytes", "mfu") if name in steps},
        **({"throughput": _throughput(steps)[1]} if _throughput(steps)[0] else {}),
    }
    if (rate := steps.get("lr_applied", steps.get("lr"))) is not None:
        columns["lr"] = rate
    rows = spike_rows([column for name, column in columns.items() if name not in _EXACT], buckets)
    taken = {name: column[rows] for name, column in columns.items()}
    for name in set(_SMOOTHED) & columns.keys():
        taken[f"{name}_smoothed"] = moving_average(columns[name], max(5, len(loss) // _WINDOW), rows)
    return _table(taken, of=len(loss))


def _throughput(steps: Columns) -> tuple[str, Column]:
    """What is counted, and how many a second: tokens; samples, where batches have none."""
    for unit in ("tokens", "samples"):
        for name in (f"interval_{unit}_per_sec", f"{unit}_per_sec"):
            if name in steps and np.nansum(steps[name]) > 0:
                return unit, steps[name]
    return "", np.empty(0)


def _times_table(steps: Columns) -> dict[str, Any] | None:
    rate = steps.get("interval_steps_per_sec", np.empty(0))
    with np.errstate(divide="ignore"):
        rows, (p50, p95, p99) = bucket_percentiles(1 / rate, max(1, min(_STEP_TIMES, len(rate) // 10)), (50, 95, 99))
    return _table({**{name: steps[name][rows] for name in X if name in steps}, "p50": p50, "p95": p95, "p99": p99})


def _table(columns: Columns, of: int | None = None) -> dict[str, Any] | None:
    """A table for the page; None where it has no row. Columns without a finite number are left out.

    Args:
        columns: of equal length.
        of: how many rows there were before some were chosen.
    """
    rows = len(next(iter(columns.values()))) if columns else 0
    if rows == 0:
        return None
    return {
        "rows": rows,
        "of": rows if of is None else of,
        "columns": {
            name: {"bits": 64, "data": _base64(column, "<f8")}
            if name in _EXACT
            else {"bits": 32, "data": _base64(column, "<f4")}
            for name, column in columns.items()
            if np.isfinite(column).any()
        },
    }


def _base64(column: Column, kind: str) -> str:
    with np.errstate(over="ignore"):  # what a float32 cannot hold becomes infinite, which is not drawn
        return base64.b64encode(column.astype(kind).tobytes()).decode("ascii")


# ---------------------------------------------------------------------- events


def _marks(run: Run, places: _Places) -> list[dict[str, Any]]:
    """What happened, by kind: where on each axis, and a few words about each."""
    kinds: dict[str, list[tuple[Mapping[str, Any], str]]] = {}
    starts = 0
    for record in run.events:
        kind, words = _mark(record, starts)
        starts += record.get("event") == "train_start"
        if kind is not None:
            kinds.setdefault(kind, []).append((record, words))
    found = []
    for kind, records in kinds.items():
        kept = [records[row] for row in np.unique(np.linspace(0, len(records) - 1, _MOST_MARKS).astype(int))]
        by_step = [pair for pair in kept if "step" in pair[0]]
        for group in (by_step, [pair for pair in kept if "step" not in pair[0]]):
            columns = places.of_records([record for record, _ in group])
            table = _table(columns)
            if table is not None:
                found.append(
                    {"kind": kind, "count": len(records), "table": table, "words": [words for _, words in group]}
                )
    return found


def _mark(record: Mapping[str, Any], starts: int) -> tuple[str | None, str]:
    """The kind of an event on the time line, and its words; None for an event that is not on it."""
    event = record.get("event")
    step = f"step {record.get('step')}"
    match event:
        case "train_start":
            return ("resume", f"continued at {step}") if starts else ("start", f"began at {step}")
        case "train_end":
            return "end", f"ended at {step}"
        case "interrupted":
            return "interruption", f"{_text(record.get('signal'))} at {step}"
        case "checkpoint":
            return ("checkpoint", step) if record.get("path") else ("failed save", _text(record.get("error")))
        case "optimizer_step_skipped":
            return "skipped update", f"{step}: {_text(record.get('reason'))}"
        case "nonfinite":
            return "not finite", f"{step}: {_text(record.get('action'))}"
        case "global_installed":
            return "new weights", f"version {record.get('version')} at {step}"
        case "delta_rejected":
            return "refused delta", f"delta {record.get('seq')}: {_text(record.get('reason'))}"
        case "delta_upload_skipped" | "delta_upload_failed":
            return "delta not sent", _text(record.get("reason") or record.get("error"))
        case "log" if LEVELS.get(str(record.get("level")), 0) >= WARNING:
            return "warning", _text(record.get("message"))
    return None, ""


def _messages(run: Run) -> list[list[str]]:
    """The warnings and errors, the newest last: time, level and words."""
    found = [record for record in run.of("log") if LEVELS.get(str(record.get("level")), 0) >= WARNING]
    return [
        [_text(record.get("time"))[:19].replace("T", " "), _text(record.get("level")), _text(record.get("message"))]
        for record in found[-_MOST_MESSAGES:]
    ]


# ---------------------------------------------------------------------- facts


def _facts(run: Run) -> list[list[str]]:
    """What a reader wants to know first: a name, a text, and a note or nothing."""
    facts = []
    starts = run.of("train_start") or [{}]
    step, target = run.last("step"), starts[-1].get("target_steps")
    if step is not None:
        facts.append(["Steps", f"{int(step):,}", f"of {target:,}" if isinstance(target, int) else ""])
    loss = run.last(loss_column(run.steps))
    if loss is not None:
        facts.append(["Training loss", f"{loss:.4g}", "at the end" if run.status != "running" else "now"])
    held_out = run.evals.get("loss", np.empty(0))
    if np.isfinite(held_out).any():
        best = int(np.nanargmin(held_out))
        at = run.evals["step"][best] if "step" in run.evals else math.nan
        facts.append(["Best held-out loss", f"{held_out[best]:.4g}", f"at step {int(at):,}" if at == at else ""])
    for name in ("tokens", "samples"):
        if used := run.last(name):
            facts.append([name.capitalize(), short_number(used), "trained on"])
            break
    began = _text(starts[0].get("time"))[:16].replace("T", " ")
    seconds = max([_number(record.get("seconds")) for record in run.events[-1:]] + [run.last("seconds") or 0.0])
    if seconds:
        facts.append(["Time trained", duration(seconds), f"since {began} UTC" if began else ""])
    unit, rate = _throughput(run.steps)
    if unit:
        facts.append(["Throughput", f"{short_number(float(np.nanmedian(rate)))}/s", f"{unit}, median"])
    rates = run.steps.get("interval_steps_per_sec", np.empty(0))
    rates = rates[rates > 0]
    if len(rates):
        low, high = np.percentile(1 / rates, (50, 99))
        facts.append(["Time of a step", _seconds(low), f"99% within {_seconds(high)}"])
    if memory := run.last("peak_memory_bytes"):
        facts.append(["Peak memory", short_bytes(memory), ""])
    if isinstance(starts[-1].get("parameters"), int):
        facts.append(["Parameters", short_number(starts[-1]["parameters"]), ""])
    if "device" in starts[-1]:
        facts.append(["Device", _text(starts[-1]["device"]), _text(starts[-1].get("precision"))])
    return facts


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def _environment(run: Run) -> list[list[str]]:
    """Versions and the machine, as the run's last process found them."""
    found = (run.of("environment") or [{}])[-1]
    facts = [
        [key, _text(value)]
        for key, value in found.items()
        if key not in ("event", "elapsed_s", "time", "run_id", "seconds")
    ]
    if run.run_id is not None:
        facts.append(["run_id", run.run_id])
    return [*facts, ["processes", str(len(run.of("train_start")))]]


def _data(run: Run) -> list[list[str]]:
    """Where the data came from, and how much of it was used."""
    section = run.config.get("data")
    facts = []
    if isinstance(section, Mapping):
        names = ("dataset", "shards", "text_path", "mixture", "chat")
        source = next((name for name in names if section.get(name) is not None), "synthetic")
        facts.append(["source", source if source == "synthetic" else f"{source}: {_in_words(section[source])}"])
        for name, words in _DATA_KEYS.items():
            if section.get(name) is not None:
                facts.append([words, _in_words(section[name])])
    for name in ("samples", "tokens"):
        if used := run.last(name):
            facts.append([f"{name} trained on", f"{int(used):,}"])
    return facts


def _node(run: Run) -> dict[str, Any] | None:
    """What a run did as a node, or as the master, of DumbDiLoCo; None where it is neither."""
    counts = {
        name: len(run.of(event))
        for name, event in (
            ("versions published", "outer_step"),
            ("weights taken", "global_installed"),
            ("deltas sent", "delta_uploaded"),
            ("deltas not sent", "delta_upload_failed"),
            ("boundaries skipped", "delta_upload_skipped"),
            ("deltas refused", "delta_rejected"),
        )
    }
    if not any(counts.values()):
        return None
    sent = sum(_number(record.get("bytes")) for record in run.of("delta_uploaded"))
    installs = run.of("global_installed") or run.of("outer_step")
    reasons = dict.fromkeys(_text(record.get("reason")) for record in run.of("delta_rejected"))
    return {
        "role": "master" if counts["versions published"] else "node",
        "newest version": _text(installs[-1].get("version")) if installs else "none",
        **{name: str(count) for name, count in counts.items()},
        "bytes sent": short_bytes(sent),
        "why refused": "; ".join(reasons),
    }


def _flat(tree: Mapping[str, Any], above: str = "") -> dict[str, str]:
    """A configuration as texts by full key."""
    found: dict[str, str] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            found |= _flat(value, f"{above}{key}.")
        else:
            found[f"{above}{key}"] = _in_words(value)
    return found


def _in_words(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _text(value: Any) -> str:
    return "" if value is None else str(value)


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else math.nan
