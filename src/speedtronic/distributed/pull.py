"""Download the global weights of a store into a file."""

from __future__ import annotations

import os
from pathlib import Path

from speedtronic.checkpoint.export.files import ExportError, check_replaceable_file
from speedtronic.distributed.protocol import Manifest, read_blob, read_manifest
from speedtronic.distributed.requests import Procedure, perform
from speedtronic.distributed.status import newest_manifest
from speedtronic.distributed.stores.base import Store
from speedtronic.durable.files import FileSystem, ensure_directory, replace_file
from speedtronic.errors import CheckpointError, StoreContentError

WEIGHTS = "model.safetensors"

_ATTEMPTS = 5  # a version that is pruned while it is downloaded has a successor; five times in a row is another problem


def pull(store: Store, path: str | os.PathLike[str], *, version: int | None = None, replace: bool = False) -> Manifest:
    """Write the global weights to a safetensors file, under the model's own names, each tied tensor once.

    Their size and SHA-256 are those that the manifest names. The file is there in full or not at all; the weights are
    in memory once meanwhile.

    Args:
        path: the file, if it ends in `.safetensors`; else a folder, in which it will be `model.safetensors`.
        version: which weights; None for the newest.
        replace: whether an existing file is replaced.

    Returns:
        The manifest of the version.

    Raises:
        CheckpointError: it has the name of another kind of file, there is something already, or the file would lie in a
            checkpoint.
        ExportError: the file could not be written; nothing half-written is left.
        StoreContentError: there is no such version, or the store keeps its weights no longer.
        StoreError: the store could not be asked.
    """
    file = target(path)
    check_replaceable_file(file, replace)
    manifest, data = perform(_weights(store.url, version), store)
    try:
        ensure_directory(FileSystem(), file.parent)
        replace_file(FileSystem(), file, data)
    except OSError as error:
        raise ExportError(f"{file}: cannot be written: {error.strerror or error}") from error
    return manifest


def target(path: str | os.PathLike[str]) -> Path:
    """The file that `pull` writes.

    Raises:
        CheckpointError: the path has the name of another kind of file.
    """
    given = Path(path)
    if given.suffix == ".safetensors":
        return given
    if not given.is_dir() and (given.suffix or given.exists()):
        raise CheckpointError(f"{given}: weights are written to a file that ends in .safetensors, or into a folder")
    return given / WEIGHTS


def _weights(url: str, version: int | None) -> Procedure[tuple[Manifest, bytes]]:
    """A version's manifest and the bytes of its weights."""
    for _ in range(_ATTEMPTS):
        manifest = newest = yield from newest_manifest(url)
        if version is not None and version != newest.version:
            older = (yield from read_manifest(version)) if 0 <= version < newest.version else None
            if older is None:
                raise StoreContentError(f"{url}: there is no version {version}; the newest is {newest.version}")
            manifest = older
        data = yield from read_blob(manifest.weights)
        if data is not None:
            return manifest, data
        if version is not None:
            break
    raise StoreContentError(
        f"{url}: the weights of version {manifest.version} are not in the store, or not as its manifest names them; "
        "a master keeps only those of the last versions (distributed.keep_versions)"
    )
