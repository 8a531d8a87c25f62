"""A cache of encoded text and chats, for what cannot be read at any position of its file."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from weakref import finalize

from speedtronic.data.prepare.encode import UNIT_BYTES, encode_unit, plan_units
from speedtronic.data.prepare.inputs import text_file
from speedtronic.data.prepare.records import ChatRecords, pieces_of
from speedtronic.data.prepare.sources import find_inputs
from speedtronic.data.shard_writer import ShardWriter
from speedtronic.data.shards import READ_AT_ONCE, ShardSet
from speedtronic.data.text import check_text_file, read_pieces
from speedtronic.data.tokenizers.base import Tokenizer, encode_texts, spec_fingerprint
from speedtronic.data.tokenizers.chunking import cut_rule
from speedtronic.durable.files import FileSystem
from speedtronic.durable.folders import recover
from speedtronic.errors import DataError, warn


def cache_folder() -> Path:
    """$SPEEDTRONIC_CACHE, else $XDG_CACHE_HOME/speedtronic, else ~/.cache/speedtronic.

    Raises:
        OSError: nothing says what the home folder is, as for a user whom the system does not know.
    """
    if own := os.environ.get("SPEEDTRONIC_CACHE"):
        return Path(own)
    if general := os.environ.get("XDG_CACHE_HOME"):
        return Path(general) / "speedtronic"
    try:
        return Path.home() / ".cache" / "speedtronic"
    except RuntimeError as error:
        raise OSError(str(error)) from error


def cached_tokens(
    path: Path,
    tokenizer: Tokenizer,
    *,
    chats: ChatRecords | None = None,
    unit_bytes: int = UNIT_BYTES,
    warn: Callable[[str], None] = warn,
) -> ShardSet:
    """The tokens of a text file, or of a file of chats. It is encoded once, and found again by content and tokenizer.

    A text is one document without an end. The file is streamed in pieces of `unit_bytes`, unless the tokenizer allows
    no cut. Where the cache cannot be written, the tokens lie in a temporary folder for as long as they are used, and
    `warn` is told.

    Args:
        path: the file.
        tokenizer: of its tokens.
        chats: what its lines or rows hold; None for a text.
        unit_bytes: bytes that are encoded at once.
        warn: told where the cache cannot be written.

    Raises:
        DataError: the file cannot be used, is not UTF-8, does not fit the tokenizer; or the folder that
            $SPEEDTRONIC_CACHE names cannot be written, or the temporary one.
    """
    check_text_file(path)
    encode = partial(_encode, path, tokenizer, chats, unit_bytes)
    content = hashlib.sha256()
    for piece in read_pieces(path) if chats is None else _bytes_of(path):
        content.update(piece)
    parts = [content.hexdigest(), spec_fingerprint(tokenizer.spec()), *([] if chats is None else [str(chats.recipe)])]
    key = hashlib.sha256(":".join(parts).encode()).hexdigest()
    try:
        return _kept_tokens(cache_folder() / f"{'text' if chats is None else 'chats'}-{key[:32]}", encode)
    except OSError as error:
        problem = f"cannot keep the encoded text of {path}: {error}"
        remedy = "set SPEEDTRONIC_CACHE to a folder that can be written"
        if os.environ.get("SPEEDTRONIC_CACHE"):
            raise DataError(f"{problem}; {remedy}") from error
    warn(f"{problem}; it is encoded again by each run; {remedy}")
    try:
        return _temporary_tokens(encode)
    except OSError as error:
        raise DataError(f"{problem}, and there is no room for temporary files: {error}; {remedy}") from error


def _bytes_of(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while piece := file.read(READ_AT_ONCE):
            yield piece


def _kept_tokens(folder: Path, encode: Callable[[Path], None]) -> ShardSet:
    if folder.exists():
        try:
            return ShardSet(folder)
        except DataError as error:
            if isinstance(error.__cause__, OSError):
                raise  # it cannot be read, but it may be sound
            # Nothing else writes here: a damaged entry is worth no more than a missing one.
            shutil.rmtree(folder)
    encode(folder)
    return ShardSet(folder)


def _temporary_tokens(encode: Callable[[Path], None]) -> ShardSet:
    parent = tempfile.mkdtemp(prefix="speedtronic-")
    try:
        encode(Path(parent) / "text")
        tokens = ShardSet(Path(parent) / "text")
    except BaseException:  # nothing is left behind, whatever it was; it is raised again
        shutil.rmtree(parent, ignore_errors=True)
        raise
    finalize(tokens, _remove_own, parent, os.getpid())
    return tokens


def _remove_own(folder: str, owner: int) -> None:
    """A forked worker inherits the tokens, and must not remove them when it ends."""
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)


def _encode(path: Path, tokenizer: Tokenizer, chats: ChatRecords | None, unit_bytes: int, folder: Path) -> None:
    recover(FileSystem(), folder)
    try:
        with ShardWriter(folder, tokenizer=tokenizer, with_targets=chats is not None) as writer:
            if chats is not None:
                for unit in plan_units(find_inputs([path], records=chats), "never", size=unit_bytes):
                    encoded = encode_unit(unit, tokenizer)
                    writer.append(encoded.ids, encoded.ends, encoded.targets)
                return
            for chunk, _ in text_file(path, path.name).chunks(0, unit_bytes, cut_rule(tokenizer)):
                pieces = [piece for document in chunk.documents(chunk.raw()) for piece in pieces_of(document)]
                for ids in encode_texts(tokenizer, pieces):
                    writer.write(ids)
    except OSError:
        # Another process may have published the same entry in the meantime.
        if not folder.exists():
            raise
