"""`speedtronic data inspect`: what a prepared folder holds."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from speedtronic.cli import output
from speedtronic.cli.facts import write_facts

if TYPE_CHECKING:
    from speedtronic.data.shards import ShardSet


def run(args: argparse.Namespace) -> int:
    from speedtronic.data.shards import ShardSet

    shards = ShardSet(args.path)
    facts = _facts(shards)
    if args.verify:
        shards.verify()
        facts.append(("checksums", "all match"))
    write_facts(facts)
    if args.head > 0:
        output.write(f"\n{_head(shards, args.head)}\n")
    return 0


def _facts(shards: ShardSet) -> list[tuple[str, str]]:
    return [
        ("folder", str(shards.folder)),
        ("tokens", f"{shards.tokens:,}"),
        ("documents", f"{shards.documents:,}"),
        *_lengths(shards),
        ("dtype", shards.dtype.name),
        ("tokenizer", f"{shards.tokenizer.spec()['type']}, vocabulary {shards.vocab_size:,}"),
        ("shards", f"{len(shards.shards):,}"),
        ("origin", str(shards.source.get("origin", "unknown"))),
        ("fingerprint", shards.fingerprint),
    ]


def _lengths(shards: ShardSet) -> list[tuple[str, str]]:
    import numpy as np

    if not shards.documents:
        return []
    lengths = np.concatenate(list(shards.document_lengths()))
    shortest, median, longest = int(lengths.min()), float(np.median(lengths)), int(lengths.max())
    return [("document length", f"{shortest:,} to {longest:,} tokens, median {median:,.0f}")]


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
