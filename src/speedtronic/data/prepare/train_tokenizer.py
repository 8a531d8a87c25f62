"""Training a byte-level BPE tokenizer on text."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from speedtronic.data.prepare.records import TEXT_RECORDS, TextRecords
from speedtronic.data.prepare.sources import DEFAULT_PATTERNS, choose_inputs, texts
from speedtronic.data.tokenizers.chunking import encode_long
from speedtronic.data.tokenizers.huggingface import json_tokenizer
from speedtronic.data.tokenizers.tiktoken import SEPARATOR
from speedtronic.durable.files import FileSystem, replace_file
from speedtronic.errors import DataError, MissingExtraError

if TYPE_CHECKING:
    import tokenizers

SMALLEST_VOCABULARY = 257
"""The 256 bytes and the separator."""

LARGEST_VOCABULARY = 2**22
"""Published ones have up to some 260,000. The library ends the process when it gets no memory for more."""

_SAMPLE = 2**20  # characters
_LONG_WORD = 512  # characters
_MIN_FREQUENCY = 2


@dataclass(frozen=True)
class TrainedTokenizer:
    """What `train_tokenizer` made.

    Attributes:
        path: the file.
        vocab_size: ids of the tokenizer; fewer than requested when no more pairs of the text repeat.
        text_bytes: bytes of UTF-8 text that it was trained on.
        bytes_per_token: measured on the first MB of that text.
        left_out: what is wrong with the records that were left out, each with its place.
    """

    path: Path
    vocab_size: int
    text_bytes: int
    bytes_per_token: float
    left_out: Sequence[str] = ()


def train_tokenizer(
    paths: Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    *,
    vocab_size: int,
    source: str | None = None,
    hub: str | None = None,
    split: str = "train",
    patterns: Sequence[str] = DEFAULT_PATTERNS,
    records: TextRecords = TEXT_RECORDS,
    skip_bad_records: bool = False,
    force: bool = False,
    progress: bool = False,
) -> TrainedTokenizer:
    """Train a byte-level BPE tokenizer and write it as a JSON file of the `tokenizers` library.

    It works like GPT-2's: a regular expression splits the text, and bytes are merged. Any text can be encoded, and
    decoding gives the same text. The separator `<|endoftext|>` has id 0, the bytes have the next 256 ids. Pairs that
    occur only once are not merged. The text is streamed. Equal text in equal files gives an equal tokenizer, for any
    number of threads. The file appears when it is complete.

    Args:
        paths: text, JSON lines and Parquet files, and folders that are searched for `patterns`.
        out: the file to write.
        vocab_size: the most ids that it may have, from 257 to 4,194,304.
        source, hub, split: read in place of `paths`, as for `prepare`.
        patterns: which file names are taken from folders; files that are named in `paths` always are.
        records: which field or column holds the text.
        skip_bad_records: leave records out that cannot be used; without it, one is an error.
        force: replace a file at `out`.
        progress: show the library's own progress on the standard error.

    Raises:
        DataError: nothing to read, text that is not UTF-8, a vocabulary that is too small or too large, or a file that
            must be kept or cannot be written.
        MissingExtraError: `tokenizers` is not installed.
    """
    path = Path(out)
    if vocab_size < SMALLEST_VOCABULARY:
        raise DataError(
            f"a vocabulary of {vocab_size} is too small: {SMALLEST_VOCABULARY} hold the 256 bytes and the separator"
        )
    if vocab_size > LARGEST_VOCABULARY:
        raise DataError(f"a vocabulary of {vocab_size} is too large: at most {LARGEST_VOCABULARY} are possible")
    if path.is_dir():
        raise DataError(f"{path}: is a folder; name the file to write, such as {path / 'tokenizer.json'}")
    if path.exists() and not force:
        raise DataError(f"{path}: exists already; replace it with --force or choose another file")
    # Train. The text is streamed through a counter, which also keeps a sample of it.
    inputs, _ = choose_inputs(paths, source=source, hub=hub, split=split, patterns=patterns, records=records)
    left_out: list[str] = []
    text = _CountedText(texts(inputs, left_out if skip_bad_records else None))
    trained = _trained(text, vocab_size, progress).to_str(pretty=True)
    if not text.bytes:
        raise DataError("all documents are empty: there is nothing to train on")
    # Write the file, if our own reader accepts it.
    tokenizer = json_tokenizer(trained)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(FileSystem(), path, trained.encode("utf-8"))
    except OSError as error:
        raise DataError(f"{path}: cannot be written: {error.strerror}") from error
    tokens = len(encode_long(tokenizer, text.sample))
    return TrainedTokenizer(
        path=path,
        vocab_size=tokenizer.vocab_size,
        text_bytes=text.bytes,
        bytes_per_token=len(text.sample.encode("utf-8")) / tokens,
        left_out=left_out,
    )


class _CountedText:
    """Counts the text that passes through, and keeps its beginning as a sample."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._texts = texts
        self.bytes = 0
        self.sample = ""

    def __iter__(self) -> Iterator[str]:
        for text in self._texts:
            self.bytes += len(text.encode("utf-8"))
            self.sample += text[: _SAMPLE - len(self.sample)]
            yield from _without_long_words(text)


def _without_long_words(text: str) -> Iterator[str]:
    """The text, with very long words divided, such as encoded binary data. Their pairs are still counted.

    The time that the library needs for a word grows with the square of its length.
    """
    start = 0
    for stop in range(_LONG_WORD, len(text), _LONG_WORD):
        if len(text[stop - _LONG_WORD : stop].split(None, 1)) < 2:  # within a word, or within white space
            yield text[start:stop]
            start = stop
    yield text[start:]


def _trained(text: Iterable[str], vocab_size: int, progress: bool) -> tokenizers.Tokenizer:
    try:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    except ImportError as error:
        raise MissingExtraError("training a tokenizer needs tokenizers; install speedtronic[tokenizers]") from error
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=_MIN_FREQUENCY,
        special_tokens=[SEPARATOR],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=progress,
    )
    tokenizer.train_from_iterator(text, trainer)
    return tokenizer
