"""`speedtronic validate | schema`: check a configuration, and describe what one may hold."""

from __future__ import annotations

import argparse
import json
import sys

from speedtronic.cli import output
from speedtronic.cli.arguments import add_config_arguments, load_from_arguments


def add_validate(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "validate",
        help="check a configuration and print it resolved, secrets hidden",
        description="Check a configuration. Prints every key with its value, secrets hidden, or everything that is "
        "wrong, as far as the file shows it. What is most likely not meant is a warning, and what cannot be done with "
        "the run later is a note. Exit code 0 when it is right, 2 when it is not.",
    )
    add_config_arguments(parser)
    parser.add_argument("--format", choices=("yaml", "json"), default="yaml", help="how to print (default: yaml)")
    parser.set_defaults(run=run_validate)


def run_validate(args: argparse.Namespace) -> int:
    from speedtronic.config.checks import doubts, limits, refuse_what_cannot_be_trained

    config, _ = load_from_arguments(args)
    refuse_what_cannot_be_trained(config)
    if config.distributed.enabled:
        from speedtronic.distributed.stores.open import check_exchange

        check_exchange(config.distributed)
    if config.checkpoint.mirror is not None:
        from speedtronic.distributed.stores.open import MIRROR, check_address

        check_address(config.checkpoint.mirror, config.checkpoint.mirror_options, MIRROR)
    for doubt in doubts(config):
        output.warn(doubt)
    for limit in limits(config):
        print(f"note: {limit}", file=sys.stderr)
    text = config.to_json if args.format == "json" else config.to_yaml
    output.write(text(redact_secrets=True))
    return 0


def add_schema(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "schema",
        help="print the JSON Schema of a configuration, or its reference page",
        description="Print the JSON Schema, with which an editor completes and checks a configuration as "
        "it is typed, or the reference page in Markdown.",
    )
    parser.add_argument("--format", choices=("json", "markdown"), default="json", help="what to print (default: json)")
    parser.set_defaults(run=run_schema)


def run_schema(args: argparse.Namespace) -> int:
    from speedtronic.config.reference import json_schema, markdown

    text = markdown() if args.format == "markdown" else json.dumps(json_schema(), indent=2, ensure_ascii=False) + "\n"
    output.write(text)
    return 0
