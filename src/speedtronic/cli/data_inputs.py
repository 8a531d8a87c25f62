"""What the `data` commands have in common: the options that name the text to read."""

from __future__ import annotations

import argparse
from typing import Any


def add_inputs(parser: argparse.ArgumentParser) -> None:
    """Add the options that `inputs` reads."""
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


def inputs(args: argparse.Namespace) -> dict[str, Any]:
    """The keyword arguments of `prepare` and `train_tokenizer` that say what to read, besides the paths."""
    from speedtronic.data.prepare.sources import DEFAULT_PATTERNS

    return {
        "source": args.source,
        "hub": args.hf,
        "split": args.split,
        "text_field": args.text_field,
        "patterns": args.pattern or DEFAULT_PATTERNS,
    }
