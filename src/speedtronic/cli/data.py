"""`speedtronic data prepare | inspect | train-tokenizer`: turn text into token shards, and look at them."""

from __future__ import annotations

import argparse
import os
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

from speedtronic.cli import output


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("data", help="turn text into token shards, and look at them")
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    _add_prepare(actions)
    _add_inspect(actions)
    _add_train_tokenizer(actions)


# ---------------------------------------------------------------------- the text to read


def _add_inputs(parser: argparse.ArgumentParser) -> None:
    """Add the options that `_inputs` reads."""
    parser.add_argument(
        "paths",
        nargs="*",
        metavar="PATH",
        help="a UTF-8 text file, a .jsonl or .parquet file, or a folder to search",
    )
    parser.add_argument(
        "--source",
        choices=["python-stdlib"],
        help="in place of paths: the library sources of the Python that runs this",
    )
    parser.add_argument(
        "--hf",
        metavar="NAME[:CONFIG]",
        help="in place of paths: a dataset of the Hugging Face hub, or a folder that the `datasets` library can load",
    )
    parser.add_argument("--split", default="train", metavar="NAME", help="of that dataset (default: train)")
    parser.add_argument(
        "--text-field",
        default="text",
        metavar="NAME",
        help="the field of .jsonl and the column of .parquet files and datasets that holds the text (default: text)",
    )
    parser.add_argument(
        "--pattern",
        action="append",
        metavar="GLOB",
        help="file names to take from folders; may be repeated (default: *.txt *.md *.py *.jsonl *.parquet)",
    )


def _inputs(args: argparse.Namespace) -> dict[str, Any]:
    """The keyword arguments of `prepare` and `train_tokenizer` that say what to read, besides the paths."""
    from speedtronic.data.prepare.sources import DEFAULT_PATTERNS

    return {
        "source": args.source,
        "hub": args.hf,
        "split": args.split,
        "text_field": args.text_field,
        "patterns": args.pattern or DEFAULT_PATTERNS,
    }


# ---------------------------------------------------------------------- prepare


