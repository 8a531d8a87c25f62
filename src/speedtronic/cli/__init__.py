"""The `speedtronic` command. One file per command; what a command needs is imported when it runs."""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Sequence

from speedtronic import __version__
from speedtronic.cli import checkpoints, data, diloco, generate, output, schema, train, validate
from speedtronic.cli.arguments import CommandParser
from speedtronic.errors import SpeedtronicError

COMMANDS = (train, validate, schema, generate, data, checkpoints, diloco)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    0 done; 1 a failure while running; 2 bad use, configuration or input, with one clear message; 128 + n a signal.
    """
    try:
        return _answer(argv)
    except KeyboardInterrupt:
        return 130


def entry() -> None:
    """The console script."""
    sys.exit(main())


def _answer(argv: Sequence[str] | None) -> int:
    """The exit code; whatever goes wrong has been said."""
    output.prepare()
    try:
        code = _run(argv)
        output.finish()
    except output.OutputError as error:
        output.abandon()
        return _report(error)
    except SpeedtronicError as error:
        return _report(error)
    except BrokenPipeError:
        output.abandon()
        return 0
    except Exception:  # noqa: BLE001 - the edge of the process: a fault in a user's model shows where it is
        traceback.print_exc()
        return 1
    return code


def _run(argv: Sequence[str] | None) -> int:
    try:
        args = build_parser().parse_args(argv)
        code: int = args.run(args)
    except SystemExit as stop:
        return _exit_code(stop)
    return code


def _exit_code(stop: SystemExit) -> int:
    """What Python itself would make of it: the code of a model that calls `sys.exit("why")` is 1, and why is said."""
    if stop.code is None or isinstance(stop.code, int):
        return stop.code or 0
    print(stop.code, file=sys.stderr)
    return 1


def _report(error: SpeedtronicError) -> int:
    print(f"error: {error}", file=sys.stderr)
    return error.exit_code


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands and their options."""
    parser = argparse.ArgumentParser(
        prog="speedtronic",
        description="Train a PyTorch module from one YAML, fast and without losing a step.",
    )
    parser.add_argument("--version", action="version", version=f"speedtronic {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, parser_class=CommandParser)
    for command in COMMANDS:
        command.add_parser(commands)
    return parser
