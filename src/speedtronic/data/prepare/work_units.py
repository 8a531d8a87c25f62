"""Units of work: what one process reads and encodes at a time, whatever the number of processes."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from speedtronic.data.prepare.sources import Input, Span
from speedtronic.data.tokenizers.base import IdArray, Tokenizer, encode_texts
from speedtronic.data.tokenizers.chunking import CutRule, encode_long
from speedtronic.errors import DataError

UNIT_BYTES = 2**20

_LONG = 2 * UNIT_BYTES  # characters; a piece of a text file has fewer


@dataclass(frozen=True)
class Position:
    """A place in a list of inputs: the number of the input and an offset in it."""

    number: int = 0
    offset: int = 0


BEGINNING = Position()


@dataclass(frozen=True)
class Unit:
    """Consecutive spans of inputs, and where the next unit begins."""

    spans: tuple[Span, ...]
    next: Position


@dataclass(frozen=True)
class EncodedUnit:
    """What a unit became.

    Attributes:
        ids: (T,) token ids, separators included.
        ends: (documents that end in it,) int64, the positions in `ids` behind their separators.
        checksum: SHA-256 of the unit's content.
        size: bytes of its texts, in UTF-8.
    """

    ids: IdArray
    ends: npt.NDArray[np.int64]
    checksum: bytes
    size: int


def plan(
    inputs: Sequence[Input], rule: CutRule, *, start: Position = BEGINNING, size: int = UNIT_BYTES
) -> Iterator[Unit]:
    """Divide inputs into units of `size` to twice `size` bytes, in order; larger only where `rule` allows no cut.

    The units from any unit's `next` on are those that follow it in the whole plan.
    """
    spans: list[Span] = []
    for number in range(start.number, len(inputs)):
        begin = start.offset if number == start.number else 0
        for span, offset in inputs[number].spans(begin, size, rule):
            spans.append(span)
            if sum(each.size for each in spans) >= size:
                yield Unit(tuple(spans), Position(number, offset))
                spans = []
    if spans:
        yield Unit(tuple(spans), Position(len(inputs)))


def encode_unit(unit: Unit, tokenizer: Tokenizer) -> EncodedUnit:
    """Read and encode a unit. Raises DataError for what cannot be read or encoded, with its place."""
    digest = hashlib.sha256()
    texts: list[str] = []
    ended: list[bool] = []
    size = 0
    for span in unit.spans:
        raw = span.raw()
        _digest(digest, span, raw)
        found = span.texts(raw)
        texts += found
        ended += [span.ends_documents] * len(found)
        size += sum(len(text.encode("utf-8")) for text in found)
    try:
        encoded = _encoded(texts, tokenizer)
    except DataError:
        for span in unit.spans:
            _name_what_cannot_be_encoded(span, tokenizer)
        raise
    ids, ends = _joined(encoded, ended, tokenizer)
    return EncodedUnit(ids, ends, digest.digest(), size)


def _encoded(texts: Sequence[str], tokenizer: Tokenizer) -> list[IdArray]:
    if max(map(len, texts), default=0) > _LONG:
        # A row of a table may have any length, and encoding it at once a hundred times that in memory.
        return [encode_long(tokenizer, text) for text in texts]
    return encode_texts(tokenizer, texts)


def _name_what_cannot_be_encoded(span: Span, tokenizer: Tokenizer) -> None:
    try:
        encode_texts(tokenizer, span.texts(span.raw()))
    except DataError as error:
        raise DataError(f"{span.origin}: {error}") from error


def checksum_unit(unit: Unit) -> bytes:
    """The checksum that `encode_unit` would give."""
    digest = hashlib.sha256()
    for span in unit.spans:
        _digest(digest, span, span.raw())
    return digest.digest()


def characters_of_unit(unit: Unit) -> str:
    """The characters that occur in a unit, each once, in the order of their code points."""
    characters: set[str] = set()
    for span in unit.spans:
        characters.update(*span.texts(span.raw()))
    return "".join(sorted(characters))


def _digest(digest: hashlib._Hash, span: Span, raw: bytes) -> None:
    # With their lengths, so that documents that are divided differently differ.
    digest.update(struct.pack("<Q?", len(raw), span.ends_documents))
    digest.update(raw)


def _joined(
    encoded: Sequence[IdArray], ended: Sequence[bool], tokenizer: Tokenizer
) -> tuple[IdArray, npt.NDArray[np.int64]]:
    """The texts' ids in one array, with separators, and where documents end."""
    dtype = np.result_type(np.min_scalar_type(tokenizer.separator_id), *{ids.dtype for ids in encoded})
    ends_here = np.array(ended, bool)
    lengths = np.array([len(ids) for ids in encoded], np.int64) + ends_here
    stops = np.cumsum(lengths)
    joined = np.empty(int(stops[-1]) if len(stops) else 0, dtype)
    for ids, stop, length in zip(encoded, stops.tolist(), lengths.tolist(), strict=True):
        joined[stop - length : stop - length + len(ids)] = ids
    ends = stops[ends_here]
    joined[ends - 1] = tokenizer.separator_id
    return joined, ends
