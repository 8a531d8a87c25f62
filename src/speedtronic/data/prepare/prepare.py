"""Text into token shards: in parallel, resumable, and with the same result for any number of processes.

The inputs are divided into units of about 1 MB, which depend only on the inputs and the recipe. Other processes encode
the units. This process writes the results in order, and every few seconds a journal of its progress. A run that finds
the journal of an equal run continues behind the last unit in it.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar

from speedtronic.data.prepare.encode import (
    BEGINNING,
    UNIT_BYTES,
    Position,
    Unit,
    characters_of_unit,
    checksum_unit,
    encode_unit,
    plan_units,
)
from speedtronic.data.prepare.inputs import Input
from speedtronic.data.prepare.process_pool import ProcessLostError, available_cpus, map_in_order
from speedtronic.data.prepare.records import TEXT_RECORDS, Records
from speedtronic.data.prepare.sources import DEFAULT_PATTERNS, choose_inputs
from speedtronic.data.prepare.staging import StagingFolder, is_resumable, output_folder
from speedtronic.data.shard_writer import DEFAULT_SHARD_TOKENS, ShardFiles
from speedtronic.data.shards import VERSION, ShardSet, is_prepared
from speedtronic.data.tokenizers.base import Tokenizer, spec_fingerprint
from speedtronic.data.tokenizers.chars import CorpusCharTokenizer
from speedtronic.data.tokenizers.chunking import CutRule, cut_rule
from speedtronic.data.tokenizers.from_file import load_tokenizer, tokenizer_from_spec
from speedtronic.durable.files import FileSystem
from speedtronic.durable.folders import publish_folder, recover
from speedtronic.errors import DataError

CHARACTERS = "chars"

_SECONDS_BETWEEN_JOURNALS = 5.0
_JOURNAL_VERSION = 2  # of what a journal says
_SPEC = "tokenizer_spec.json"
_MOST_NAMED = 3  # records that are left out

R = TypeVar("R")


@dataclass(frozen=True)
class PreparedSummary:
    """What `prepare` has made or found.

    Attributes:
        folder: the prepared folder.
        tokens: tokens in it, separators included.
        documents: documents, each ended by a separator.
        text_bytes: bytes of their text, in UTF-8.
        encoded_bytes: how many of them this call has encoded, without the work of an earlier call.
        vocab_size: ids of the tokenizer; the model's vocabulary must hold them.
        shards: number of shards.
        skipped: files of a built-in source that are not UTF-8 text and so were left out.
        bad_records: how many records were left out because they cannot be used.
        first_bad_records: what is wrong with the first few of them, each with its place.
        targets: how many of the tokens are targets of training.
        already_prepared: whether the folder was already there with the same content, so that nothing was written.
    """

    folder: Path
    tokens: int
    documents: int
    text_bytes: int
    encoded_bytes: int
    vocab_size: int
    shards: int
    skipped: int
    bad_records: int
    first_bad_records: Sequence[str]
    targets: int
    already_prepared: bool


@dataclass(frozen=True)
class Progress:
    """How far a preparation has come.

    Attributes:
        stage: "checking" an existing folder, collecting "characters", or "encoding".
        done: bytes of the inputs that are done in this stage, those of an earlier run included.
        total: bytes of all inputs; an estimate for tables.
    """

    stage: str
    done: int
    total: int


@dataclass(frozen=True)
class _Job:
    inputs: Sequence[Input]
    recipe: Mapping[str, Any]
    skip_bad_records: bool
    processes: int
    on_progress: Callable[[Progress], None]
    clock: Callable[[], float]

    @property
    def identity(self) -> str:
        """Equal for two jobs when one can continue the work of the other."""
        stamps = [each.stamp for each in self.inputs]
        return _checksum([self.recipe, stamps, self.skip_bad_records, VERSION, _JOURNAL_VERSION])

    def results(
        self, stage: str, task: Callable[[Unit], R], rule: CutRule, start: Position = BEGINNING
    ) -> Generator[tuple[Unit, R]]:
        """Each unit from `start` on with the result of `task`. Progress is reported when the caller has used it."""
        before = [0, *accumulate(each.size for each in self.inputs)]
        units = plan_units(self.inputs, rule, start=start, size=self.recipe["unit_bytes"])
        with closing(map_in_order(task, units, processes=self.processes)) as results:
            for unit, result in results:
                yield unit, result
                done = before[unit.next.number]
                if unit.next.number < len(self.inputs):
                    # Inside an input: its share of the bytes follows from the share of its offsets.
                    each = self.inputs[unit.next.number]
                    done += min(each.size * unit.next.offset // each.length, each.size)
                self.on_progress(Progress(stage, done, before[-1]))


def prepare(
    paths: Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    *,
    source: str | None = None,
    hub: str | None = None,
    split: str = "train",
    tokenizer: str = "bytes",
    records: Records = TEXT_RECORDS,
    skip_bad_records: bool = False,
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

    Every non-empty text file, JSON line or row of a table is a document, which ends with the tokenizer's separator.
    Files are ordered by a hash of their names, so that the end of the data, which a run holds out, is a fair sample of
    it. The documents of one file keep their order. The text is streamed: memory does not grow with it, unless the
    tokenizer allows no cut in a document. The folder appears when it is complete. Until then the work is kept beside
    it, and when a call was killed or interrupted, the same call continues its work.

    Args:
        paths: text, `.jsonl`, `.jsonl.gz`, `.jsonl.zst` and `.parquet` files, and folders that are searched for
            `patterns`; hidden files and folders are skipped.
        out: the folder to write. A folder that has the same content already is kept.
        source: "python-stdlib", the sources of the running interpreter's own library, in place of `paths`.
        hub: a dataset that the `datasets` library loads, NAME or NAME:CONFIG, in place of `paths`.
        split: the split of that dataset.
        tokenizer: "bytes"; "chars" for the characters that occur in the text; or a file or folder as
            `load_tokenizer` takes it.
        records: what a JSON line or a row holds: a text, a prompt with its completion, or a chat. Of the latter two the
            folder says which tokens are targets of training.
        skip_bad_records: leave records out that cannot be used, and count them; without it, one is an error.
        patterns: which file names are taken from folders; files that are named in `paths` always are.
        shard_tokens: the most tokens in one shard.
        seed: the seed of the order of files.
        force: replace a prepared folder that has other content.
        processes: how many processes encode; None for one per CPU that this process may use. They are spawned: a script
            that calls this must do so under `if __name__ == "__main__":`.
        on_progress: called after every unit with the progress of the work.
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
    inputs, skipped = choose_inputs(paths, source=source, hub=hub, split=split, patterns=patterns, records=records)
    recover(FileSystem(), folder)

    # The recipe is all that decides about the result, apart from the text itself. It is kept in the index.
    inputs = in_order(inputs, seed)
    encoder = None if tokenizer == CHARACTERS else load_tokenizer(tokenizer)
    recipe = {
        "origin": source or hub or "files",
        "tokenizer": CHARACTERS if encoder is None else spec_fingerprint(encoder.spec()),
        **records.recipe,
        "shard_tokens": shard_tokens,
        "seed": seed,
        "files": _checksum([[each.name, each.size, each.length] for each in inputs]),
        "skipped": skipped,
        "unit_bytes": unit_bytes,
    }
    job = _Job(inputs, recipe, skip_bad_records, processes or available_cpus(), on_progress, clock)
    existing = _prepared_before(folder, job, force)
    if existing is not None:
        return _summary(existing, encoded_bytes=0, already_prepared=True)
    # Write beside the folder and publish. A journal that is left after that would be of finished work, so remove it.
    try:
        with StagingFolder(folder) as staging:
            encoded_bytes = _write_shards(job, encoder, staging)
            publish_folder(FileSystem(), staging.files, folder, replace=force and is_prepared(folder))
            staging.remove_journal()
    except OSError as error:
        raise DataError(f"{folder}: cannot be written: {error}") from error
    return _summary(ShardSet(folder), encoded_bytes=encoded_bytes, already_prepared=False)


def in_order(inputs: Sequence[Input], seed: int) -> list[Input]:
    """The inputs in the order of a hash of their names."""

    def place(each: Input) -> tuple[bytes, str]:
        name = f"{seed}:{each.name}".encode(errors="surrogateescape")
        return hashlib.blake2b(name, digest_size=8).digest(), each.name

    return sorted(inputs, key=place)


def _checksum(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


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
        bad_records=int(shards.source.get("bad_records", 0)),
        first_bad_records=shards.source.get("first_bad_records", ()),
        targets=int(shards.source.get("targets", shards.tokens)),
        already_prepared=already_prepared,
    )


# ---------------------------------------------------------------------- a folder that is already there


def _prepared_before(folder: Path, job: _Job, force: bool) -> ShardSet | None:
    """The shards at `folder` if they have the wanted content, None if the folder is to be written; else DataError."""
    try:
        if not folder.exists() or (force and is_prepared(folder)):
            return None
        if folder.is_dir() and not any(folder.iterdir()):
            _remove_empty(folder)
            return None
        if not is_prepared(folder):
            raise DataError(f"{folder}: exists and is not a prepared folder; choose another one for the output")
        existing = ShardSet(folder)
        differing = [name for name, value in job.recipe.items() if existing.source.get(name) != value]
        if not differing and existing.source.get("content") != _content(job, cut_rule(existing.tokenizer)):
            differing = ["content"]
        if existing.source.get("bad_records") and not job.skip_bad_records:
            differing.append("choice of --bad-lines")
    except OSError as error:
        raise DataError(f"{error.filename or folder}: cannot be read: {error.strerror or error}") from error
    if differing:
        raise DataError(
            f"{folder}: is prepared already, with another {' and '.join(differing)}; replace it with --force or choose "
            f"another folder for the output"
        )
    # A preparation that was killed after the folder was published has left its journal.
    if is_resumable(folder):
        # Another process may be about to replace the folder, or nobody may write here: neither matters to this one.
        with suppress(DataError, OSError), StagingFolder(folder) as staging:
            staging.remove_journal()
    return existing


def _remove_empty(folder: Path) -> None:
    """Remove an empty folder, whose place the finished one takes. If that fails, it is better to know it now."""
    try:
        folder.rmdir()
    except OSError as error:
        raise DataError(
            f"{folder}: the finished folder cannot take the place of this empty one ({error.strerror}), as it may be a "
            f"mount point or the working folder; name a new folder inside it"
        ) from error


def _content(job: _Job, rule: CutRule) -> str:
    """The checksum of all text: a chain over the checksums of the units, as `_encode` makes it."""
    content = b""
    with closing(job.results("checking", checksum_unit, rule)) as results:
        for _, checksum in results:
            content = hashlib.sha256(content + checksum).digest()
    return content.hex()


# ---------------------------------------------------------------------- writing


@dataclass
class _State:
    """How far the encoding has come: all units before `position` are in `files`."""

    tokenizer: Tokenizer
    files: ShardFiles
    position: Position = BEGINNING
    content: bytes = b""
    text_bytes: int = 0
    targets: int = 0
    bad_records: int = 0
    first_bad_records: list[str] = field(default_factory=list)


def _write_shards(job: _Job, encoder: Tokenizer | None, staging: StagingFolder) -> int:
    """Write the files of the set; returns the bytes of text that were encoded here.

    Args:
        encoder: None for the characters of the text.
    """
    try:
        state = _resumed(job, encoder, staging) or _started(job, encoder, staging)
        before = state.text_bytes
        with closing(state.files):
            _encode(job, state, staging)
        return state.text_bytes - before
    except ProcessLostError:
        raise
    except DataError:
        # The inputs must change, and the work cannot continue with changed inputs.
        staging.remove_journal()
        raise


def _resumed(job: _Job, encoder: Tokenizer | None, staging: StagingFolder) -> _State | None:
    """The state in the journal of an equal job; None if there is none that can be used."""
    journal = staging.read_journal()
    if journal is None or journal["job"] != job.identity:
        return None
    try:
        tokenizer = encoder or tokenizer_from_spec(json.loads((staging.path / _SPEC).read_bytes()))
        files = _shard_files(job, tokenizer, staging, journal["files"])
    except OSError:
        return None  # a file has been removed or shortened
    return _State(
        tokenizer=tokenizer,
        files=files,
        position=Position(*journal["next"]),
        content=bytes.fromhex(journal["content"]),
        text_bytes=journal["text_bytes"],
        targets=journal["targets"],
        bad_records=journal["bad_records"],
        first_bad_records=journal["first_bad_records"],
    )


def _shard_files(
    job: _Job, tokenizer: Tokenizer, staging: StagingFolder, state: Mapping[str, Any] | None = None
) -> ShardFiles:
    return ShardFiles(
        staging.files,
        tokenizer=tokenizer,
        shard_tokens=job.recipe["shard_tokens"],
        with_targets="records" in job.recipe,
        state=state,
    )


def _started(job: _Job, encoder: Tokenizer | None, staging: StagingFolder) -> _State:
    """The state at the beginning, with nothing left of other work."""
    staging.clear()
    tokenizer = encoder
    if tokenizer is None:
        found: set[str] = set()
        task = partial(characters_of_unit, skip_bad_records=job.skip_bad_records)
        with closing(job.results("characters", task, "characters")) as results:
            for _, characters in results:
                found.update(characters)
        tokenizer = CorpusCharTokenizer(found)
        staging.write(_SPEC, json.dumps(tokenizer.spec()).encode())  # so that a later run need not collect them again
    return _State(tokenizer, _shard_files(job, tokenizer, staging))


def _encode(job: _Job, state: _State, staging: StagingFolder) -> None:
    """Write the rest of the files, with a journal every few seconds."""
    task = partial(encode_unit, tokenizer=state.tokenizer, skip_bad_records=job.skip_bad_records)
    journal_written = job.clock()
    with closing(job.results("encoding", task, cut_rule(state.tokenizer), state.position)) as results:
        for unit, encoded in results:
            state.files.append(encoded.ids, encoded.ends, encoded.targets)
            state.position = unit.next
            state.content = hashlib.sha256(state.content + encoded.checksum).digest()
            state.text_bytes += encoded.size
            state.targets += len(encoded.ids) if encoded.targets is None else int(encoded.targets.sum())
            state.bad_records += len(encoded.left_out)
            state.first_bad_records += encoded.left_out[: _MOST_NAMED - len(state.first_bad_records)]
            if job.clock() - journal_written >= _SECONDS_BETWEEN_JOURNALS:
                staging.write_journal(
                    {
                        "job": job.identity,
                        "next": [state.position.number, state.position.offset],
                        "content": state.content.hex(),
                        "text_bytes": state.text_bytes,
                        "targets": state.targets,
                        "bad_records": state.bad_records,
                        "first_bad_records": state.first_bad_records,
                        "files": state.files.state_dict(),
                    }
                )
                journal_written = job.clock()
    if not state.files.tokens:
        if state.bad_records:
            raise DataError(f"no record can be used; the first: {state.first_bad_records[0]}")
        raise DataError("all documents are empty: there is nothing to train on")
    facts: dict[str, Any] = {"content": state.content.hex(), "text_bytes": state.text_bytes}
    if state.bad_records:
        facts |= {"bad_records": state.bad_records, "first_bad_records": state.first_bad_records}
    if "records" in job.recipe:
        facts["targets"] = state.targets
    state.files.finish({**job.recipe, **facts})
