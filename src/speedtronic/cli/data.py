"""`speedtronic data prepare` and `speedtronic data inspect`."""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from speedtronic.data.shards import ShardSet


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("data", help="turn text into token shards, and look at them")
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    _add_prepare(actions)
    _add_inspect(actions)


def _add_prepare(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = actions.add_parser(
        "prepare",
        help="write the tokens of text files to a folder of shards",
        description="Write the tokens of text files, each a document, to a folder of memory-mapped shards.",
    )
    parser.add_argument("paths", nargs="*", metavar="PATH", help="a UTF-8 text file, or a folder to search")
    parser.add_argument(
        "--source",
        choices=["python-stdlib"],
        help="in place of paths: the library sources of the Python that runs this",
    )
    parser.add_argument("--out", required=True, metavar="DIR", help="the folder to write")
    parser.add_argument(
        "--tokenizer",
        choices=["bytes", "chars"],
        default="bytes",
        help="bytes: UTF-8 bytes, 256 ids (default); chars: the characters that occur in the text",
    )
    parser.add_argument(
        "--pattern",
        action="append",
        metavar="GLOB",
        help="file names to take from folders; may be repeated (default: *.txt *.md *.py)",
    )
    parser.add_argument("--shard-tokens", type=int, metavar="N", help="the most tokens in one file (default: 67108864)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the order of documents (default: 0)")
    parser.add_argument("--force", action="store_true", help="write anew what has been prepared at DIR before")
    parser.set_defaults(run=run_prepare)


def _add_inspect(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = actions.add_parser(
        "inspect", help="show what a prepared folder holds", description="Show what a prepared folder holds."
    )
    parser.add_argument("path", metavar="DIR", help="a folder written by `speedtronic data prepare`")
    parser.add_argument("--verify", action="store_true", help="read everything and compare it with its checksums")
    parser.add_argument(
        "--head", type=int, default=200, metavar="N", help="tokens of text to show (default: 200; 0 for none)"
    )
    parser.set_defaults(run=run_inspect)


def run_prepare(args: argparse.Namespace) -> int:
    from speedtronic.data.prepare import DEFAULT_PATTERNS, prepare
    from speedtronic.data.shards import DEFAULT_SHARD_TOKENS

    with _sigterm_unwinds():
        summary = prepare(
            args.paths,
            args.out,
            source=args.source,
            tokenizer=args.tokenizer,
            patterns=args.pattern or DEFAULT_PATTERNS,
            shard_tokens=DEFAULT_SHARD_TOKENS if args.shard_tokens is None else args.shard_tokens,
            seed=args.seed,
            force=args.force,
        )
    done = "already prepared" if summary.already_prepared else "prepared"
    print(
        f"{done}: {summary.folder}: {summary.tokens:,} tokens, {_count(summary.documents, 'document')}, "
        f"{_count(summary.shards, 'shard')}, vocabulary {summary.vocab_size:,}"
    )
    if summary.skipped:
        print(f"left out, not being UTF-8 text: {_count(summary.skipped, 'file')}")
    return 0


@contextmanager
def _sigterm_unwinds() -> Iterator[None]:
    """Let SIGTERM end the process by an exception, so that what is half written is removed on the way out."""

    def stop(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one must not interrupt the removal
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may install a handler
        return
    previous = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if previous is None else previous)


def run_inspect(args: argparse.Namespace) -> int:
    from speedtronic.data.shards import ShardSet

    shards = ShardSet(args.path)
    facts = _facts(shards)
    if args.verify:
        shards.verify()
        facts.append(("checksums", "all match"))
    _print_facts(facts)
    if args.head > 0:
        print()
        print(_head(shards, args.head))
    return 0


def _facts(shards: ShardSet) -> list[tuple[str, str]]:
    tokenizer = shards.tokenizer
    return [
        ("folder", str(shards.folder)),
        ("tokens", f"{shards.tokens:,}"),
        ("documents", f"{shards.documents:,}"),
        ("dtype", shards.dtype.name),
        ("tokenizer", f"{tokenizer.spec()['type']}, vocabulary {tokenizer.vocab_size:,}"),
        ("shards", f"{len(shards.shards):,}"),
        ("origin", str(shards.source.get("origin", "unknown"))),
        ("fingerprint", shards.fingerprint),
    ]


def _print_facts(facts: list[tuple[str, str]]) -> None:
    if not sys.stdout.isatty():
        for name, value in facts:
            print(f"{name}: {value}")
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(show_header=False)
    for name, value in facts:
        table.add_row(name, value)
    Console(markup=False, highlight=False).print(table)


def _head(shards: ShardSet, count: int) -> str:
    import numpy as np

    ids = np.empty(min(count, len(shards)), np.int64)
    shards.read(0, ids)
    return "".join(map(_visible, shards.tokenizer.decode(ids.tolist())))


def _visible(character: str) -> str:
    """Control characters as their pictures: what a text holds must not steer the terminal."""
    if character in "\n\t" or not (ord(character) < 0x20 or 0x7F <= ord(character) < 0xA0):
        return character
    return chr(0x2400 + ord(character)) if ord(character) < 0x20 else "\ufffd"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