def _add_prepare(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = actions.add_parser(
        "prepare",
        help="write the tokens of text to a folder of shards",
        description="Write the tokens of text to a folder of shards. Each text file, JSON line and row of a table is "
        "a document. If it is interrupted or killed, the same command continues where it stopped.",
    )
    _add_inputs(parser)
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
    parser.add_argument("--force", action="store_true", help="replace what was prepared at DIR before")
    parser.set_defaults(run=run_prepare)


def run_prepare(args: argparse.Namespace) -> int:
    from speedtronic.data.prepare.prepare import prepare
    from speedtronic.data.prepare.staging import is_resumable
    from speedtronic.data.shard_writer import DEFAULT_SHARD_TOKENS
    from speedtronic.metrics.console import ConsoleStream
    from speedtronic.metrics.lines import short_bytes

    if not ConsoleStream(sys.stderr).isatty():
        os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    started = time.monotonic()
    try:
        with output.termination_unwinds(), closing(output.preparation_progress(time.monotonic)) as progress:
            summary = prepare(
                args.paths,
                args.out,
                **_inputs(args),
                tokenizer=args.tokenizer,
                shard_tokens=DEFAULT_SHARD_TOKENS if args.shard_tokens is None else args.shard_tokens,
                seed=args.seed,
                force=args.force,
                processes=args.processes,
                on_progress=progress.show,
            )
    except (KeyboardInterrupt, SystemExit):
        if is_resumable(Path(args.out)):
            print("interrupted: what is done is kept, and the same command continues from there", file=sys.stderr)
        raise

    seconds = time.monotonic() - started
    rate = f", {short_bytes(summary.encoded_bytes / seconds)}/s" if summary.encoded_bytes and seconds else ""
    facts = [
        ("already prepared" if summary.already_prepared else "prepared", str(summary.folder)),
        ("tokens", f"{summary.tokens:,}"),
        ("documents", f"{summary.documents:,}"),
        ("shards", f"{summary.shards:,}"),
        ("bytes per token", f"{summary.text_bytes / summary.tokens:.2f}"),
        ("vocabulary", f"{summary.vocab_size:,}"),
        ("time", f"{seconds:.1f} s{rate}"),
    ]
    if summary.skipped:
        facts.append(("left out, not being UTF-8 text", output.counted(summary.skipped, "file")))
    configuration = f"data.shards: {summary.folder}, model.vocab_size: {summary.vocab_size} or more"
    output.write_facts([*facts, ("in a configuration", configuration)])
    return 0


# ---------------------------------------------------------------------- inspect


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


def run_inspect(args: argparse.Namespace) -> int:
    import numpy as np

    from speedtronic.data.shards import ShardSet

    shards = ShardSet(args.path)
    facts = [
        ("folder", str(shards.folder)),
        ("tokens", f"{shards.tokens:,}"),
        ("documents", f"{shards.documents:,}"),
    ]
    if shards.documents:
        lengths = np.concatenate(list(shards.document_lengths()))
        shortest, median, longest = int(lengths.min()), float(np.median(lengths)), int(lengths.max())
        facts.append(("document length", f"{shortest:,} to {longest:,} tokens, median {median:,.0f}"))
    facts += [
        ("dtype", shards.dtype.name),
        ("tokenizer", f"{shards.tokenizer.spec()['type']}, vocabulary {shards.vocab_size:,}"),
        ("shards", f"{len(shards.shards):,}"),
        ("origin", str(shards.source.get("origin", "unknown"))),
        ("fingerprint", shards.fingerprint),
    ]
    if args.verify:
        shards.verify()
        facts.append(("checksums", "all match"))
    output.write_facts(facts)
    if args.head > 0:
        ids = np.empty(min(args.head, len(shards)), np.int64)
        shards.read(0, ids)
        output.write(f"\n{''.join(map(_visible, shards.tokenizer.decode(ids.tolist())))}\n")
    return 0


def _visible(character: str) -> str:
    """Show control characters as their pictures: text from a file must not steer the terminal."""
    if character in "\n\t" or not (ord(character) < 0x20 or 0x7F <= ord(character) < 0xA0):
        return character
    return chr(0x2400 + ord(character)) if ord(character) < 0x20 else "\ufffd"


# ---------------------------------------------------------------------- train-tokenizer


def _add_train_tokenizer(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = actions.add_parser(
        "train-tokenizer",
        help="make a byte-level BPE tokenizer from text",
        description="Train a byte-level BPE tokenizer on text and write it as a JSON file of the `tokenizers` "
        "library, for `speedtronic data prepare --tokenizer FILE` and for `data.tokenizer` of a configuration.",
    )
    _add_inputs(parser)
    parser.add_argument("--out", required=True, metavar="FILE", help="the file to write, such as tokenizer.json")
    parser.add_argument(
        "--vocab-size", type=int, required=True, metavar="N", help="token ids that it may have, at least 257"
    )
    parser.add_argument("--force", action="store_true", help="replace FILE if it exists")
    parser.set_defaults(run=run_train_tokenizer)


def run_train_tokenizer(args: argparse.Namespace) -> int:
    from speedtronic.data.prepare.train_tokenizer import train_tokenizer
    from speedtronic.metrics.lines import short_bytes

    trained = train_tokenizer(
        args.paths,
        args.out,
        vocab_size=args.vocab_size,
        **_inputs(args),
        force=args.force,
        progress=sys.stderr.isatty(),
    )
    output.write_facts(
        [
            ("vocabulary", f"{trained.vocab_size:,}"),
            ("bytes per token", f"{trained.bytes_per_token:.2f} (first MB of the text)"),
            ("text", short_bytes(trained.text_bytes)),
            ("file", str(trained.path)),
        ]
    )
    if trained.vocab_size < args.vocab_size:
        output.write(
            f"{args.vocab_size:,} ids were asked for, but no more pairs repeat in this text; give it more text for a "
            f"larger vocabulary\n"
        )
    return 0
