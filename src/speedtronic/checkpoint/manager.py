"""`CheckpointManager`: a folder of checkpoints. Once it holds a sound one, it always holds one.

    checkpoints/
        step_000000000500/      one checkpoint:
            model.safetensors       the model's tensors, under their own names
            state.safetensors       all other tensors
            state.json              everything else, and where the tensors go
            manifest.json           sizes, checksums, step, run, versions
        step_000000001000/
        latest.json             names the newest, and its run

A checkpoint is written into a temporary folder: each file is flushed to the disk, the manifest last, and the folder is
renamed into place. Several runs may use one folder, one after the other. Each run has a random id, continues the run
that `latest.json` names, and never overwrites or removes the checkpoints of another run.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Generic, Literal, NamedTuple, Protocol, TypeVar

from speedtronic.checkpoint.entries import (
    CheckpointEntry,
    best_first,
    checkpoint_name,
    inspect,
    newest_first,
    of_run,
    scan,
    surplus,
)
from speedtronic.checkpoint.manifest import (
    FILES,
    MANIFEST,
    Manifest,
    NewerFormatError,
    Pointer,
    UnreadableError,
    current_versions,
    damage_is_checkpoint_error,
    read_pointer,
)
from speedtronic.checkpoint.snapshot import (
    Snapshot,
    SnapshotBuffers,
    check_files,
    read_state,
    take_snapshot,
    write_snapshot,
)
from speedtronic.checkpoint.throttle import Throttle, background_share
from speedtronic.durable.files import FileSystem, copy_file, ensure_directory, no_pause, replace_file, write_file
from speedtronic.durable.folders import clean_folder, remove_folder, temporary_beside
from speedtronic.errors import CheckpointError, warn

LATEST = "latest.json"

# How often to look into a folder again after a run has changed it. Each time, the run has saved in the meantime.
_MOST_LOOKS = 20

T = TypeVar("T")


def _utc_now() -> datetime:
    return datetime.now(UTC)


class Mirror(Protocol):
    """Keeps copies of checkpoints elsewhere."""

    def add(self, path: Path) -> None:
        """Copy a sound checkpoint, in the background. Its files may be removed as soon as this returns."""

    def wait(self) -> None:
        """Return when no copy is being made."""


class CheckpointManager:
    """Saves, finds, loads and prunes the checkpoints in a folder.

    Args:
        directory: the folder; made at the first save.
        every_steps: cadence of `should_save`, at least 1.
        keep_last: how many of this run's newest checkpoints `prune` leaves, at least 1; None keeps all.
        enabled: False makes `should_save` always False and `save` an error; loading works.
        every_minutes: another cadence of `should_save`, over 0: minutes since the last save started, or since the
            manager was made.
        keep_every: `prune` also leaves this run's checkpoints of steps that are a multiple of it, at least 1.
        keep_best: `prune` also leaves this many of the run's sound checkpoints: the best by `monitored`, or those with
            the lowest `eval_loss`; of equal ones the newer.
        mirror: gets each checkpoint that was saved, before an older one is removed.
        warn: told of a damaged checkpoint that was passed over, and of old ones that could not be removed.
        fs: the file system operations.
        now: the time in UTC, which is only shown.
        clock: the time in seconds, which never jumps.

    Attributes:
        run_id: hex; names this run in its checkpoints. Random at first; `load_latest` takes over that of the loaded
            run.
        loaded_path: the checkpoint that `load_latest` or `verified_path` found.

    Raises:
        CheckpointError: a cadence or a count that is too small.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        every_steps: int = 500,
        keep_last: int | None = 3,
        enabled: bool = True,
        every_minutes: float | None = None,
        keep_every: int | None = None,
        keep_best: int = 0,
        mirror: Mirror | None = None,
        warn: Callable[[str], None] = warn,
        fs: FileSystem | None = None,
        now: Callable[[], datetime] = _utc_now,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if every_steps < 1:
            raise CheckpointError(f"checkpoint.every_steps: must be at least 1, got {every_steps}")
        if keep_last is not None and keep_last < 1:
            raise CheckpointError(f"checkpoint.keep_last: must be at least 1, or null to keep all; got {keep_last}")
        if every_minutes is not None and not every_minutes > 0:
            raise CheckpointError(f"checkpoint.every_minutes: must be over 0, or null; got {every_minutes}")
        if keep_every is not None and keep_every < 1:
            raise CheckpointError(f"checkpoint.keep_every: must be at least 1, or null; got {keep_every}")
        if keep_best < 0:
            raise CheckpointError(f"checkpoint.keep_best: must be at least 0, got {keep_best}")
        # Absolute, as everything that outlives its construction: a user's code may change the working directory.
        self.directory = Path(directory).absolute()
        self.every_steps = every_steps
        self.keep_last = keep_last
        self.enabled = enabled
        self.every_minutes = every_minutes
        self.keep_every = keep_every
        self.keep_best = keep_best
        self.mirror = mirror
        # Not from the seeded generators: two runs of one seed are two runs.
        self.run_id = secrets.token_hex(16)
        self._warn = warn
        self._fs = fs or FileSystem()
        self._now = now
        self._clock = clock
        self.loaded_path: Path | None = None
        self._saves = 0
        self._last_start = clock()
        self._sound: set[Path] = set()
        self._buffers = SnapshotBuffers()
        self._writer: ThreadPoolExecutor | None = None
        self._pending: Future[Path] | None = None
        self._throttle = Throttle(1.0)
        self._overtaken = False
        self._failure: BaseException | None = None

    def should_save(self, step: int) -> bool:
        """Whether a cadence asks for a checkpoint after `step`. Asking changes nothing; starting a save does."""
        if not self.enabled or step <= 0:
            return False
        minutes_are_over = (
            self.every_minutes is not None and self._clock() - self._last_start >= 60 * self.every_minutes
        )
        return step % self.every_steps == 0 or minutes_are_over

    def save(self, step: int, state: dict[str, Any]) -> Path:
        """Write a checkpoint, then remove those that `keep_last` no longer covers.

        Args:
            step: the global step, at least 0. A checkpoint of this run at the same step is replaced.
            state: a tree of dicts (string or integer keys), lists, tuples, None, bool, int, float, str,
                bytes, tensors and numpy arrays. `state["model"]` goes into a safetensors file of its own;
                the manifest takes `loss`, `eval_loss` and `monitored` from `state["metrics"]` and the
                fingerprint of `state["config"]`, where they are.

        Returns:
            The checkpoint's folder, durable.

        Raises:
            CheckpointError: the manager is disabled, or something in the state cannot be saved; the message
                names it.
            OSError: the disk is full, or failed. The checkpoints that were there remain, and no
                half-written one.
        """
        self._begin(step)
        return self._write(step, take_snapshot(state))

    def save_async(self, step: int, state: dict[str, Any]) -> Future[Path]:
        """Like `save`, but a background thread writes, from copies of the tensors that are made before this returns.

        The copies take as much memory as the state's tensors; it is kept for the next save, until `close`. Where
        training keeps all processors busy, the thread takes little of them until somebody waits for it. Only one save
        runs at a time: if the one before still runs, this waits for it first.

        Returns:
            The future path. `wait` raises what the save raised, whether or not anybody asked the future.

        Raises:
            CheckpointError: the manager is disabled, or something in the state cannot be saved; the message
                names it. Or there is no memory for the copies.
        """
        # If the cadence leaves no time for a slow save, full speed from now on costs less than waiting each time.
        self._overtaken = self._overtaken or (self._pending is not None and not self._pending.done())
        self._begin(step)
        snapshot = take_snapshot(state, self._buffers)
        if self._writer is None:
            self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint-writer")
        self._throttle = Throttle(1.0 if self._overtaken else background_share(training_on_cpu=snapshot.on_cpu))
        self._pending = self._writer.submit(self._write, step, snapshot, self._throttle.pause)
        return self._pending

    def wait(self) -> None:
        """Return when no save is running.

        Raises:
            OSError, CheckpointError: what the first background save that failed since the last `wait` raised.
        """
        self._settle()
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def close(self) -> None:
        """Wait for a save that is running, and for its copy, and free the memory of the snapshot and the thread.

        What the save raised is kept for `wait`. The manager can still be used: `save_async` takes both again.
        """
        self._settle()
        self._buffers.release()
        if self._writer is not None:
            self._writer.shutdown()
            self._writer = None
        if self.mirror is not None:
            self.mirror.wait()

    def load_latest(self) -> dict[str, Any] | None:
        """The state in the newest sound checkpoint of the run that `latest.json` names.

        Tensors are on the CPU. Every byte is compared with the manifest's checksums. A damaged checkpoint is passed
        over, with a warning, for the next older one of the same run. Without a readable `latest.json` the run that
        saved last is taken. The manager continues the loaded run: it takes over its `run_id`. Another process may save
        into the folder at the same time: what it has removed is no damage, and its next checkpoint is loaded.

        Returns:
            The state, equal to what was saved; None when the folder has no checkpoint.

        Raises:
            CheckpointError: there are checkpoints but none is sound, or they are of a newer format, or only
                `.pt` files of version 2.0.
        """
        return self._newest_sound(lambda path, manifest: read_state(self._fs, path, manifest))

    def verified_path(self) -> Path | None:
        """The folder of the checkpoint that `load_latest` would return, after every byte was compared.

        Passes over damaged ones, takes over the run and raises as `load_latest` does.
        """

        def checked(path: Path, manifest: Manifest) -> Path:
            check_files(self._fs, path, manifest)
            return path

        return self._newest_sound(checked)

    def use_newest(self, use: Callable[[Path], T], *, best: bool = False) -> T | None:
        """What `use` returns for `verified_path` (with `best`, for `best_path`), or None when there is none.

        If another process removes the checkpoint before `use` has read it, `use` is called again with its next one.
        """
        for _ in range(_MOST_LOOKS):
            path = self.best_path() if best else self.verified_path()
            if path is None:
                return None
            try:
                return use(path)
            except CheckpointError:
                if path.exists():
                    raise
        raise self._too_fast()

    def latest_path(self) -> Path | None:
        """The folder that `load_latest` would try first, by a quick look; None when there is none."""
        self._settle()
        entries = self.entries()
        candidates = _candidates(entries, self._pointer()) if entries else []
        return next((entry.path for entry in candidates if entry.problem is None), None)

    def latest_run_id(self) -> str | None:
        """The id of the run that `load_latest` would continue, by a quick look; None when there is none."""
        self._settle()
        entries = self.entries()
        candidates = _candidates(entries, self._pointer()) if entries else []
        return candidates[0].run_id if candidates else None

    def best_path(self) -> Path:
        """The best sound checkpoint of the run that `load_latest` would continue: by `monitored`, or `eval_loss`.

        Every byte of it was compared with its checksums.

        Raises:
            CheckpointError: no checkpoint of the run was evaluated, or none of those is sound.
        """
        self._settle()
        for _ in range(_MOST_LOOKS):
            seen = self._look()
            ranked = best_first(_candidates(*seen))
            best = next((entry.path for entry in ranked if self._soundness(entry) == "sound"), None)
            if best is not None:
                return best
            if self._look() == seen:
                what = "that was evaluated is sound" if ranked else "was evaluated, so none is the best"
                raise CheckpointError(
                    f"{self.directory}: no checkpoint {what}; take the newest, or set eval.every_steps"
                )
        raise self._too_fast()

    def likely_best_path(self) -> Path | None:
        """The checkpoint that `best_path` tries first, by a quick look; None where none was evaluated."""
        self._settle()
        return next((entry.path for entry in best_first(_candidates(*self._look())) if entry.problem is None), None)

    def prune(self) -> list[Path]:
        """Remove this run's checkpoints that neither `keep_last`, `keep_every` nor `keep_best` covers.

        Its newest sound one always stays. One that a failing disk cannot read stays too: it may be sound.

        Returns:
            The folders that were removed.

        Raises:
            OSError: one could not be removed.
        """
        self._settle()
        return self._prune()

    def copy_to(self, destination: str | os.PathLike[str]) -> Path:
        """Copy the newest sound checkpoint into another folder, durably, so that a manager there loads it.

        Args:
            destination: a folder for checkpoints; made when absent.

        Returns:
            The copy's folder in it.

        Raises:
            CheckpointError: there is none to copy.
            OSError: the disk is full, or failed; no half-written copy is left.
        """
        self._settle()

        def check(path: Path, manifest: Manifest) -> tuple[Path, Manifest]:
            if path not in self._sound:
                check_files(self._fs, path, manifest)
            return path, manifest

        for _ in range(_MOST_LOOKS):
            found = self._search(check)
            if found is None:
                raise CheckpointError(f"{self.directory}: there is no sound checkpoint to copy")
            source, manifest = found.result
            other = CheckpointManager(destination, fs=self._fs, warn=self._warn)
            other.run_id = manifest.run_id
            try:
                return other._install(manifest.step, partial(self._copy, source, manifest))
            except CheckpointError:
                if source.exists():
                    raise
        raise self._too_fast()

    def _copy(self, source: Path, manifest: Manifest, folder: Path) -> None:
        with damage_is_checkpoint_error():
            for name in FILES:
                copy_file(self._fs, source / name, folder / name, manifest.files[name])
        write_file(self._fs, folder / MANIFEST, [manifest.to_bytes()])

    def receive(self, manifest: Manifest, contents: Callable[[str], Iterable[bytes]]) -> Path:
        """Write a checkpoint that comes from elsewhere, durably, so that this manager continues its run.

        Args:
            manifest: of the checkpoint.
            contents: the parts of one of its files.

        Returns:
            The checkpoint's folder.

        Raises:
            CheckpointError: the contents are not those that the manifest names; nothing is left of them.
            OSError: the disk is full, or failed; nothing half-written is left.
        """
        self._settle()

        def fill(folder: Path) -> None:
            for name in FILES:
                if write_file(self._fs, folder / name, contents(name)) != manifest.files[name]:
                    raise CheckpointError(f"{name} is not what its manifest says")
            write_file(self._fs, folder / MANIFEST, [manifest.to_bytes()])
            self.run_id = manifest.run_id

        return self._install(manifest.step, fill)

    def entries(self) -> list[CheckpointEntry]:
        """All checkpoints in the folder, of every run, by step; a quick look at each."""
        return scan(self._fs, self.directory)

    def verify(self, path: str | os.PathLike[str]) -> Manifest:
        """Read a whole checkpoint and compare it with its manifest.

        Raises:
            CheckpointError: it is damaged; the message says how.
            OSError: the disk failed.
        """
        entry = inspect(self._fs, Path(path))
        if entry.manifest is None:
            raise CheckpointError(f"{path}: {entry.problem}")
        try:
            check_files(self._fs, entry.path, entry.manifest)
        except CheckpointError as error:
            raise CheckpointError(f"{path}: {error}") from error
        return entry.manifest

    # ------------------------------------------------------------------ saving

    def _begin(self, step: int) -> None:
        if not self.enabled:
            raise CheckpointError("checkpointing is off (checkpoint.enabled: false), so nothing can be saved")
        if step < 0:
            raise CheckpointError(f"a checkpoint's step is at least 0, got {step}")
        self._settle()
        self._last_start = self._clock()

    def _settle(self) -> None:
        """Wait for a save that is running. What it raised is kept for `wait`."""
        if self._pending is not None:
            self._throttle.hurry()
            failure = self._pending.exception()
            self._pending = None
            self._failure = self._failure or failure

    def _write(self, step: int, snapshot: Snapshot, pause: Callable[[], None] = no_pause) -> Path:
        def fill(folder: Path) -> None:
            files = write_snapshot(self._fs, folder, snapshot, pause)
            manifest = Manifest(
                step=step,
                sequence=self._saves,
                run_id=self.run_id,
                time=self._now().isoformat(timespec="milliseconds"),
                loss=snapshot.loss,
                eval_loss=snapshot.eval_loss,
                monitored=snapshot.monitored,
                config_sha256=snapshot.config_sha256,
                versions=current_versions(),
                files=files,
            )
            write_file(self._fs, folder / MANIFEST, [manifest.to_bytes()])

        # Counted before the save has succeeded: one that fails late may be in the folder all the same. A new run counts
        # on from those before it in the folder, so that the count also tells which run saved last.
        self._saves = 1 + (self._saves or max((entry.sequence for entry in self.entries()), default=0))
        path = self._install(step, fill)
        self._sound.add(path)
        if self.mirror is not None:
            self.mirror.add(path)
        try:
            self._prune()
        except (OSError, CheckpointError) as error:
            self._warn(f"old checkpoints in {self.directory} could not be removed: {error}")
        return path

    def _install(self, step: int, fill: Callable[[Path], None]) -> Path:
        """Let `fill` write a folder, rename it into place, and make `latest.json` name it."""
        ensure_directory(self._fs, self.directory)
        # Only a save removes what killed processes left, never a reader: a reader may be in another container or on
        # another machine, from where it does not see the process that is writing at the moment.
        clean_folder(self._fs, self.directory, self._warn)
        with temporary_beside(self._fs, self.directory / checkpoint_name(step)) as temporary:
            self._fs.make_directory(temporary)
            fill(temporary)
            self._fs.sync_directory(temporary)
            path = self._place(temporary, step)
        pointer = Pointer(checkpoint=path.name, step=step, run_id=self.run_id)
        replace_file(self._fs, self.directory / LATEST, pointer.to_bytes())
        return path

    def _place(self, temporary: Path, step: int) -> Path:
        """Give a finished folder its name.

        A checkpoint of the same step goes only when the new one stands beside it under a name that readers know, so
        that a kill at any moment leaves one of the two.
        """
        target = self._target(step)
        spare = self.directory / f"{checkpoint_name(step)}-{self.run_id[:8]}-new"

        def replace_by_spare() -> None:
            if target.exists():
                self._remove(target)
            self._fs.rename(spare, target)

        if spare.exists():
            # A former replacement was cut short. If both are there, the spare is the newer one.
            replace_by_spare()
        if target.exists():
            self._fs.rename(temporary, spare)
            self._fs.sync_directory(self.directory)
            replace_by_spare()
        else:
            self._fs.rename(temporary, target)
        self._fs.sync_directory(self.directory)
        return target

    def _target(self, step: int) -> Path:
        """The checkpoint's name. It includes this run's id if another run has taken the plain one."""
        plain = self.directory / checkpoint_name(step)
        if not plain.exists():
            return plain
        there = inspect(self._fs, plain)
        if there.manifest is not None and there.manifest.run_id == self.run_id:
            return plain
        return self.directory / f"{plain.name}-{self.run_id[:8]}"

    def _remove(self, path: Path) -> None:
        remove_folder(self._fs, path)
        self._sound.discard(path)

    # ------------------------------------------------------------------ loading

    def _newest_sound(self, read: Callable[[Path, Manifest], T]) -> T | None:
        """What `read` returns for the newest checkpoint for which it does not raise; its run is taken over."""
        self._settle()
        found = self._search(read)
        if found is None:
            self._refuse_pickles()
            return None
        if not found.has_pointer:
            self._warn(f"{self.directory / LATEST} is missing or damaged; looking for the newest sound checkpoint")
        self._continue_run(found.entry, found.entries, found.damaged)
        return found.result

    def _search(self, read: Callable[[Path, Manifest], T]) -> _Found[T] | None:
        """The newest checkpoint for which `read` does not raise; None when there is no checkpoint at all.

        If the folder has changed after a failure, a run saves into it, and what failed may have been removed or
        replaced in the meantime. Then the search begins again.

        Raises:
            CheckpointError: there are checkpoints but none is sound.
        """
        seen = self._look()
        for _ in range(_MOST_LOOKS):
            entries, pointer = seen
            damaged: list[CheckpointEntry] = []
            for entry in _candidates(entries, pointer):
                assert entry.manifest is not None, "a candidate has a run, so it has a manifest"
                try:
                    result = read(entry.path, entry.manifest)
                except (CheckpointError, OSError) as error:
                    damaged.append(replace(entry, problem=str(error)))
                    if self._look() != seen:
                        break
                else:
                    if pointer is None and self._look() != seen:
                        break  # the first save of a run was about to write it
                    return _Found(entry, result, entries, damaged, has_pointer=pointer is not None)
            again = self._look()
            if again == seen:
                if not entries:
                    return None
                raise self._nothing_sound(entries, damaged)
            seen = again
        raise self._too_fast()

    def _look(self) -> tuple[list[CheckpointEntry], Pointer | None]:
        """What is in the folder, and what `latest.json` says."""
        entries = self.entries()
        return entries, self._pointer()

    def _nothing_sound(self, entries: list[CheckpointEntry], damaged: list[CheckpointEntry]) -> CheckpointError:
        unreadable = [entry for entry in entries if entry.manifest is None]
        reasons = "; ".join(f"{entry.path.name}: {entry.problem}" for entry in (*damaged, *unreadable))
        if reasons:
            return CheckpointError(f"{self.directory}: no checkpoint can be loaded: {reasons}")
        return CheckpointError(
            f"{self.directory}: {LATEST} names a run that has no checkpoint here; remove {LATEST} to continue from the "
            "newest checkpoint of another run"
        )

    def _too_fast(self) -> CheckpointError:
        return CheckpointError(
            f"{self.directory}: a run saves here and removes each checkpoint before it can be read; raise its "
            "checkpoint.keep_last, or wait until it has ended"
        )

    def _continue_run(
        self, loaded: CheckpointEntry, entries: list[CheckpointEntry], damaged: list[CheckpointEntry]
    ) -> None:
        """Take over the run of a checkpoint that was loaded, and warn of those that should have been loaded instead."""
        self.loaded_path = loaded.path
        self.run_id = loaded.run_id
        self._saves = max(entry.sequence for entry in entries)
        self._sound.add(loaded.path)
        unreadable = [
            entry
            for entry in entries
            if entry.manifest is None and entry.step >= loaded.step and entry.may_belong_to(loaded.run_id)
        ]
        for entry in (*damaged, *unreadable):
            self._warn(f"checkpoint {entry.path} was passed over for {loaded.path.name}: {entry.problem}")

    def _pointer(self) -> Pointer | None:
        """What `latest.json` says, or None when it is missing or damaged."""
        try:
            return read_pointer(self._fs, self.directory / LATEST)
        except (NewerFormatError, UnreadableError) as error:
            # If the disk fails for a moment, another run's checkpoint must not be loaded in place of this one's.
            raise CheckpointError(f"{self.directory}: {error}") from error
        except CheckpointError:
            return None

    def _refuse_pickles(self) -> None:
        pickles = sorted(path.name for path in self.directory.glob("*.pt"))
        if pickles:
            raise CheckpointError(
                f"{self.directory} holds checkpoints of version 2.0 ({', '.join(pickles[:3])}); loading them "
                "could run code, so they are not read. To continue from their weights, convert them once: "
                "state = torch.load(path, weights_only=True); "
                "safetensors.torch.save_file(state['model'], 'weights.safetensors')"
            )

    # ------------------------------------------------------------------ pruning

    def _prune(self) -> list[Path]:
        own = of_run(self.entries(), self.run_id)
        removed = surplus(own, self.keep_last, self.keep_every)
        if removed:
            kept = self._first_sound(own, 1) | self._first_sound(best_first(own), self.keep_best)
            removed = [entry for entry in removed if entry.path not in kept]
        for entry in removed:
            self._remove(entry.path)
        return [entry.path for entry in removed]

    def _first_sound(self, entries: Iterable[CheckpointEntry], count: int) -> set[Path]:
        """The first `count` sound ones, and those between that the disk cannot read: they may be sound."""
        found: set[Path] = set()
        for entry in entries:
            if count == 0:
                break
            soundness = self._soundness(entry)
            if soundness != "damaged":
                found.add(entry.path)
            count -= soundness == "sound"
        return found

    def _soundness(self, entry: CheckpointEntry) -> Literal["sound", "damaged", "unreadable"]:
        """Whether all its contents are as they were written. What this manager wrote or loaded is not read again."""
        if entry.manifest is None or entry.problem is not None:
            return "damaged"
        if entry.path not in self._sound:
            try:
                check_files(self._fs, entry.path, entry.manifest)
            except CheckpointError:
                return "damaged"
            except OSError:
                return "unreadable"
            self._sound.add(entry.path)
        return "sound"


class _Found(NamedTuple, Generic[T]):
    """A checkpoint that could be read, the result, and what was seen on the way to it."""

    entry: CheckpointEntry
    result: T
    entries: list[CheckpointEntry]
    damaged: list[CheckpointEntry]
    has_pointer: bool


def _candidates(entries: list[CheckpointEntry], pointer: Pointer | None) -> list[CheckpointEntry]:
    """The checkpoints to load from, best first: those of the named run, or without one of the run that saved last."""
    if pointer is not None:
        return of_run(entries, pointer.run_id)
    return [entry for newest in newest_first(entries)[:1] for entry in of_run(entries, newest.run_id)]
