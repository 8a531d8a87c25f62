"""Units of work: what one process reads and encodes at a time, for any number of processes."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from speedtronic.data.prepare.sources import Chunk, Input
from speedtronic.data.tokenizers.base import IdArray, Tokenizer, encode_texts
from speedtronic.data.tokenizers.chunking import CutRule, encode_long
from speedtronic.errors import DataError

UNIT_BYTES = 2**20

_LONG = 2 * UNIT_BYTES  # characters; a chunk of a text file has fewer


@dataclass(frozen=True)
class Position:
    """A place in a list of inputs: the number of the input and an offset in it."""

    number: int = 0
    offset: int = 0


BEGINNING = Position()


@dataclass(frozen=True)
class Unit:
    """Consecutive chunks of inputs, and where the next unit begins."""

    chunks: tuple[Chunk, ...]
    next: Position


@dataclass(frozen=True)
class EncodedUnit:
    """The tokens of a unit.

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


def plan_units(
    inputs: Sequence[Input], rule: CutRule, *, start: Position = BEGINNING, size: int = UNIT_BYTES
) -> Iterator[Unit]:
    """Divide inputs into units of `size` to twice `size` bytes, in order; larger only where `rule` allows no cut.

    A plan that starts at the `next` of a unit gives the units that follow it in the whole plan.
    """
    chunks: list[Chunk] = []
    for number in range(start.number, len(inputs)):
        begin = start.offset if number == start.number else 0
        for chunk, offset in inputs[number].chunks(begin, size, rule):
            chunks.append(chunk)
            if sum(each.size for each in chunks) >= size:
                yield Unit(tuple(chunks), Position(number, offset))
                chunks = []
    if chunks:
        yield Unit(tuple(chunks), Position(len(inputs)))


def encode_unit(unit: Unit, tokenizer: Tokenizer) -> EncodedUnit:
    """Read and encode a unit. Raises DataError, naming the place, for what cannot be read or encoded."""
    # Read the texts.
    digest = hashlib.sha256()
    texts: list[str] = []
    ends_document: list[bool] = []
    size = 0
    for chunk in unit.chunks:
        raw = chunk.raw()
        _update(digest, chunk, raw)
        found = chunk.texts(raw)
        texts += found
        ends_document += [chunk.ends_documents] * len(found)
        size += sum(len(text.encode("utf-8")) for text in found)

    # Encode them, all at once where that is possible: it is faster.
    try:
        if max(map(len, texts), default=0) <= _LONG:
            encoded = encode_texts(tokenizer, texts)
        else:
            # A row of a table may have any length. Encoded at once, it would need a hundred times that in memory.
            encoded = [encode_long(tokenizer, text) for text in texts]
    except DataError:
        # Encode chunk by chunk to find out which one is to blame.
        for chunk in unit.chunks:
            try:
                encode_texts(tokenizer, chunk.texts(chunk.raw()))
            except DataError as error:
                raise DataError(f"{chunk.origin}: {error}") from error
        raise

    # Join the ids, with a separator behind each document.
    dtype = np.result_type(np.min_scalar_type(tokenizer.separator_id), *{ids.dtype for ids in encoded})
    with_separator = np.array(ends_document, bool)
    lengths = np.array([len(ids) for ids in encoded], np.int64) + with_separator
    stops = np.cumsum(lengths)
    joined = np.empty(int(stops[-1]) if len(stops) else 0, dtype)
    for ids, stop, length in zip(encoded, stops.tolist(), lengths.tolist(), strict=True):
        joined[stop - length : stop - length + len(ids)] = ids
    ends = stops[with_separator]
    joined[ends - 1] = tokenizer.separator_id
    return EncodedUnit(joined, ends, digest.digest(), size)


def checksum_unit(unit: Unit) -> bytes:
    """The checksum that `encode_unit` would give."""
    digest = hashlib.sha256()
    for chunk in unit.chunks:
        _update(digest, chunk, chunk.raw())
    return digest.digest()


def characters_of_unit(unit: Unit) -> str:
    """The characters that occur in a unit, each once, in the order of their code points."""
    characters: set[str] = set()
    for chunk in unit.chunks:
        characters.update(*chunk.texts(chunk.raw()))
    return "".join(sorted(characters))


def _update(digest: hashlib._Hash, chunk: Chunk, raw: bytes) -> None:
    # The length is included, so that another division of the same text into documents gives another checksum.
    digest.update(struct.pack("<Q?", len(raw), chunk.ends_documents))
    digest.update(raw)
