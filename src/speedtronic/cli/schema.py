"""`speedtronic schema`: describe the configuration, for editors or for readers."""

from __future__ import annotations

import argparse
import json

from speedtronic.cli import output


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "schema",
        help="print the JSON Schema of a configuration, or its reference page",
        description="Print the JSON Schema, with which an editor completes and checks a configuration as "
        "it is typed, or the reference page in Markdown.",
    )
    parser.add_argument("--format", choices=("json", "markdown"), default="json", help="what to print (default: json)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from speedtronic.config.reference import json_schema, markdown

    text = markdown() if args.format == "markdown" else json.dumps(json_schema(), indent=2, ensure_ascii=False) + "\n"
    output.write(text)
    return 0
