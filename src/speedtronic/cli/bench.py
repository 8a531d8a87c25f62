"""`speedtronic bench`: how fast this machine is, beside the same work by hand."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from speedtronic.bench.rows import ROWS, measure
from speedtronic.cli import output
from speedtronic.errors import ConfigError, RunFolderError

if TYPE_CHECKING:
    from speedtronic.bench.figures import Figure, Outcome
    from speedtronic.bench.history import Record


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    rows = "\n".join(f"  {name:18}{row.about}" for name, row in ROWS.items())
    parser = commands.add_parser(
        "bench",
        help="measure how fast this machine is, beside the same work by hand",
        description="Measure this machine row by row, each in a process of its own. All rows take half an hour. What\n"
        "is compared takes turns, and a figure is the median of the ratios of all rounds: best on a machine that does\n"
        "nothing else. A row that lacks something here says what.",
        epilog=f"rows:\n{rows}\n\nexit code: 0 done, even if a goal is missed; 1 a row fails; 2 bad use",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", nargs="+", choices=ROWS, metavar="ROW", help="these rows alone")
    parser.add_argument("--quick", action="store_true", help="the smallest sizes, to see that it runs")
    parser.add_argument("--rounds", type=int, metavar="N", help="rounds of each row, in place of its own number")
    parser.add_argument("--device", default="cpu", metavar="D", help="of checkpoints and optimizers (default: cpu)")
    parser.add_argument("--text", type=Path, metavar="FILE", help="of the row time-to-loss: about a megabyte")
    parser.add_argument("--json", action="store_true", help="print one line of JSON instead")
    parser.add_argument("--history", type=Path, metavar="FILE.jsonl", help="append that line to a file")
    parser.add_argument("--plot", type=Path, metavar="FILE.svg", help="measure nothing: draw what --history holds")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if args.rounds is not None and args.rounds < 1:
        raise ConfigError(f"--rounds: {args.rounds} is no number of rounds; it is at least 1")
    if args.plot is not None:
        return _draw(args.history, args.plot)

    from speedtronic.bench.figures import Settings
    from speedtronic.bench.history import Record, now, versions
    from speedtronic.precision import resolve_device
    from speedtronic.tuning.cache import machine_of

    machine = machine_of(resolve_device(args.device))
    settings = Settings(quick=args.quick, rounds=args.rounds, device=args.device, text=args.text)
    record = Record(date=now(), quick=args.quick, versions=versions(), machine=machine, rows={})
    with _appended(record, args.history):
        for name in args.only or ROWS:
            if not args.json:
                output.write(f"{name}: {ROWS[name].about}\n")
            record.rows[name] = measure(name, settings)
            if not args.json:
                output.write(described(record.rows[name]))
    if args.json:
        output.write(record.line() + "\n")
    else:
        output.write(f"on {record.on()}; torch {record.versions['torch']}\n")
        if args.quick:
            output.write("quick: no figure means anything\n")
    return 1 if any(outcome.failed for outcome in record.rows.values()) else 0


@contextmanager
def _appended(record: Record, path: Path | None) -> Iterator[None]:
    """Append the record to a file at the end, also when Ctrl-C ends it early."""
    from speedtronic.metrics.appendfile import AppendFile

    if path is None:
        yield
        return
    with _writing(f"the history {path}"):
        file = AppendFile(path)
    with closing(file):
        try:
            yield
        finally:
            if record.rows:
                with _writing(f"the history {path}"):
                    file.write_line(record.line().encode())


@contextmanager
def _writing(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RunFolderError(f"cannot write {what}: {error.strerror or error}") from error


def _draw(history: Path | None, plot: Path) -> int:
    from speedtronic.bench.history import draw, read

    if history is None:
        raise ConfigError("--plot: what should be drawn? Name a file that --history has written")
    records = read(history)
    with _writing(str(plot)):
        draw(records, plot)
    return 0


def described(outcome: Outcome) -> str:
    """A line for each figure, or the reason why there are none."""
    if outcome.failed is not None:
        return f"  failed: {outcome.failed}\n"
    if outcome.left_out is not None:
        return f"  left out: {outcome.left_out}\n"
    return "".join(f"  {_in_words(figure)}\n" for figure in outcome.figures)


def _in_words(figure: Figure) -> str:
    spread = f"({min(figure.rounds):.3g} … {max(figure.rounds):.3g})" if len(figure.rounds) > 1 else ""
    goal = ""
    if figure.goal is not None:
        goal = f"goal {'≤' if figure.at_most is not None else '≥'} {figure.goal:g}: {'met' if figure.met else 'missed'}"
    return f"{figure.name:48} {figure.value:8.3f}  {spread:20} {goal}".rstrip()
