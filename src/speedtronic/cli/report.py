"""`speedtronic report | runs`: a page about runs, and a table of those in a folder."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from speedtronic.cli import output
from speedtronic.errors import ConfigError, RunFolderError

PAGE = "report.html"


def add_report(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "report",
        help="write a page that shows runs: curves, events, configuration",
        description="Write one HTML page that shows what runs have logged: loss, learning rate, throughput, memory, "
        "events, configuration and how it differs, nodes. It needs no network and no other file. A run must have a "
        "log: logging.json_file.",
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="the folder of a run, or its file of JSON lines")
    parser.add_argument("-o", "--output", metavar="FILE.html", help="where to write; without it RUN/report.html")
    parser.add_argument(
        "--live", action="store_true", help="serve the page on 127.0.0.1 instead, and follow runs that go on"
    )
    parser.add_argument("--port", type=int, metavar="N", help="of the server of --live; without it a free one")
    parser.set_defaults(run=run_report)


def run_report(args: argparse.Namespace) -> int:
    if args.port is not None and not args.live:
        raise ConfigError("--port is of the server of --live, which was not asked for")
    if args.live and args.output is not None:
        raise ConfigError("--live serves the page, and -o writes it to a file: choose one")
    if args.port is not None and not 0 <= args.port < 2**16:
        raise ConfigError(f"--port is a number from 0 to 65535, not {args.port}")

    from speedtronic.runs import RunReader

    readers = [RunReader(path) for path in args.runs]
    if args.live:
        from speedtronic.report.live import LiveReport

        with LiveReport(readers, args.port or 0) as server:
            output.write(f"{server.url} shows {output.counted(len(readers), 'run')}; Ctrl-C ends it\n")
            server.serve_forever()

    from speedtronic.durable.files import FileSystem, replace_file
    from speedtronic.report import report_page

    runs = [reader.read() for reader in readers]
    for run in runs:
        if run.unreadable:
            lines = output.counted(run.unreadable, "line")
            print(f"warning: {run.path}: {lines} of the log cannot be read and were left out", file=sys.stderr)
    first = readers[0]
    target = Path(args.output) if args.output is not None else first.file.parent / PAGE
    if args.output is None and first.path.is_dir():
        target = first.path / PAGE
    page = report_page(runs).encode("utf-8")
    try:
        replace_file(FileSystem(), target, page)
    except OSError as error:
        raise RunFolderError(f"cannot write {target}: {error.strerror or error}; name another file with -o") from error
    from speedtronic.metrics.lines import short_bytes

    output.write(f"{target} ({short_bytes(len(page))}) shows {output.counted(len(runs), 'run')}\n")
    return 0


def add_runs(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "runs",
        help="list the runs in a folder: how far they are, and how well they do",
        description="List the runs in a folder and up to three levels below it. A run is `stopped` where its process "
        "ended without a word, as by a kill or an error.",
    )
    parser.add_argument("folder", nargs="?", default="runs", metavar="DIR", help="the folder (default: runs)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    parser.set_defaults(run=run_runs)


def run_runs(args: argparse.Namespace) -> int:
    from speedtronic.metrics.lines import short_number
    from speedtronic.runs import find, summary

    top = Path(args.folder)
    found = [summary(path) for path in find(top)]
    if args.json:
        fields = ("status", "step", "target", "loss", "eval_loss", "tokens", "written")
        listed = [{"path": str(each.path), **{name: getattr(each, name) for name in fields}} for each in found]
        output.write(json.dumps(listed, indent=2) + "\n")
        return 0
    if not found:
        output.write(f"no runs in {top}\n")
        return 0

    def shown(value: float | None) -> str:
        return "-" if value is None else f"{value:.4f}"

    now = time.time()
    rows = [
        (
            output.printable(str(each.path.relative_to(top)) if each.path != top else each.path.name),
            each.status or "no log",
            ("-" if each.step is None else str(each.step)) + ("" if each.target is None else f"/{each.target}"),
            shown(each.loss),
            shown(each.eval_loss),
            "-" if each.tokens is None else short_number(each.tokens),
            output.age(now - each.written),
        )
        for each in found
    ]
    output.write_table(("RUN", "STATUS", "STEP", "LOSS", "EVAL LOSS", "TOKENS", "AGE"), rows)
    return 0
