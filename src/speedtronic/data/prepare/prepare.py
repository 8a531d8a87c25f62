"""Text into token shards: in parallel, resumable, and the same for any number of processes.

The inputs are divided into units of about 1 MB, which depend on the inputs and the recipe alone. Processes encode
units; this one writes the results in order, and every few seconds a journal of how far it has come. A run that
finds the journal of one like itself goes on behind the last unit in it.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar

from speedtronic.data.prepare.process_pool import ProcessLostError, available_cpus, in_order
from speedtronic.data.prepare.sources import DEFAULT_PATTERNS, Input, choose_inputs
from speedtronic.data.prepare.work_folder import PartialFolder, is_resumable, output_folder
from speedtronic.data.prepare.work_units import (
    BEGINNING,
    UNIT_BYTES,
    Position,
    Unit,
    characters_of_unit,
    checksum_unit,
    encode_unit,
    plan,
)
from speedtronic.data.shard_writer import DEFAULT_SHARD_TOKENS, ShardFiles, publish, remove_leftovers
from speedtronic.data.shards import VERSION, ShardSet, is_prepared
from speedtronic.data.tokenizers.base import Tokenizer, spec_fingerprint
from speedtronic.data.tokenizers.chars import CorpusCharTokenizer
from speedtronic.data.tokenizers.chunking import CutRule, cut_rule
from speedtronic.data.tokenizers.from_file import load_tokenizer, tokenizer_from_spec
from speedtronic.errors import DataError

CHARACTERS = "chars"

_SECONDS_BETWEEN_NOTES = 5.0
_SPEC = "tokenizer_spec.json"

R = TypeVar("R")


@dataclass(frozen=True)
class PreparedSummary:
    """What `prepare` made or found.

    Attributes:
        folder: the prepared folder.
        tokens: tokens in it, separators included.
        documents: documents, each ended by a separator.
        text_bytes: bytes of their text, in UTF-8.
        encoded_bytes: those of them that this call has encoded: not what an earlier one had done.
        vocab_size: ids of the tokenizer; the model's vocabulary must hold them.
        shards: number of shards.
        skipped: files of a built-in source that are not UTF-8 text and so were left out.
        already_prepared: whether the folder was there with the same content, and nothing was written.
    """

    folder: Path
    tokens: int
    documents: int
    text_bytes: int
    encoded_bytes: int
    vocab_size: int
    shards: int
    skipped: int
    already_prepared: bool


@dataclass(frozen=True)
class Progress:
    """How far a preparation has come.

    Attributes:
        stage: "checking" a folder that is there, collecting "characters", or "encoding".
        done: bytes of the inputs that are done in this stage, those of an earlier run included.
        total: bytes of all inputs; of tables an estimate.
    """

    stage: str
    done: int
    total: int


@dataclass(frozen=True)
class _Job:
    inputs: Sequence[Input]
    recipe: Mapping[str, Any]
    processes: int
    on_progress: Callable[[Progress], None]
    clock: Callable[[], float]

    @property
    def identity(self) -> str:
        """Equal for jobs that go on with each other's work."""
        stamps = [each.stamp for each in self.inputs]
        return _checksum([self.recipe, stamps, VERSION])

    def units(self, rule: CutRule, start: Position = BEGINNING) -> Iterator[Unit]:
        return plan(self.inputs, rule, start=start, size=self.recipe["unit_bytes"])

    def results(self, stage: str, task: Callable[[Unit], R], units: Iterator[Unit]) -> Generator[tuple[Unit, R]]:
        """Each unit with what `task` made of it. Progress is told when the caller is done with the unit."""
        sizes = [each.size for each in self.inputs]
        before = [0, *accumulate(sizes)]
        with closing(in_order(task, units, processes=self.processes)) as results:
            for unit, result in results:
                yield unit, result
                done = before[unit.next.number]
                if unit.next.number < len(self.inputs):
                    each = self.inputs[unit.next.number]
                    done += each.size * unit.next.offset // each.length
                self.on_progress(Progress(stage, done, before[-1]))


