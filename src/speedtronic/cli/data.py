"""`speedtronic data prepare`, `speedtronic data inspect` and `speedtronic data train-tokenizer`: their options."""

from __future__ import annotations

import argparse

from speedtronic.cli import data_inspect, data_prepare
from speedtronic.cli.data_inputs import add_inputs
from speedtronic.cli.data_tokenizer import add_train_tokenizer


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("data", help="turn text into token shards, and look at them")
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    _add_prepare(actions)
    _add_inspect(actions)
    add_train_tokenizer(actions)


def _add_prepare(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = actions.add_parser(
        "prepare",
        help="write the tokens of text to a folder of shards",
        description="Write the tokens of text to a folder of shards. Each text file, JSON line and row of a table is "
        "a document. What is interrupted or killed goes on where it was when the same command runs again.",
    )
    add_inputs(parser)
    parser.add_argument("--out", required=True, metavar="DIR", help="the folder to write")
    parser.add_argument(
        "--tokenizer",
        default="bytes",
        metavar="bytes|chars|PATH",
        help="bytes: UTF-8 bytes, 256 ids (default); chars: the characters that occur in the text; PATH: a JSON file "
        "of the `tokenizers` library, a folder with one, or a tiktoken rank file",
    )
    parser.add_argument(
        "--shard-tokens", type=int, metavar="N", help="the most tokens in one shard (default: 67108864)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the order of files (default: 0)")
    parser.add_argument(
        "--processes", type=int, metavar="N", help="how many encode (default: the CPUs that this one may use)"
    )
    parser.add_argument("--force", action="store_true", help="write anew what has been prepared at DIR before")
    parser.set_defaults(run=data_prepare.run)


def _add_inspect(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = actions.add_parser(
        "inspect", help="show what a prepared folder holds", description="Show what a prepared folder holds."
    )
    parser.add_argument("path", metavar="DIR", help="a folder written by `speedtronic data prepare`")
    parser.add_argument("--verify", action="store_true", help="read everything and compare it with its checksums")
    parser.add_argument(
        "--head", type=int, default=200, metavar="N", help="tokens of text to show (default: 200; 0 for none)"
    )
    parser.set_defaults(run=data_inspect.run)
