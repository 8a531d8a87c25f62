"""The folder in which data is prepared. One process at a time holds it; a killed one leaves its work to the next."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import socket
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from speedtronic.durable.files import FileSystem, replace_file
from speedtronic.durable.lock import FolderLock
from speedtronic.durable.processes import process_is_alive
from speedtronic.errors import DataError

_JOURNAL = "journal.json"
_LOCK = "lock"


def output_folder(out: str | os.PathLike[str]) -> Path:
    """The folder to write for `out`. A symbolic link cannot be replaced, so it is the folder that the link leads to."""
    path = Path(out)
    return Path(os.path.realpath(path)) if os.path.islink(path) else path


def staging_folder(out: Path) -> Path:
    """Where the data for `out` is prepared."""
    folder = output_folder(out)
    return folder.parent / f".{folder.name}.partial"


def is_resumable(folder: Path) -> bool:
    """Whether a preparation of `folder` was interrupted and can continue."""
    return (staging_folder(folder) / _JOURNAL).is_file()


def _remove_leftovers(folder: Path) -> None:
    """Remove what killed processes of this host have left beside `folder` under the names of older versions.

    Those were `.NAME.partial-HOST-PID-TOKEN`. Only for a process that holds the folder.
    """
    host = hashlib.blake2b(socket.gethostname().encode(), digest_size=4).hexdigest()
    pattern = re.compile(rf"\.{re.escape(folder.name)}\.partial-{host}-(\d+)-[0-9a-f]{{8}}")
    with suppress(OSError):  # what cannot be listed does no harm here
        for path in list(folder.parent.iterdir()):
            found = pattern.fullmatch(path.name)
            if found and path.is_dir() and not path.is_symlink() and not process_is_alive(int(found[1])):
                shutil.rmtree(path, ignore_errors=True)


class StagingFolder:
    """Holds the folder for as long as the `with` block lasts, and then removes it unless it has a journal.

    Args:
        folder: where the finished data will be.

    Attributes:
        path: the folder that is held.
        files: a folder in it, for what will be published.

    Raises:
        DataError: on entry, when another live process holds it.
        OSError: on entry, when it cannot be made.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = output_folder(folder)
        self.path = staging_folder(folder)
        self.files = self.path / "files"
        self._lock = FolderLock(
            self.path,
            file=_LOCK,
            held=lambda holder: DataError(
                f"{self.path}: {holder} is preparing this data; wait for it to end or choose another folder"
            ),
            unusable=lambda error: error,
        )

    def __enter__(self) -> StagingFolder:
        self._lock.__enter__()
        _remove_leftovers(self._folder)
        self.files.mkdir(exist_ok=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if (self.path / _JOURNAL).exists():
            self._lock.__exit__(kind, error, traceback)
        else:
            self._lock.exit_and_remove()

    def read_journal(self) -> dict[str, Any] | None:
        """The last journal; None if there is none that can be read."""
        try:
            journal = json.loads((self.path / _JOURNAL).read_bytes())
        except (OSError, ValueError):
            return None
        return journal if isinstance(journal, dict) else None

    def write_journal(self, journal: Mapping[str, Any]) -> None:
        """Replace the journal, in one step."""
        self.write(_JOURNAL, json.dumps(journal).encode())

    def remove_journal(self) -> None:
        """Discard the saved progress: the next run starts over."""
        (self.path / _JOURNAL).unlink(missing_ok=True)

    def clear(self) -> None:
        """Discard the saved progress and the files."""
        self.remove_journal()
        shutil.rmtree(self.files)
        self.files.mkdir()

    def write(self, name: str, content: bytes) -> None:
        """Write a file beside the journal, whole or not at all."""
        replace_file(FileSystem(), self.path / name, content)