def prepare(
    paths: Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    *,
    source: str | None = None,
    hub: str | None = None,
    split: str = "train",
    tokenizer: str = "bytes",
    text_field: str = "text",
    patterns: Sequence[str] = DEFAULT_PATTERNS,
    shard_tokens: int = DEFAULT_SHARD_TOKENS,
    seed: int = 0,
    force: bool = False,
    processes: int | None = None,
    on_progress: Callable[[Progress], None] = lambda progress: None,
    clock: Callable[[], float] = time.monotonic,
    unit_bytes: int = UNIT_BYTES,
) -> PreparedSummary:
    """Write the tokens of text to a folder of shards.

    Every non-empty text file, JSON line or row of a table is a document, ended by the tokenizer's separator. Files
    are ordered by a hash of their names, so that the end of the data, which a run holds out, is a fair sample of
    it; the documents of one file keep their order. The text is streamed: memory does not grow with it, unless the
    tokenizer allows no cut in a document. The folder appears when it is complete. Until then the work is kept
    beside it, and the same call goes on with what one that was killed or interrupted has left.

    Args:
        paths: text, `.jsonl` and `.parquet` files, and folders that are searched for `patterns`; hidden files and
            folders are passed over.
        out: the folder to write. One that has the same content already is kept.
        source: "python-stdlib", the sources of the running interpreter's own library, in place of `paths`.
        hub: a dataset that the `datasets` library loads, NAME or NAME:CONFIG, in place of `paths`.
        split: of that dataset.
        tokenizer: "bytes"; "chars" for the characters that occur in the text; or a file or folder as
            `load_tokenizer` takes it.
        text_field: the field or column that holds the text.
        patterns: which file names are taken from folders; files that are named in `paths` always are.
        shard_tokens: the most tokens in one shard.
        seed: of the order of files.
        force: replace a prepared folder that has other content.
        processes: how many encode; None for as many as there are CPUs for this process. They are spawned: a script
            that calls this must do so under `if __name__ == "__main__":`.
        on_progress: told how far the work has come, after every unit of it.
        clock: seconds, monotonic.
        unit_bytes: the least text that one process encodes at a time.

    Raises:
        DataError: nothing to read, what is not text (with its place), or a folder that must be kept or cannot be
            written.
        MissingExtraError: a format or a tokenizer whose library is not installed.
    """
    if processes is not None and processes < 1:
        raise DataError(f"at least 1 process must prepare the data, not {processes}")
    folder = output_folder(out)
    inputs, skipped = choose_inputs(
        paths, source=source, hub=hub, split=split, patterns=patterns, text_field=text_field
    )
    remove_leftovers(folder)
    inputs.sort(key=lambda each: _place(each.name, seed))
    encoder = None if tokenizer == CHARACTERS else load_tokenizer(tokenizer)
    recipe = {
        "origin": source or hub or "files",
        "tokenizer": CHARACTERS if encoder is None else spec_fingerprint(encoder.spec()),
        "text_field": text_field,
        "shard_tokens": shard_tokens,
        "seed": seed,
        "files": _checksum([[each.name, each.size, each.length] for each in inputs]),
        "skipped": skipped,
        "unit_bytes": unit_bytes,
    }
    job = _Job(inputs, recipe, processes or available_cpus(), on_progress, clock)
    existing = _prepared_before(folder, job, force)
    if existing is not None:
        return _summary(existing, encoded_bytes=0, already_prepared=True)
    try:
        with PartialFolder(folder) as work:
            encoded_bytes = _make(job, encoder, work)
            publish(work.files, folder, replace=force)
            work.forget()
    except OSError as error:
        raise DataError(f"{folder}: cannot be written: {error}") from error
    return _summary(ShardSet(folder), encoded_bytes=encoded_bytes, already_prepared=False)


def _place(name: str, seed: int) -> tuple[bytes, str]:
    return hashlib.blake2b(f"{seed}:{name}".encode(errors="surrogateescape"), digest_size=8).digest(), name


