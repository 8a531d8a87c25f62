"""Text files and folders into token shards."""

from __future__ import annotations

import fnmatch
import hashlib
import os
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from speedtronic.data.shards import DEFAULT_SHARD_TOKENS, ShardSet, ShardWriter, is_prepared, remove_leftovers
from speedtronic.data.text import check_text_file, read_pieces
from speedtronic.data.tokenizers import CharacterwiseTokenizer, CharTokenizer, CorpusCharTokenizer
from speedtronic.errors import DataError

PYTHON_STDLIB = "python-stdlib"
DEFAULT_PATTERNS = ("*.txt", "*.md", "*.py")
TOKENIZERS = ("bytes", "chars")

_NOT_LIBRARY = frozenset({"site-packages", "dist-packages", "__pycache__"})


@dataclass(frozen=True)
class PreparedSummary:
    """What `prepare` made or found.

    Attributes:
        folder: the prepared folder.
        tokens: tokens in it, separators included.
        documents: documents, each ended by a separator.
        vocab_size: ids of the tokenizer; the model's vocabulary must hold them.
        shards: number of token files.
        skipped: files of a built-in source that are not UTF-8 text and so were left out.
        already_prepared: whether the folder was there with the same content, and nothing was written.
    """

    folder: Path
    tokens: int
    documents: int
    vocab_size: int
    shards: int
    skipped: int
    already_prepared: bool


@dataclass(frozen=True)
class _Document:
    name: str
    path: Path


def prepare(
    paths: Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    *,
    source: str | None = None,
    tokenizer: str = "bytes",
    patterns: Sequence[str] = DEFAULT_PATTERNS,
    shard_tokens: int = DEFAULT_SHARD_TOKENS,
    seed: int = 0,
    force: bool = False,
) -> PreparedSummary:
    """Write the tokens of text files to a folder of shards.

    Every non-empty file is a document, ended by the tokenizer's separator. Documents are ordered by a hash of
    their names, so that the end of the data, which a run holds out, is a fair sample of it. The text is
    streamed: memory does not grow with it. The folder appears when it is complete, and what an earlier call that
    was killed has left beside it is removed.

    Args:
        paths: text files, and folders that are searched for `patterns`; hidden files and folders are passed
            over.
        out: the folder to write. One that has the same content already is kept.
        source: "python-stdlib", the sources of the running interpreter's own library, in place of `paths`.
        tokenizer: "bytes", or "chars" for the characters that occur in the text.
        patterns: which file names are taken from folders; files that are named in `paths` always are.
        shard_tokens: the most tokens in one file.
        seed: of the order of documents.
        force: replace a prepared folder that has other content.

    Raises:
        DataError: nothing to read, a file that is not UTF-8 text (with the offset), or a folder that must be
            kept.
    """
    _check_request(paths, source, tokenizer)
    folder = Path(out)
    remove_leftovers(folder)
    documents, skipped = _library_sources() if source else (_user_documents(paths, patterns), 0)
    documents.sort(key=lambda document: _place(document.name, seed))
    recipe = {"origin": source or "files", "tokenizer": tokenizer, "shard_tokens": shard_tokens, "seed": seed}
    if folder.exists() and not (force and is_prepared(folder)):
        existing = _same_content(folder, {**recipe, "content": _content(documents), "skipped": skipped})
        if existing is not None:
            return _summary(existing, already_prepared=True)
    encoder = CharTokenizer() if tokenizer == "bytes" else CorpusCharTokenizer.from_texts(_texts(documents))
    try:
        with ShardWriter(folder, tokenizer=encoder, shard_tokens=shard_tokens, replace=force) as writer:
            content = _write(documents, encoder, writer)
            writer.source = {**recipe, "content": content, "skipped": skipped}
    except OSError as error:
        raise DataError(f"{folder}: cannot be written: {error}") from error
    return _summary(ShardSet(folder), already_prepared=False)


def _check_request(paths: Sequence[str | os.PathLike[str]], source: str | None, tokenizer: str) -> None:
    if tokenizer not in TOKENIZERS:
        raise DataError(f"tokenizer {tokenizer!r} is unknown; choose one of {', '.join(TOKENIZERS)}")
    if source not in (None, PYTHON_STDLIB):
        raise DataError(f"source {source!r} is unknown; the one built-in source is {PYTHON_STDLIB}")
    if bool(paths) == bool(source):
        raise DataError(f"name either files and folders to read or the source {PYTHON_STDLIB}")


