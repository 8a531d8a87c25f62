"""Units of work: what one process reads and encodes at a time, for any number of processes."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from speedtronic.data.prepare.inputs import Chunk, Input
from speedtronic.data.prepare.records import Document, Sample, pieces_of
from speedtronic.data.tokenizers.base import IdArray, Tokenizer, encode_texts
from speedtronic.data.tokenizers.chunking import CutRule, encode_long
from speedtronic.data.tokenizers.huggingface import JsonTokenizer
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
        targets: (T,) which tokens are targets of training; None where the documents are texts, of which all are.
        left_out: what is wrong with the records that were left out, each with its place.
    """

    ids: IdArray
    ends: npt.NDArray[np.int64]
    checksum: bytes
    size: int
    targets: npt.NDArray[np.bool_] | None
    left_out: Sequence[str]


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


def encode_unit(unit: Unit, tokenizer: Tokenizer, skip_bad_records: bool = False) -> EncodedUnit:
    """Read and encode a unit. Raises DataError, naming the place, for what cannot be read or encoded.

    Args:
        unit: the unit.
        tokenizer: of the ids.
        skip_bad_records: leave records out that cannot be used; without it, one is an error.
    """
    # Read the documents.
    digest = hashlib.sha256()
    left_out: list[str] | None = [] if skip_bad_records else None
    documents: list[Document] = []
    ends_document: list[bool] = []
    size = 0
    for chunk in unit.chunks:
        raw = chunk.raw()
        _update(digest, chunk, raw)
        found = chunk.documents(raw, left_out)
        documents += found
        ends_document += [chunk.ends_documents] * len(found)
        size += sum(len(piece.encode("utf-8")) for document in found for piece in pieces_of(document))

    # Encode them, all at once where that is possible: it is faster.
    targets: npt.NDArray[np.bool_] | None = None
    try:
        if documents and isinstance(documents[0], Sample):  # then all of them are
            ids, ends, targets = _joined_samples(documents, tokenizer)
        else:
            ids, ends = _joined_texts(documents, ends_document, tokenizer)
    except DataError:
        # Encode chunk by chunk to find out which one is to blame.
        for chunk in unit.chunks:
            try:
                found = chunk.documents(chunk.raw(), [])
                encode_texts(tokenizer, [piece for document in found for piece in pieces_of(document)])
            except DataError as error:
                raise DataError(f"{chunk.origin}: {error}") from error
        raise
    return EncodedUnit(ids, ends, digest.digest(), size, targets, left_out or ())


def _joined_texts(
    texts: Sequence[Any], ends_document: Sequence[bool], tokenizer: Tokenizer
) -> tuple[IdArray, npt.NDArray[np.int64]]:
    """The ids of texts, and the ends of documents in them."""
    if max(map(len, texts), default=0) <= _LONG:
        encoded = encode_texts(tokenizer, texts)
    else:
        # A row of a table may have any length. Encoded at once, it would need a hundred times that in memory.
        encoded = [encode_long(tokenizer, text) for text in texts]

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
    return joined, ends


def _joined_samples(
    samples: Sequence[Any], tokenizer: Tokenizer
) -> tuple[IdArray, npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """The ids of samples, the ends of documents in them, and which ids are targets."""
    all_ids: list[IdArray] = []
    all_targets: list[npt.NDArray[np.bool_]] = []
    for sample, (ids, targets) in zip(samples, encode_samples(samples, tokenizer), strict=True):
        if len(ids) == 0 or ids[-1] != tokenizer.separator_id:  # a template may have written it
            ids = np.append(ids, np.array([tokenizer.separator_id], np.uint32))
            targets = np.append(targets, sample.ends)
        all_ids.append(ids)
        all_targets.append(targets)
    ends = np.cumsum([len(ids) for ids in all_ids])
    return np.concatenate(all_ids), ends, np.concatenate(all_targets)


def encode_samples(samples: Sequence[Sample], tokenizer: Tokenizer) -> list[tuple[IdArray, npt.NDArray[np.bool_]]]:
    """The ids of each sample, without a separator behind it, and which of them are targets.

    Where a template has spelled special tokens, the text is encoded as a whole, as it is when the model is used. A
    token with a character of a target part is a target. Otherwise each part is encoded by itself, as a prompt is when
    the model is used.
    """
    encoded: list[tuple[IdArray, npt.NDArray[np.bool_]]] = []
    if isinstance(tokenizer, JsonTokenizer) and all(sample.spells_tokens for sample in samples):
        whole = ["".join(pieces_of(sample)) for sample in samples]
        for sample, (ids, begins, stops) in zip(samples, tokenizer.encode_with_special_tokens(whole), strict=True):
            # How many characters of target parts lie before each character.
            flags = np.repeat([target for _, target in sample.parts], [len(text) for text, _ in sample.parts])
            before = np.concatenate([[0], np.cumsum(flags)])
            encoded.append((ids, before[stops] > before[begins]))
        return encoded
    ids_of_parts = iter(encode_texts(tokenizer, [text for sample in samples for text, _ in sample.parts]))
    for sample in samples:
        parts = [(next(ids_of_parts), target) for _, target in sample.parts]
        targets = np.repeat([target for _, target in parts], [len(ids) for ids, _ in parts])
        encoded.append((np.concatenate([ids.astype(np.uint32) for ids, _ in parts]), targets))
    return encoded


def checksum_unit(unit: Unit) -> bytes:
    """The checksum that `encode_unit` would give."""
    digest = hashlib.sha256()
    for chunk in unit.chunks:
        _update(digest, chunk, chunk.raw())
    return digest.digest()


def characters_of_unit(unit: Unit, skip_bad_records: bool = False) -> str:
    """The characters that occur in a unit, each once, in the order of their code points."""
    characters: set[str] = set()
    for chunk in unit.chunks:
        for document in chunk.documents(chunk.raw(), [] if skip_bad_records else None):
            characters.update(*pieces_of(document))
    return "".join(sorted(characters))


def _update(digest: hashlib._Hash, chunk: Chunk, raw: bytes) -> None:
    # The length is included, so that another division of the same text into documents gives another checksum.
    digest.update(struct.pack("<Q?", len(raw), chunk.ends_documents))
    digest.update(raw)
