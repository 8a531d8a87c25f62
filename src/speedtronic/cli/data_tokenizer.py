"""`speedtronic data train-tokenizer`: a tokenizer of one's own from text."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from speedtronic.cli import output
from speedtronic.cli.data_inputs import add_inputs, inputs
from speedtronic.cli.facts import write_facts

if TYPE_CHECKING:
    from speedtronic.data.prepare.train_tokenizer import TrainedTokenizer


def add_train_tokenizer(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = actions.add_parser(
        "train-tokenizer",
        help="make a byte-level BPE tokenizer from text",
        description="Train a byte-level BPE tokenizer on text and write it as a JSON file of the `tokenizers` "
        "library, for `speedtronic data prepare --tokenizer FILE` and for `data.tokenizer` of a configuration.",
    )
    add_inputs(parser)
    parser.add_argument("--out", required=True, metavar="FILE", help="the file to write, such as tokenizer.json")
    parser.add_argument(
        "--vocab-size", type=int, required=True, metavar="N", help="token ids that it may have, at least 257"
    )
    parser.add_argument("--force", action="store_true", help="replace FILE if it exists")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from speedtronic.data.prepare.train_tokenizer import train_tokenizer

    trained = train_tokenizer(
        args.paths,
        args.out,
        vocab_size=args.vocab_size,
        **inputs(args),
        force=args.force,
        progress=sys.stderr.isatty(),
    )
    write_facts(_facts(trained))
    if trained.vocab_size < args.vocab_size:
        output.write(
            f"{args.vocab_size:,} ids were asked for, but no more pairs repeat in this text; give it more text for a "
            f"larger vocabulary\n"
        )
    return 0


def _facts(trained: TrainedTokenizer) -> list[tuple[str, str]]:
    from speedtronic.metrics.lines import short_bytes

    return [
        ("vocabulary", f"{trained.vocab_size:,}"),
        ("bytes per token", f"{trained.bytes_per_token:.2f} (first MB of the text)"),
        ("text", short_bytes(trained.text_bytes)),
        ("file", str(trained.path)),
    ]
