"""`speedtronic data prepare | inspect | train-tokenizer`: turn text into token shards, and look at them."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from speedtronic.cli import output
from speedtronic.errors import DataError


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
        help="a UTF-8 text file, a .jsonl, .jsonl.gz, .jsonl.zst or .parquet file, or a folder to search",
    )
    parser.add_argument(
        "--stdin",
        choices=["text", "jsonl"],
        help="in place of paths: the standard input, as one text or as lines of JSON",
    )
    parser.add_argument(
        "--source",
        choices=["python-stdlib"],
        help="in place of paths: the library sources of the Python that runs this",
    )
    parser.add_argument(
        "--hf",
        metavar="NAME[:CONFIG]",
        help="in place of paths: a dataset of the Hugging Face hub, or a folder that the `datasets` library can load "
        "or has saved",
    )
    parser.add_argument("--split", default="train", metavar="NAME", help="of that dataset (default: train)")
    parser.add_argument(
        "--text-field",
        default="text",
        metavar="NAME",
        help="the field of .jsonl and the column of .parquet files and datasets that holds the text; a field inside "
        "another is such as meta.text (default: text)",
    )
    parser.add_argument(
        "--bad-lines",
        choices=["stop", "skip"],
        default="stop",
        help="what to do at a line or row that cannot be used: stop and name it, or skip and count it (default: stop)",
    )
    parser.add_argument(
        "--pattern",
        action="append",
        metavar="GLOB",
        help="file names to take from folders; may be repeated (default: *.txt *.md *.py *.jsonl *.jsonl.gz "
        "*.jsonl.zst *.parquet)",
    )


def _inputs(args: argparse.Namespace) -> dict[str, Any]:
    """The keyword arguments of `prepare` and `train_tokenizer` that say what to read, besides the paths."""
    from speedtronic.data.prepare.records import TextRecords
    from speedtronic.data.prepare.sources import DEFAULT_PATTERNS

    return {
        "source": args.source,
        "hub": args.hf,
        "split": args.split,
        "records": TextRecords(args.text_field),
        "skip_bad_records": args.bad_lines == "skip",
        "patterns": args.pattern or DEFAULT_PATTERNS,
    }


@contextmanager
def _paths(args: argparse.Namespace, out: Path) -> Iterator[list[str]]:
    """The paths to read; the standard input is kept in a file beside `out` meanwhile."""
    from speedtronic.data.prepare.standard_input import kept_in_file

    if args.stdin is None:
        yield args.paths
    elif args.paths or args.source or args.hf:
        raise DataError("name one thing to read: --stdin takes the place of paths, --source and --hf")
    else:
        with kept_in_file(sys.stdin.buffer, args.stdin, out) as path:
            yield [str(path)]


def _left_out(count: int, first: Sequence[str]) -> list[tuple[str, str]]:
    """What to say of records that were left out."""
    if not count:
        return []
    return [("left out, not being usable", "; ".join([output.counted(count, "record"), *first]))]


# ---------------------------------------------------------------------- prepare


def _add_prepare(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = actions.add_parser(
        "prepare",
        help="write the tokens of text to a folder of shards",
        description="Write the tokens of text to a folder of shards. Each text file, JSON line and row of a table is "
        "a document; or a prompt with its completion, or a chat, of which only what the model is to write is a target. "
        "If it is interrupted or killed, the same command continues where it stopped.",
    )
    _add_inputs(parser)
    parser.add_argument(
        "--records",
        choices=["text", "prompt", "chat"],
        default="text",
        help="what each JSON line or row is: a text, a prompt with its completion, or the messages of a chat (default: "
        "text)",
    )
    for field, meaning in (
        ("prompt", "the prompt"),
        ("completion", "what follows the prompt"),
        ("messages", "the messages of a chat"),
        ("tools", "the tools that the assistant of a chat may call, if it has any"),
    ):
        parser.add_argument(
            f"--{field}-field", default=field, metavar="NAME", help=f"the field with {meaning} (default: {field})"
        )
    parser.add_argument(
        "--chat-template",
        metavar="FILE",
        help="a template in Jinja that turns the messages of a chat into text; without it the tokenizer's own",
    )
    parser.add_argument(
        "--preview",
        type=int,
        metavar="N",
        help="write nothing, and show the first N documents as the model will read them, with what is no target dimmed",
    )
    parser.add_argument("--out", metavar="DIR", help="the folder to write; needed unless --preview is given")
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

    if args.out is None and args.preview is None:
        raise DataError("name the folder to write with --out DIR, or look at N documents with --preview N")
    if not ConsoleStream(sys.stderr).isatty():
        os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    what = {**_inputs(args), **_records(args), "tokenizer": args.tokenizer, "seed": args.seed}
    if args.preview is not None:
        _show_preview(args, what)
        return 0
    started = time.monotonic()
    try:
        with (
            output.termination_unwinds(),
            closing(output.preparation_progress(time.monotonic)) as progress,
            _paths(args, Path(args.out)) as paths,
        ):
            summary = prepare(
                paths,
                args.out,
                **what,
                shard_tokens=DEFAULT_SHARD_TOKENS if args.shard_tokens is None else args.shard_tokens,
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
    if args.records != "text":
        share = summary.targets / summary.tokens
        facts.insert(2, ("of them targets", f"{summary.targets:,} ({share:.0%})"))
    facts += _left_out(summary.bad_records, summary.first_bad_records)
    if summary.skipped:
        facts.append(("left out, not being UTF-8 text", output.counted(summary.skipped, "file")))
    configuration = f"data.shards: {summary.folder}, model.vocab_size: {summary.vocab_size} or more"
    output.write_facts([*facts, ("in a configuration", configuration)])
    return 0


def _records(args: argparse.Namespace) -> dict[str, Any]:
    """The keyword arguments of `prepare` that say what the records are, where they are no texts."""
    from speedtronic.data.prepare.records import ChatRecords, PromptRecords
    from speedtronic.data.prepare.sources import RECORD_PATTERNS

    if args.chat_template is not None and args.records != "chat":
        raise DataError("--chat-template is for chats: add --records chat")
    if args.records == "text":
        return {}
    patterns = args.pattern or RECORD_PATTERNS
    if args.records == "prompt":
        return {"records": PromptRecords(args.prompt_field, args.completion_field), "patterns": patterns}
    from speedtronic.data.prepare.chat_template import load_chat_template

    template = load_chat_template(args.tokenizer, args.chat_template)
    return {"records": ChatRecords(template, args.messages_field, args.tools_field), "patterns": patterns}


def _show_preview(args: argparse.Namespace, what: dict[str, Any]) -> None:
    from speedtronic.data.prepare.preview import preview

    if args.preview < 1:
        raise DataError(f"--preview shows at least 1 document, not {args.preview}")
    with _paths(args, Path(tempfile.gettempdir(), "preview")) as paths:
        for number, parts in enumerate(preview(paths, args.preview, **what), 1):
            output.write(f"--- document {number}\n")
            shown = [("".join(map(_visible, text)), target) for text, target in parts]
            # On a terminal the rest is dim. Elsewhere what the model learns stands in marks.
            if sys.stdout.isatty():
                output.write_dimmed(shown)
            elif args.records == "text":
                output.write("".join(text for text, _ in shown) + "\n")
            else:
                output.write("".join(f"{{+{text}+}}" if target else text for text, target in shown) + "\n")


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
    if shards.has_targets and "targets" in shards.source:
        facts.insert(2, ("of them targets", f"{shards.source['targets']:,}"))
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

    with _paths(args, Path(args.out)) as paths:
        trained = train_tokenizer(
            paths,
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
            *_left_out(len(trained.left_out), trained.left_out[:3]),
        ]
    )
    if trained.vocab_size < args.vocab_size:
        output.write(
            f"{args.vocab_size:,} ids were asked for, but no more pairs repeat in this text; give it more text for a "
            f"larger vocabulary\n"
        )
    return 0
