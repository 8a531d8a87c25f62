"""Who a node is: its name, the folder that only it may use, and the name of each of its lives."""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Self

from speedtronic.durable.files import FileSystem, ensure_directory, replace_file
from speedtronic.durable.lock import RunLock
from speedtronic.errors import RunFolderError, RunLockedError

_NODE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_NODE_ID_FILE = "node_id"


def _nonce() -> str:
    return secrets.token_hex(4)


def resolve_node_id(configured: str | None, state_dir: Path, *, nonce: Callable[[], str] = _nonce) -> str:
    """The name of this node in the store.

    Args:
        configured: `distributed.node_id`. Without it, what the file `node_id` of `state_dir` holds, which is made once.

    Raises:
        RunFolderError: the folder or the file in it cannot be used.
    """
    if configured is not None:
        return configured
    path = state_dir / _NODE_ID_FILE
    try:
        if path.exists():
            return _checked(path)
        ensure_directory(FileSystem(), state_dir)
        made = f"node-{nonce()}"
        replace_file(FileSystem(), path, made.encode("ascii"))
    except OSError as error:
        raise RunFolderError(
            f"{path}: {error.strerror or error}; set distributed.state_dir to a folder that can be written, or give "
            "this node a distributed.node_id"
        ) from error
    return made


def _checked(path: Path) -> str:
    name = path.read_text(encoding="utf-8", errors="replace").strip()
    if _NODE_ID.fullmatch(name) is None:
        raise RunFolderError(f"{path} does not hold the name of a node; remove it, or set distributed.node_id")
    return name


def new_session(*, now: Callable[[], datetime] = lambda: datetime.now(UTC), nonce: Callable[[], str] = _nonce) -> str:
    """A name for one life of a node: its start in UTC, so that they sort, and eight random digits."""
    return f"{now():%Y%m%dT%H%M%SZ}-{nonce()}"


def node_folder(state_dir: Path, url: str, node: str) -> Path:
    """Where a node keeps what it must not forget about its part in one store.

    Args:
        url: of the store, without secrets. Another store has another folder.
    """
    return state_dir / hashlib.sha256(url.encode("utf-8")).hexdigest()[:16] / node


class NodeLock:
    """Holds a node's folder, for as long as the `with` block lasts, against every other node on this machine.

    Unlike `RunLock`, against another one in this process too.

    Raises:
        RunLockedError: on entry, when the folder is held.
        RunFolderError: on entry, when it cannot be made, written or locked.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = RunLock(folder)

    def __enter__(self) -> Self:
        self._key = (os.getpid(), self._folder.resolve())
        with _guard:
            if self._key in _held:
                raise self._taken("this process")
            try:
                self._lock.__enter__()
            except RunLockedError as error:
                raise self._taken(_holder(error)) from None
            except RunFolderError as error:
                raise RunFolderError(
                    f"{self._folder} cannot be used for the state of this node: {error.__cause__ or error}; set "
                    "distributed.state_dir to a folder that can be written"
                ) from error
            _held.add(self._key)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with _guard:
            _held.discard(self._key)
            self._lock.__exit__(kind, error, trace)

    def _taken(self, holder: str) -> RunLockedError:
        return RunLockedError(
            f"node {self._folder.name!r} is trained by {holder} already ({self._folder}); stop that, or give this node "
            "another distributed.node_id or distributed.state_dir"
        )


_guard = threading.Lock()
_held: set[tuple[int, Path]] = set()


def _holder(error: RunLockedError) -> str:
    """Who holds the folder, out of the message about the lock."""
    match = re.search(r"is in use by (.*?); wait", str(error))
    return match[1] if match else "another process"
