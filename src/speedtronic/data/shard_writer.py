"""Writing a folder of token shards; `shards.py` describes the format."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Literal

import numpy as np
import numpy.typing as npt

from speedtronic.data.shards import (
    DOCUMENTS_MAGIC,
    HEADER,
    INDEX,
    POSITION_DTYPE,
    READ_AT_ONCE,
    TARGET_DTYPE,
    TARGETS_MAGIC,
    TOKEN_DTYPES,
    TOKENIZER_SPEC,
    TOKENS_MAGIC,
    VERSION,
    VERSION_WITH_TARGETS,
    Shard,
    ShardIndex,
    file_size,
    is_prepared,
)
from speedtronic.data.tokenizers.base import IdArray, Tokenizer, spec_fingerprint
from speedtronic.durable.files import FileSystem, sync, write_file
from speedtronic.durable.folders import publish_folder, temporary_beside
from speedtronic.errors import DataError

DEFAULT_SHARD_TOKENS = 64 * 2**20


class _ArrayFile:
    """A file with a header and fixed-size entries that is being written. The header is filled in at the end."""

    def __init__(self, path: Path, magic: bytes, dtype: np.dtype[Any], entries: int = 0) -> None:
        """Start a new file, or continue a file behind its first `entries` entries."""
        self.name = path.name
        self.entries = entries
        self._magic = magic
        self._dtype = dtype
        self._digest = hashlib.sha256()
        self._file: BinaryIO = path.open("r+b" if entries else "wb")
        try:
            if not entries:
                self._file.write(self._header())
                return
            # Drop what was written after the state was saved, and take the checksum of what stays.
            _check_length(path, dtype, entries)
            self._file.truncate(file_size(dtype, entries))
            self._file.seek(HEADER.size)
            while piece := self._file.read(READ_AT_ONCE):
                self._digest.update(piece)
        except BaseException:  # an interrupt too closes the file; it is raised on
            self.close()
            raise

    def _header(self) -> bytes:
        return HEADER.pack(self._magic, VERSION, self._dtype.itemsize, self.entries)

    def append(self, values: npt.NDArray[Any]) -> None:
        payload = values.astype(self._dtype, copy=False).tobytes()
        self._file.write(payload)
        self._digest.update(payload)
        self.entries += len(values)

    def sync(self) -> None:
        self._file.flush()
        sync(self._file.fileno())

    def finish(self) -> str:
        """Put the whole file on the disk; returns the checksum of its entries."""
        self._file.seek(0)
        self._file.write(self._header())
        self.sync()
        self._file.close()
        return self._digest.hexdigest()

    def close(self) -> None:
        # After a failed write the buffered rest cannot be written either. Nobody needs it.
        with suppress(OSError):
            self._file.close()


class ShardFiles:
    """The files of a set that is being written into an existing folder.

    The writing can stop at any `state_dict` and continue from it later; the files are the same in the end.

    Args:
        folder: where the files are; nobody else writes there.
        tokenizer: the tokenizer of the ids.
        shard_tokens: the most tokens in one shard.
        with_targets: whether it is told which tokens are targets of training; else all are.
        state: what `state_dict` returned; None to start.

    Raises:
        DataError: a shard of no tokens.
        OSError: a file that `state` needs is missing or too short, or cannot be written.
    """

    def __init__(
        self,
        folder: Path,
        *,
        tokenizer: Tokenizer,
        shard_tokens: int = DEFAULT_SHARD_TOKENS,
        with_targets: bool = False,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        if shard_tokens < 1:
            raise DataError(f"a shard must hold at least 1 token, not {shard_tokens}")
        self.tokens = 0
        self.documents = 0
        self._folder = folder
        self._tokenizer = tokenizer
        self._vocab_size = tokenizer.vocab_size
        self._shard_tokens = shard_tokens
        self._with_targets = with_targets
        self._dtype_name: Literal["uint16", "uint32"] = "uint16" if tokenizer.vocab_size <= 2**16 else "uint32"
        self._dtype = TOKEN_DTYPES[self._dtype_name]
        self._shards: list[Shard] = []
        self._open: list[_ArrayFile] = []  # the tokens, the ends of documents, maybe the targets
        if state is not None:
            self._restore(state)

    def _restore(self, state: Mapping[str, Any]) -> None:
        self.tokens, self.documents = state["tokens"], state["documents"]
        self._shards = [Shard(**shard) for shard in state["shards"]]
        for shard in self._shards:
            for name, _, dtype, entries, _ in shard.files(self._dtype):
                _check_length(self._folder / name, dtype, entries)
        kept = {name for shard in self._shards for name, *_ in shard.files(self._dtype)}
        if state["open"] is not None:
            self._open = self._open_shard(*state["open"])
            kept.update(file.name for file in self._open)
        # Remove the shards that were begun after the state was saved.
        for path in self._folder.iterdir():
            if path.name not in kept:
                path.unlink()

    def state_dict(self) -> dict[str, Any]:
        """Put all that was appended on the disk; returns a JSON-able description of it."""
        for file in self._open:
            file.sync()
        return {
            "tokens": self.tokens,
            "documents": self.documents,
            "shards": [asdict(shard) for shard in self._shards],
            "open": [file.entries for file in self._open[:2]] or None,
        }

    def append(self, ids: IdArray, ends: npt.NDArray[np.int64], targets: npt.NDArray[np.bool_] | None = None) -> None:
        """Append token ids, separators included.

        Args:
            ids: (T,), any unsigned integers.
            ends: ascending positions in `ids`, each one behind the separator of a document.
            targets: (T,), which of them are targets; None for all. Only a set with targets may have others.

        Raises:
            DataError: for an id outside the tokenizer's vocabulary.
        """
        if len(ids) and (largest := int(ids.max())) >= self._vocab_size:
            raise DataError(f"token id {largest} does not fit the tokenizer's vocabulary of {self._vocab_size}")
        self.tokens += len(ids)
        self.documents += len(ends)
        if targets is None:
            targets = np.ones(len(ids), np.bool_)
        elif not self._with_targets:
            raise ValueError("targets are for a set that was opened with_targets")
        while len(ids):
            tokens, documents, *more = self._open = self._open or self._open_shard()
            # What fits into this shard goes there, the rest into the next ones.
            part = ids[: self._shard_tokens - tokens.entries]
            within = ends[: ends.searchsorted(len(part), side="right")]
            documents.append(within + tokens.entries)
            tokens.append(part)
            for file in more:
                file.append(targets[: len(part)])
            ids, ends, targets = ids[len(part) :], ends[len(within) :] - len(part), targets[len(part) :]
            if tokens.entries == self._shard_tokens:
                self._close_shard()

    def write(self, ids: IdArray) -> None:
        """Append token ids of a document. Raises DataError for an id outside the tokenizer's vocabulary."""
        self.append(ids, np.array([], np.int64))

    def end_document(self) -> None:
        """Append the tokenizer's separator and count a document."""
        self.append(np.array([self._tokenizer.separator_id], np.uint32), np.array([1], np.int64))

    def _open_shard(self, tokens: int = 0, documents: int = 0) -> list[_ArrayFile]:
        path = self._folder / f"shard_{len(self._shards):05d}.bin"
        kinds: list[tuple[str, bytes, np.dtype[Any], int]] = [
            (".bin", TOKENS_MAGIC, self._dtype, tokens),
            (".idx", DOCUMENTS_MAGIC, POSITION_DTYPE, documents),
        ]
        if self._with_targets:
            kinds.append((".tgt", TARGETS_MAGIC, TARGET_DTYPE, tokens))
        opened: list[_ArrayFile] = []
        try:
            for suffix, magic, dtype, entries in kinds:
                opened.append(_ArrayFile(path.with_suffix(suffix), magic, dtype, entries=entries))
        except BaseException:  # an interrupt too closes the files; it is raised on
            for file in opened:
                file.close()
            raise
        return opened

    def _close_shard(self) -> None:
        if not self._open:
            return
        tokens, documents, *more = self._open
        self._shards.append(
            Shard(
                file=tokens.name,
                tokens=tokens.entries,
                sha256=tokens.finish(),
                documents_file=documents.name,
                documents=documents.entries,
                documents_sha256=documents.finish(),
                targets_file=more[0].name if more else None,
                targets_sha256=more[0].finish() if more else None,
            )
        )
        self._open = []

    def finish(self, source: Mapping[str, Any]) -> None:
        """Close the last shard and write the index, which makes the folder a prepared one."""
        self._close_shard()
        spec = self._tokenizer.spec()
        index = ShardIndex(
            version=VERSION_WITH_TARGETS if self._with_targets else VERSION,
            dtype=self._dtype_name,
            tokens=self.tokens,
            documents=self.documents,
            vocab_size=self._vocab_size,
            tokenizer_fingerprint=spec_fingerprint(spec),
            source=dict(source),
            shards=self._shards,
        )
        # The index comes last, since a folder with an index is complete.
        content = index.model_dump()
        content["shards"] = [
            {key: each for key, each in shard.items() if each is not None} for shard in content["shards"]
        ]
        for name, described in ((TOKENIZER_SPEC, spec), (INDEX, content)):
            write_file(FileSystem(), self._folder / name, [json.dumps(described, indent=1).encode(), b"\n"])

    def close(self) -> None:
        """Close the files as they are."""
        for file in self._open:
            file.close()


