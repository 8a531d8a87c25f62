"""The `speedtronic` command. One file per topic; what a command needs is imported when it runs."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any

from speedtronic import __version__
from speedtronic.cli import (
    bench,
    checkpoints,
    configuration,
    data,
    diloco,
    doctor,
    evaluate,
    generate,
    output,
    report,
    train,
    tune,
)
from speedtronic.cli.arguments import CommandParser
from speedtronic.cli.tracebacks import format_error
from speedtronic.errors import ConfigError, NonFiniteError, ScalerOverflowError, SpeedtronicError


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    0 done; 1 a failure while running; 2 bad use, configuration or input, with one clear message; 128 + n a signal.
    """
    try:
        return _exit_code(argv)
    except KeyboardInterrupt:
        return 130


def entry() -> None:
    """The console script."""
    sys.exit(main())


def _exit_code(argv: Sequence[str] | None) -> int:
    """Run one command and report whatever goes wrong."""
    output.prepare()
    try:
        try:
            args = build_parser().parse_args(argv)
            _check_working_directory()
            # Of the processes that torchrun starts, all train, and one does anything else.
            code: int = args.run(args) if args.run is train.run or _leads() else 0
        except SystemExit as stop:
            # As Python itself does: `sys.exit("why")` in a user's code prints the reason and is 1.
            if stop.code is None or isinstance(stop.code, int):
                code = stop.code or 0
            else:
                print(stop.code, file=sys.stderr)
                code = 1
        output.finish()
    except SpeedtronicError as error:
        if isinstance(error, output.OutputError):
            output.abandon()
        # The ranks of a machine read one configuration, and all share one loss: one of them says what is wrong with it.
        speaks = _leads() or (isinstance(error, ConfigError) and os.environ.get("LOCAL_RANK") == "0")
        if speaks or not isinstance(error, ConfigError | NonFiniteError | ScalerOverflowError):
            print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        output.abandon()
        return 0
    except Exception as error:  # noqa: BLE001 - the edge of the process: a fault in a user's model shows where it is
        print(format_error(error), end="", file=sys.stderr)
        return 1
    return code


def _check_working_directory() -> None:
    """Raise ConfigError where it is gone. Relative paths lead nowhere then, and torch's libraries cannot be loaded."""
    try:
        os.getcwd()
    except FileNotFoundError:
        raise ConfigError("the working directory is gone; change to a folder that exists (cd), and try again") from None


def _leads() -> bool:
    """Whether this is rank 0 of the processes that a launcher has started, or was started alone."""
    return os.environ.get("RANK", "0") == "0"


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands and their options."""
    parser = CommandParser(
        prog="speedtronic",
        description="Train a PyTorch module from one YAML, fast and without losing a step.",
    )
    parser.add_argument("--version", action="version", version=f"speedtronic {__version__}")
    commands: argparse._SubParsersAction[Any] = parser.add_subparsers(
        title="commands", metavar="COMMAND", required=True, parser_class=CommandParser
    )
    train.add_parser(commands)
    tune.add_parser(commands)
    configuration.add_validate(commands)
    configuration.add_schema(commands)
    evaluate.add_parser(commands)
    report.add_report(commands)
    report.add_runs(commands)
    generate.add_parser(commands)
    data.add_parser(commands)
    checkpoints.add_parser(commands)
    diloco.add_parser(commands)
    doctor.add_parser(commands)
    bench.add_parser(commands)
    return parser
