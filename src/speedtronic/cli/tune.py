"""`speedtronic tune`: measure how a configuration runs fastest on this machine."""

from __future__ import annotations

import argparse
from pathlib import Path

from speedtronic.cli import output
from speedtronic.cli.arguments import add_config_arguments, load_from_arguments
from speedtronic.errors import RunFolderError


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "tune",
        help="measure how a configuration runs fastest on this machine",
        description="Measure real updates of a configuration in all ways that this machine offers, compilation too, "
        "which may take minutes. Prints a table; the star marks the fastest way for the run's length. Nothing is "
        "trained. Later runs of the same model with tune: auto find the plan in the cache, and tune: FILE.json names "
        "one. Exit code 1 where nothing can be measured.",
    )
    add_config_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print the plan as JSON instead of the table")
    parser.add_argument("-o", "--output", metavar="FILE.json", help="write the plan to a file")
    parser.add_argument("--device", metavar="D", help="auto, cpu, cuda, cuda:1, mps (run.device)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    config, plugins_folder = load_from_arguments(args, extra=[f"run.device={args.device}"] if args.device else [])

    from speedtronic.runtime import import_plugins, tune_from_config
    from speedtronic.tuning.cache import keep
    from speedtronic.tuning.plan import in_words

    import_plugins(config.plugins, plugins_folder)
    plan = tune_from_config(config)
    if args.output is not None:
        try:
            Path(args.output).write_text(plan.to_json(), encoding="utf-8")
        except OSError as error:
            raise RunFolderError(f"cannot write the plan to {args.output}: {error.strerror or error}") from error
    try:
        if plan.worth_keeping:
            keep(plan)
    except OSError as error:
        output.warn(f"the plan could not be kept in the cache: {error}")
    if args.json:
        output.write(plan.to_json())
        return 0 if plan.worth_keeping else 1
    if not plan.worth_keeping:
        output.write(f"{plan.table()}\nnothing could be measured\n")
        return 1
    faster = f", {plan.speedup:.2f} times as fast" if plan.speedup else ""
    output.write(f"{plan.table()}\nfor {plan.target} updates: {in_words(plan.choices.changes(plan.base))}{faster}\n")
    return 0
