"""`speedtronic validate`: check a configuration and print what it resolves to."""

from __future__ import annotations

import argparse

from speedtronic.cli import output
from speedtronic.cli.arguments import add_config_arguments, load_from_arguments


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "validate",
        help="check a configuration and print it resolved, secrets hidden",
        description="Check a configuration. Prints every key with its value, secrets hidden, or "
        "everything that is wrong. Exit code 0 when it is right, 2 when it is not.",
    )
    add_config_arguments(parser)
    parser.add_argument("--format", choices=("yaml", "json"), default="yaml", help="how to print (default: yaml)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    config, _ = load_from_arguments(args)
    text = config.to_json if args.format == "json" else config.to_yaml
    output.write(text(redact_secrets=True))
    return 0