def _checksum(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _prepared_before(folder: Path, job: _Job, force: bool) -> ShardSet | None:
    """The shards at `folder` if they are those wanted, None if it is to be written; otherwise DataError."""
    try:
        if not folder.exists() or (force and is_prepared(folder)):
            return None
        if folder.is_dir() and not any(folder.iterdir()):
            _give_way(folder)
            return None
        existing = _same_content(folder, job)
    except OSError as error:
        raise DataError(f"{error.filename or folder}: cannot be read: {error.strerror or error}") from error
    _remove_notes(folder)
    return existing


def _give_way(empty: Path) -> None:
    """Remove an empty folder, whose place the finished one takes. That it cannot is better known before the work."""
    try:
        empty.rmdir()
    except OSError as error:
        raise DataError(
            f"{empty}: the finished folder cannot take the place of this empty one ({error.strerror}), as it may be a "
            f"mount point or the working folder; name a new folder inside it"
        ) from error


def _remove_notes(folder: Path) -> None:
    """Remove what a preparation has left that was killed when all was done but that."""
    if is_resumable(folder):
        # Another process may be about to replace the folder, or nobody may write here: neither matters to this one.
        with suppress(DataError, OSError), PartialFolder(folder) as work:
            work.forget()


def _same_content(folder: Path, job: _Job) -> ShardSet:
    """The shards at `folder` if they are those wanted; otherwise DataError."""
    if not is_prepared(folder):
        raise DataError(f"{folder}: exists and is not a prepared folder; choose another one for the output")
    existing = ShardSet(folder)
    differing = [name for name, value in job.recipe.items() if existing.source.get(name) != value]
    if not differing and existing.source.get("content") == _content(job, cut_rule(existing.tokenizer)):
        return existing
    raise DataError(
        f"{folder}: is prepared already, with another {' and '.join(differing or ['content'])}; replace it with "
        f"--force or choose another folder for the output"
    )


def _content(job: _Job, rule: CutRule) -> str:
    content = b""
    with closing(job.results("checking", checksum_unit, job.units(rule))) as results:
        for _, checksum in results:
            content = _chained(content, checksum)
    return content.hex()


def _chained(content: bytes, checksum: bytes) -> bytes:
    return hashlib.sha256(content + checksum).digest()


def _make(job: _Job, encoder: Tokenizer | None, work: PartialFolder) -> int:
    """Write the files; returns the bytes of text that were encoded."""
    try:
        start = _go_on(job, encoder, work) or _begin(job, encoder, work)
        with closing(start.files):
            return _encode(job, start, work) - start.text_bytes
    except ProcessLostError:
        raise
    except DataError:
        work.forget()  # the inputs must change, and another run cannot go on with changed ones
        raise


@dataclass(frozen=True)
class _Start:
    tokenizer: Tokenizer
    files: ShardFiles
    position: Position = BEGINNING
    content: bytes = b""
    text_bytes: int = 0


def _go_on(job: _Job, encoder: Tokenizer | None, work: PartialFolder) -> _Start | None:
    """Where a run of the same job has stopped; None if there was none."""
    journal = work.journal()
    if journal is None or journal["job"] != job.identity:
        return None
    try:
        tokenizer = encoder or tokenizer_from_spec(json.loads((work.path / _SPEC).read_bytes()))
        files = ShardFiles(
            work.files, tokenizer=tokenizer, shard_tokens=job.recipe["shard_tokens"], state=journal["files"]
        )
    except OSError:
        return None  # somebody has been here: what is left is worth no more than nothing
    content = bytes.fromhex(journal["content"])
    return _Start(tokenizer, files, Position(*journal["next"]), content, journal["text_bytes"])


def _begin(job: _Job, encoder: Tokenizer | None, work: PartialFolder) -> _Start:
    work.clear()
    tokenizer = encoder or _corpus_characters(job)
    if encoder is None:
        work.keep(_SPEC, json.dumps(tokenizer.spec()).encode())
    return _Start(tokenizer, ShardFiles(work.files, tokenizer=tokenizer, shard_tokens=job.recipe["shard_tokens"]))


def _corpus_characters(job: _Job) -> CorpusCharTokenizer:
    found: set[str] = set()
    with closing(job.results("characters", characters_of_unit, job.units("characters"))) as results:
        for _, characters in results:
            found.update(characters)
    return CorpusCharTokenizer(found)


def _encode(job: _Job, start: _Start, work: PartialFolder) -> int:
    """Write the rest of the files; returns the bytes of text in all of them."""
    files, content, text_bytes = start.files, start.content, start.text_bytes
    task = partial(encode_unit, tokenizer=start.tokenizer)
    noted = job.clock()
    with closing(job.results("encoding", task, job.units(cut_rule(start.tokenizer), start.position))) as results:
        for unit, encoded in results:
            files.append(encoded.ids, encoded.ends)
            content = _chained(content, encoded.checksum)
            text_bytes += encoded.size
            if job.clock() - noted >= _SECONDS_BETWEEN_NOTES:
                work.note(
                    {
                        "job": job.identity,
                        "next": [unit.next.number, unit.next.offset],
                        "content": content.hex(),
                        "text_bytes": text_bytes,
                        "files": files.state_dict(),
                    }
                )
                noted = job.clock()
    if not files.tokens:
        raise DataError("all documents are empty: there is nothing to train on")
    files.finish({**job.recipe, "content": content.hex(), "text_bytes": text_bytes})
    return text_bytes


def _summary(shards: ShardSet, *, encoded_bytes: int, already_prepared: bool) -> PreparedSummary:
    return PreparedSummary(
        folder=shards.folder,
        tokens=shards.tokens,
        documents=shards.documents,
        text_bytes=int(shards.source["text_bytes"]),
        encoded_bytes=encoded_bytes,
        vocab_size=shards.vocab_size,
        shards=len(shards.shards),
        skipped=int(shards.source["skipped"]),
        already_prepared=already_prepared,
    )
