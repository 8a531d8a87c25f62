"""The global weights of a store as a file of one's own."""

from __future__ import annotations

import os
from pathlib import Path

from speedtronic.checkpoint.export.files import ExportError, check_replaceable_file
from speedtronic.distributed.protocol import Manifest, read_manifest
from speedtronic.distributed.requests import Procedure, get, perform
from speedtronic.distributed.status import newest_manifest
from speedtronic.distributed.stores.base import Store
from speedtronic.durable.files import FileSystem, ensure_directory, replace_file
from speedtronic.errors import StoreContentError

WEIGHTS = "model.safetensors"

_LOOKS = 5  # a version that is pruned while it is fetched has a successor; so many in a row is something else


def pull(store: Store, path: str | os.PathLike[str], *, version: int | None = None, replace: bool = False) -> Manifest:
    """Write the global weights to a safetensors file, under the model's own names, each tied tensor once.

    Their size and SHA-256 are those that the manifest names. The file is there in full or not at all; the weights are
    in memory once meanwhile.

    Args:
        path: the file, when it ends in `.safetensors`; else a folder, in which it will be `model.safetensors`.
        version: which weights; None for the newest.
        replace: whether a file that is there is replaced.

    Returns:
        The manifest of the version.

    Raises:
        CheckpointError: there is something already, or the file would lie in a checkpoint.
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
    """The file that `pull` writes."""
    given = Path(path)
    return given if given.suffix == ".safetensors" else given / WEIGHTS


def _weights(url: str, version: int | None) -> Procedure[tuple[Manifest, bytes]]:
    """A version's manifest and the bytes of its weights."""
    for _ in range(_LOOKS):
        manifest = yield from _manifest(url, version)
        blob = manifest.weights
        data = yield from get(blob.path, limit=blob.size, size=blob.size, sha256=blob.sha256)
        if data is not None:
            return manifest, data
        if version is not None:
            break
    raise StoreContentError(
        f"{url}: the weights of version {manifest.version} are not in the store, or not as its manifest names them; "
        "a master keeps those of the last versions alone (distributed.keep_versions)"
    )


def _manifest(url: str, version: int | None) -> Procedure[Manifest]:
    newest = yield from newest_manifest(url)
    if version is None or version == newest.version:
        return newest
    manifest = (yield from read_manifest(version)) if 0 <= version < newest.version else None
    if manifest is None:
        raise StoreContentError(f"{url}: there is no version {version}; the newest is {newest.version}")
    return manifest
