"""The identity of a node: its name, the folder that only it may use, and what tells its sessions apart."""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Callable
from pathlib import Path

from speedtronic.distributed.stores.base import COMPONENT
from speedtronic.durable.files import FileSystem, ensure_directory, replace_file
from speedtronic.durable.lock import FolderLock
from speedtronic.errors import RunFolderError, RunLockedError

_NODE_ID_FILE = "node_id"


def new_nonce() -> str:
    """Eight random hexadecimal digits: they tell apart two sessions of one number (see `records.session_name`)."""
    return secrets.token_hex(4)


def resolve_node_id(configured: str | None, state_dir: Path, *, nonce: Callable[[], str] = new_nonce) -> str:
    """The name of this node in the store.

    Args:
        configured: `distributed.node_id`. Without it, the content of the file `node_id` in `state_dir`, which is
            created once.

    Raises:
        RunFolderError: the folder or the file in it cannot be used.
    """
    if configured is not None:
        return configured
    path = state_dir / _NODE_ID_FILE
    try:
        if not path.exists():
            ensure_directory(FileSystem(), state_dir)
            replace_file(FileSystem(), path, f"node-{nonce()}".encode("ascii"))
        name = path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError as error:
        raise RunFolderError(
            f"{path}: {error.strerror or error}; set distributed.state_dir to a writable folder, or give this node a "
            "distributed.node_id"
        ) from error
    if re.fullmatch(COMPONENT, name) is None:
        raise RunFolderError(f"{path} does not hold the name of a node; remove it, or set distributed.node_id")
    return name


def node_folder(state_dir: Path, url: str, node: str) -> Path:
    """Where a node keeps what it must not forget about its part in one store.

    Args:
        url: of the store, without secrets. Another store has another folder.
    """
    return state_dir / hashlib.sha256(url.encode("utf-8")).hexdigest()[:16] / node


class NodeLock(FolderLock):
    """Holds a node's folder, for as long as the `with` block lasts, against every other node on this machine.

    Raises:
        RunLockedError: on entry, if the folder is held, also by this process.
        RunFolderError: on entry, if it cannot be created, written or locked.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(
            folder,
            held=lambda holder: RunLockedError(
                f"node {folder.name!r} is trained by {holder} already ({folder}); stop that, or give this node another "
                "distributed.node_id or distributed.state_dir"
            ),
            unusable=lambda error: RunFolderError(
                f"{folder} cannot be used for the state of this node: {error}; set distributed.state_dir to a writable "
                "folder"
            ),
        )