def _same_content(folder: Path, wanted: dict[str, Any]) -> ShardSet | None:
    """The shards at `folder` if they are those wanted, None if it is empty; otherwise DataError."""
    if folder.is_dir() and not any(folder.iterdir()):
        return None
    if not is_prepared(folder):
        raise DataError(f"{folder}: exists and is not a prepared folder; choose another one for the output")
    existing = ShardSet(folder)
    if existing.source == wanted:
        return existing
    differing = [name for name in wanted if existing.source.get(name) != wanted[name]]
    raise DataError(
        f"{folder}: is prepared already, with another {' and '.join(differing)}; replace it with --force or "
        f"choose another folder for the output"
    )


def _place(name: str, seed: int) -> tuple[bytes, str]:
    return hashlib.blake2b(f"{seed}:{name}".encode(errors="surrogateescape"), digest_size=8).digest(), name


def _user_documents(paths: Sequence[str | os.PathLike[str]], patterns: Sequence[str]) -> list[_Document]:
    documents: dict[Path, _Document] = {}
    for path in map(Path, paths):
        found = _in_folder(path, patterns) if path.is_dir() else [_Document(path.name, path)]
        if not found:
            raise DataError(f"{path}: no file in this folder matches {' '.join(patterns)}; choose with --pattern")
        # A file that is named twice, or named and inside a named folder, is read once.
        documents.update((document.path.resolve(), document) for document in found)
    filled = [document for document in documents.values() if not _is_empty(document.path)]
    for document in filled:
        check_text_file(document.path)
    if not filled:
        raise DataError(f"{', '.join(map(str, paths))}: all files are empty")
    return filled


def _is_empty(path: Path) -> bool:
    return path.is_file() and path.stat().st_size == 0


def _in_folder(folder: Path, patterns: Sequence[str]) -> list[_Document]:
    root = folder.resolve().name
    return [
        _Document(f"{root}/{path.relative_to(folder).as_posix()}", path)
        for path in _walk(folder)
        if any(fnmatch.fnmatchcase(path.name, pattern) for pattern in patterns)
    ]


def _walk(folder: Path, omitted: frozenset[str] = frozenset()) -> Iterator[Path]:
    """Regular files below `folder` in a fixed order, without hidden ones and the folders `omitted`."""
    for parent, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in omitted)
        paths = (Path(parent, name) for name in sorted(files) if not name.startswith("."))
        yield from (path for path in paths if path.is_file())


def _library_sources() -> tuple[list[_Document], int]:
    """Python's library sources, and how many were left out: fixtures of its tests that are not UTF-8."""
    library = Path(sysconfig.get_path("stdlib"))
    documents, skipped = [], 0
    for path in _walk(library, _NOT_LIBRARY):
        if path.suffix != ".py" or not path.stat().st_size:
            continue
        if _is_utf8(path):
            documents.append(_Document(path.relative_to(library).as_posix(), path))
        else:
            skipped += 1
    if not documents:
        raise DataError(f"{library}: this Python keeps no library sources there; name files or folders instead")
    return documents, skipped


def _is_utf8(path: Path) -> bool:
    try:
        for _ in read_pieces(path):
            pass
    except DataError:
        return False
    return True


def _texts(documents: Iterable[_Document]) -> Iterator[str]:
    for document in documents:
        for piece in read_pieces(document.path):
            yield piece.decode("utf-8")


class _ContentDigest:
    """A checksum of documents in order, which does not depend on how they are read."""

    def __init__(self) -> None:
        self._all = hashlib.sha256()
        self._document = hashlib.sha256()

    def update(self, piece: bytes) -> None:
        self._document.update(piece)

    def end_document(self) -> None:
        self._all.update(self._document.digest())
        self._document = hashlib.sha256()

    def hexdigest(self) -> str:
        return self._all.hexdigest()


def _content(documents: Iterable[_Document]) -> str:
    digest = _ContentDigest()
    for document in documents:
        for piece in read_pieces(document.path):
            digest.update(piece)
        digest.end_document()
    return digest.hexdigest()


def _write(documents: Iterable[_Document], tokenizer: CharacterwiseTokenizer, writer: ShardWriter) -> str:
    digest = _ContentDigest()
    for document in documents:
        for piece in read_pieces(document.path):
            digest.update(piece)
            writer.write(tokenizer.encode_array(piece.decode("utf-8")))
        digest.end_document()
        writer.end_document()
    return digest.hexdigest()


def _summary(shards: ShardSet, *, already_prepared: bool) -> PreparedSummary:
    return PreparedSummary(
        folder=shards.folder,
        tokens=shards.tokens,
        documents=shards.documents,
        vocab_size=shards.tokenizer.vocab_size,
        shards=len(shards.shards),
        skipped=int(shards.source.get("skipped", 0)),
        already_prepared=already_prepared,
    )
