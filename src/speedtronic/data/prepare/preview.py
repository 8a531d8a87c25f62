"""A look at what a preparation would write, before it writes anything."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from itertools import islice

import numpy as np

from speedtronic.data.prepare.chat_template import Part
from speedtronic.data.prepare.encode import characters_of_unit, encode_unit, plan_units
from speedtronic.data.prepare.prepare import CHARACTERS, in_order
from speedtronic.data.prepare.records import TEXT_RECORDS, Records
from speedtronic.data.prepare.sources import DEFAULT_PATTERNS, choose_inputs
from speedtronic.data.tokenizers.base import StreamDecoder, Tokenizer
from speedtronic.data.tokenizers.chars import CorpusCharTokenizer
from speedtronic.data.tokenizers.chunking import CutRule, cut_rule
from speedtronic.data.tokenizers.from_file import load_tokenizer
from speedtronic.errors import DataError

_UNIT_BYTES = 2**16
_MOST_TOKENS = 4096  # of a document that are shown


def preview(
    paths: Sequence[str | os.PathLike[str]],
    count: int,
    *,
    source: str | None = None,
    hub: str | None = None,
    split: str = "train",
    tokenizer: str = "bytes",
    records: Records = TEXT_RECORDS,
    skip_bad_records: bool = False,
    patterns: Sequence[str] = DEFAULT_PATTERNS,
    seed: int = 0,
) -> Iterator[list[Part]]:
    """The first documents that `prepare` would write with the same arguments, decoded from their tokens.

    Yields:
        A document in pieces of text, each with whether its tokens are targets of training. Of a long one, its
        beginning.

    Raises:
        DataError, MissingExtraError: as `prepare`.
    """
    inputs, _ = choose_inputs(paths, source=source, hub=hub, split=split, patterns=patterns, records=records)
    encoder = None if tokenizer == CHARACTERS else load_tokenizer(tokenizer)
    rule: CutRule = "characters" if encoder is None else cut_rule(encoder)

    def documents() -> Iterator[list[Part]]:
        some = False
        for unit in plan_units(in_order(inputs, seed), rule, size=_UNIT_BYTES):
            # The characters of the rest are of no interest here.
            own = encoder or CorpusCharTokenizer(characters_of_unit(unit, skip_bad_records))
            encoded = encode_unit(unit, own, skip_bad_records)
            targets = np.ones(len(encoded.ids), np.bool_) if encoded.targets is None else encoded.targets
            start = 0
            # Of a document that goes on in the next unit, this part is shown as one.
            for end in dict.fromkeys([*encoded.ends.tolist(), len(encoded.ids)]) if len(encoded.ids) else ():
                some = True
                stop = min(end, start + _MOST_TOKENS)
                yield _decoded(encoded.ids[start:stop].tolist(), targets[start:stop].tolist(), own)
                start = end
        if not some:
            raise DataError("all documents are empty: there is nothing to train on")

    return islice(documents(), count)


def _decoded(ids: Sequence[int], targets: Sequence[bool], tokenizer: Tokenizer) -> list[Part]:
    decoder = StreamDecoder(tokenizer)
    parts = [(decoder.push(token), target) for token, target in zip(ids, targets, strict=True)]
    parts.append((decoder.flush(), bool(targets) and targets[-1]))
    joined: list[Part] = []
    for text, target in parts:
        if joined and joined[-1][1] == target:
            text = joined.pop()[0] + text
        joined.append((text, target))
    return joined