def _check_length(path: Path, dtype: np.dtype[Any], entries: int) -> None:
    if path.stat().st_size < file_size(dtype, entries):
        raise OSError(f"{path} is shorter than it was")


class ShardWriter(ShardFiles):
    """Writes a folder of shards. Use it as a context manager: it publishes the folder when the block succeeds.

    Everything is written to a folder beside `folder` and renamed at the end, so a reader sees all or nothing.
    A block that raises leaves no trace.

    Args:
        folder: where the shards will be.
        tokenizer: the tokenizer of the ids; its spec is kept with them.
        shard_tokens: the most tokens in one shard.
        with_targets: whether it is told which tokens are targets of training; else all are.
        replace: replace a prepared folder; without it, a folder that exists is an OSError.

    Attributes:
        source: JSON-able facts about where the text came from, kept in the index.
        tokens: how many have been written, separators included.
        documents: how many have been ended.

    Raises:
        DataError: a shard of no tokens.
    """

    def __init__(
        self,
        folder: Path,
        *,
        tokenizer: Tokenizer,
        shard_tokens: int = DEFAULT_SHARD_TOKENS,
        with_targets: bool = False,
        replace: bool = False,
    ) -> None:
        super().__init__(folder, tokenizer=tokenizer, shard_tokens=shard_tokens, with_targets=with_targets)
        self.source: dict[str, Any] = {}
        self._published = folder
        self._replace = replace

    def __enter__(self) -> ShardWriter:
        with ExitStack() as stack:
            self._folder = stack.enter_context(temporary_beside(FileSystem(), self._published))
            self._folder.mkdir()
            stack.callback(self.close)
            self._cleanup = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is not None:
            self._cleanup.__exit__(kind, error, traceback)
            return
        with self._cleanup:
            self.finish(self.source)
            replace = self._replace and is_prepared(self._published)
            publish_folder(FileSystem(), self._folder, self._published, replace=replace)
