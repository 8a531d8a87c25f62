"""`checkpoint.mirror`: copies of a run's checkpoints in a store, for machines whose disk vanishes with them.

    part/{run}/{copy}/{file}.{number:05d}   the files of a checkpoint, in parts
    index/{copy}.json                       names them all; creating it makes the copy valid

`copy` is the step and eight random digits, so no name is used twice. An index is created when all its parts are there,
and deleted before any of them, so that what it names is whole, wherever a machine is lost.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from pydantic import StringConstraints, ValidationError

from speedtronic.checkpoint import CheckpointEntry, CheckpointManager
from speedtronic.checkpoint.entries import best_first, of_run, surplus
from speedtronic.checkpoint.manifest import FILES, MANIFEST, Manifest, manifest_of
from speedtronic.distributed.protocol import list_all, put_own
from speedtronic.distributed.records import Hash, Natural, Record, canonical_json
from speedtronic.distributed.requests import perform
from speedtronic.distributed.stores.base import Store
from speedtronic.durable.files import FileSystem, fill
from speedtronic.errors import CheckpointError, StoreError

PART = 64 * 2**20  # bytes; so much is in memory at once, whatever the size of a checkpoint
_INDEX = "index/"
_LARGEST_INDEX = 16 * 2**20  # bytes, of about 70,000 parts
_INDEX_NAME = re.compile(r"index/([0-9]{12,}-[0-9a-f]{8})\.json")


class _Part(Record):
    path: Annotated[str, StringConstraints(pattern=r"^part/[0-9a-f]{8,64}/[0-9a-f-]{1,64}/[a-z]+\.[a-z.0-9]{1,64}$")]
    size: Natural
    sha256: Hash


class _Index(Record):
    """A copy of a checkpoint: its manifest, as it stands in its folder, and where the parts of its files lie.

    Attributes:
        number: counts the copies in the store. A run counts its saves in its own folder, and another run anew.
    """

    format: Literal[1]
    number: Natural
    manifest: str
    files: dict[str, tuple[_Part, ...]]


class _Copy(NamedTuple):
    """A copy that is whole, as far as its index tells.

    Attributes:
        name: of its index.
        entry: the checkpoint, as it is compared with others.
        files: where its parts lie.
        number: that of its index.
    """

    name: str
    entry: CheckpointEntry
    files: dict[str, tuple[_Part, ...]]
    number: int


class _Waiting(NamedTuple):
    """A checkpoint to be copied. Its files are open, so that they can be read when they are removed."""

    manifest: Manifest
    text: bytes
    files: dict[str, FileIO]
    closing: ExitStack


class CheckpointMirror:
    """Copies checkpoints into a store, in the background, and keeps there what the run keeps on its disk.

    Where the store is slower than the run saves, the newest checkpoint waits, and those before it are left out.

    Args:
        store: makes a failed request again by itself.
        keep_last, keep_every, keep_best: those of the run's manager.
        warn: told of a copy that failed, or was left out.
        inform: told of the first copy.
        part: bytes of one object.
    """

    def __init__(
        self,
        store: Store,
        *,
        keep_last: int | None,
        keep_every: int | None,
        keep_best: int,
        warn: Callable[[str], None],
        inform: Callable[[str], None],
        part: int = PART,
    ) -> None:
        self._store = store
        self._keep_last = keep_last
        self._keep_every = keep_every
        self._keep_best = keep_best
        self._warn = warn
        self._inform = inform
        self._part = part
        self._fs = FileSystem()
        self._lock = threading.Lock()
        self._waiting: _Waiting | None = None
        self._thread: threading.Thread | None = None
        self._known: dict[str, _Copy | None] = {}  # by the name of the index; None for what is none
        self._cleaned: set[str] = set()  # runs whose torn copies were removed

    # ------------------------------------------------------------------ into the store

    def add(self, path: Path) -> None:
        """Copy a checkpoint, in the background. Its files may be removed as soon as this returns."""
        try:
            waiting = self._opened(path)
        except (OSError, CheckpointError) as error:
            self._warn(f"{path.name} was not copied to {self._store.url}: {error}")
            return
        with self._lock:
            left_out, self._waiting = self._waiting, waiting
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="checkpoint-mirror", daemon=True)
                self._thread.start()
        if left_out is not None:
            left_out.closing.close()
            self._warn(
                f"the checkpoint of step {left_out.manifest.step} was not copied to {self._store.url}, since the run "
                "saves faster than the store takes them; checkpoint.every_steps says how often it saves"
            )

    def wait(self) -> None:
        """Return when no copy is being made, and close the connections to the store."""
        thread = self._thread
        if thread is not None:
            thread.join()
        self._store.close()

    def _opened(self, path: Path) -> _Waiting:
        with ExitStack() as stack:
            text = stack.enter_context(self._fs.open(path / MANIFEST)).readall()
            files = {name: stack.enter_context(self._fs.open(path / name)) for name in FILES}
            return _Waiting(manifest_of(text), text, files, stack.pop_all())

    def _run(self) -> None:
        while True:
            with self._lock:
                waiting, self._waiting = self._waiting, None
                if waiting is None:
                    self._thread = None
                    return
            with waiting.closing:
                try:
                    self._copy(waiting)
                except Exception as error:  # noqa: BLE001 - the thread's edge: it is reported, and the next copy is tried
                    self._warn(
                        f"the checkpoint of step {waiting.manifest.step} was not copied to {self._store.url}: {error}"
                    )

    def _copy(self, waiting: _Waiting) -> None:
        manifest = waiting.manifest
        copies = self._copies()
        if any((copy.entry.run_id, copy.entry.sequence) == (manifest.run_id, manifest.sequence) for copy in copies):
            return
        if manifest.run_id not in self._cleaned:
            self._remove_torn(manifest.run_id, copies)
            self._cleaned.add(manifest.run_id)
        name = f"{manifest.step:012d}-{secrets.token_hex(4)}"
        files = {
            file: tuple(self._put_parts(waiting.files[file], f"part/{manifest.run_id}/{name}/{file}", manifest, file))
            for file in FILES
        }
        number = 1 + max((copy.number for copy in copies), default=0)
        index = _Index(format=1, number=number, manifest=waiting.text.decode("ascii"), files=files)
        perform(put_own(f"{_INDEX}{name}.json", canonical_json(index), None), self._store)
        if not copies:
            self._inform(f"checkpoints are copied to {self._store.url}")
        try:
            self._prune(manifest.run_id)
        except StoreError as error:
            self._warn(f"old copies of checkpoints in {self._store.url} could not be removed: {error}")

    def _put_parts(self, file: FileIO, path: str, manifest: Manifest, name: str) -> Iterator[_Part]:
        """Put a file in parts, and make sure that it was what its manifest says."""
        digest, record = hashlib.sha256(), manifest.files[name]
        for number, start in enumerate(range(0, record.size, self._part)):
            data = bytearray(min(self._part, record.size - start))
            fill(file, memoryview(data))
            digest.update(data)
            where = perform(put_own(f"{path}.{number:05d}", data, None), self._store)
            yield _Part(path=where, size=len(data), sha256=hashlib.sha256(data).hexdigest())
        if digest.hexdigest() != record.sha256:
            raise CheckpointError(f"{name} is damaged: its contents do not match their checksum")

    def _prune(self, run_id: str) -> None:
        """Remove the copies that the run's rules no longer cover, and older ones of the same step."""
        copies = {copy.entry.path: copy for copy in self._copies()}
        own = of_run([copy.entry for copy in copies.values()], run_id)
        newest: dict[int, CheckpointEntry] = {}
        for entry in own:
            newest.setdefault(entry.step, entry)
        removed = [entry for entry in own if newest[entry.step] is not entry]
        own = list(newest.values())
        kept = best_first(own)[: self._keep_best]
        removed += [entry for entry in surplus(own, self._keep_last, self._keep_every) if entry not in kept]
        for entry in removed:
            copy = copies[entry.path]
            self._store.delete(copy.name)
            for part in (part for parts in copy.files.values() for part in parts):
                self._store.delete(part.path)

    def _remove_torn(self, run_id: str, copies: list[_Copy]) -> None:
        """Remove what a process of this run that was lost has put, and named in no index."""
        named = {part.path for copy in copies for parts in copy.files.values() for part in parts}
        for entry in perform(list_all(f"part/{run_id}/"), self._store):
            if entry.name not in named:
                self._store.delete(entry.name)

    # ------------------------------------------------------------------ out of the store

    @property
    def url(self) -> str:
        """Where the copies lie, without secrets."""
        return self._store.url

    def fetch(self, manager: CheckpointManager) -> Path | None:
        """Write the newest whole checkpoint of the run that saved last into a manager's folder.

        Returns:
            Its folder; None where the store holds no copy.

        Raises:
            CheckpointError: there are copies but none is whole.
            StoreError: the store does not answer, or denies access.
            OSError: the disk is full, or failed.
        """
        copies = {copy.entry.path: copy for copy in self._copies()}
        if not copies:
            return None
        last = max(copies.values(), key=lambda copy: copy.number)
        for entry in of_run([copy.entry for copy in copies.values()], last.entry.run_id):
            assert entry.manifest is not None, "a copy has one"
            try:
                return manager.receive(entry.manifest, partial(self._read, copies[entry.path].files))
            except CheckpointError as error:
                self._warn(f"the copy {entry.path} in {self._store.url} was passed over: {error}")
        raise CheckpointError(f"{self._store.url}: no copy of a checkpoint is whole; its warnings say why")

    def _read(self, files: Mapping[str, tuple[_Part, ...]], name: str) -> Iterator[bytes]:
        for part in files[name]:
            data = self._store.get(part.path, limit=part.size, size=part.size, sha256=part.sha256)
            if data is None:
                raise CheckpointError(f"{part.path} is missing or damaged")
            yield data

    def _copies(self) -> list[_Copy]:
        """The copies in the store."""
        names = [entry.name for entry in perform(list_all(_INDEX), self._store) if _INDEX_NAME.fullmatch(entry.name)]
        self._known = {name: self._known[name] if name in self._known else self._look_at(name) for name in names}
        return [copy for copy in self._known.values() if copy is not None]

    def _look_at(self, name: str) -> _Copy | None:
        data = self._store.get(name, limit=_LARGEST_INDEX)
        if data is None:
            return None
        with suppress(ValidationError, CheckpointError, UnicodeError):
            index = _Index.model_validate_json(data)
            manifest = manifest_of(index.manifest.encode())
            if index.files.keys() == set(FILES):
                # Not a path of this machine: it tells copies apart, and stands in messages.
                path = Path(name.removeprefix(_INDEX).removesuffix(".json"))
                size = sum(record.size for record in manifest.files.values())
                entry = CheckpointEntry(path, manifest.step, size, manifest, None)
                return _Copy(name, entry, index.files, index.number)
        self._warn(f"{name} in {self._store.url} is no index of a checkpoint: it is left alone")
        return None
