"""`DumbDiLoCoCoordinator`: a training process that is a node, and perhaps the master too.

The rules are in `node.py` and `master.py`. This file says when they run: on background threads beside the training
thread, which itself counts steps, gives copies of the weights away at boundaries, and installs new ones between steps.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from speedtronic.config import DistributedConfig
from speedtronic.distributed.codec import make_codec
from speedtronic.distributed.identity import NodeLock, new_nonce, node_folder, resolve_node_id
from speedtronic.distributed.master import MasterSettings
from speedtronic.distributed.node import Node
from speedtronic.distributed.node_files import NodeFiles
from speedtronic.distributed.outer import MasterOuterLoop, say_through
from speedtronic.distributed.records import Position
from speedtronic.distributed.requests import EventSink, Procedure, T, perform
from speedtronic.distributed.schema import Schema, rebase_, snapshot
from speedtronic.distributed.stores.base import Store
from speedtronic.distributed.stores.open import connect
from speedtronic.distributed.threads import BackgroundThread, ReportedWork
from speedtronic.errors import (
    RunFolderError,
    StoreContentError,
    StoreRefusedError,
)
from speedtronic.metrics import MetricLogger
from speedtronic.model.wrappers import unwrapped

START_WAIT = 30.0
"""Seconds that a start waits for its first look at the store, so that a late node starts with the newest weights."""


class DumbDiLoCoCoordinator:
    """Trains a model together with other nodes that share nothing but a store.

    It has every call of the trainer's `FullCoordinator`. No step waits for the store, unless `async_delta_upload` or
    `async_global_poll` is false: then that part is done at boundaries on the training thread. Any role but `worker`
    makes versions too.

    Args:
        config: the `distributed` section.
        model: the module that is trained, on any device and in any precision; also one from `torch.compile`.
        store: used instead of the one that `config.repo_id` names.
        state_dir: used instead of `config.state_dir`, for the spool and the ledger.
        logger: receives events and log messages; without one, a logger that prints to the terminal.
        start_wait: seconds that `start` waits for the first look at the store.
        clock: monotonic, in seconds.

    Raises:
        ValueError: a tensor of the model cannot be exchanged; the message names it.
    """

    def __init__(
        self,
        config: DistributedConfig,
        model: nn.Module,
        *,
        store: Store | None = None,
        state_dir: str | os.PathLike[str] | None = None,
        logger: MetricLogger | None = None,
        start_wait: float = START_WAIT,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._model = unwrapped(model)
        self._schema = Schema.of(self._model)
        self._store = store
        self._state_dir = Path(state_dir if state_dir is not None else config.state_dir).absolute()
        self._say = say_through(logger or MetricLogger())
        self._start_wait = start_wait
        self._clock = clock
        self._session: _Session | None = None
        self._staged: dict[str, Any] | None = None
        self._handed_over_at: int | None = None
        self._resets_optimizer = False
        self._last_global_step = 0
        self._local_step = 0
        self._outer_step = 0

    @property
    def local_step(self) -> int:
        """Global steps of this node's run."""
        return self._local_step

    @property
    def last_global_step(self) -> int:
        """The step of this node after which global weights were installed last; 0 before the first."""
        return self._last_global_step

    @property
    def outer_step(self) -> int:
        """The version of the global weights that the model is on; 0 before the first."""
        return self._outer_step

    @property
    def reset_inner_optimizer(self) -> bool:
        """Whether the trainer must clear the optimizer's state after the last exchange: as configured, and always when
        it replaced weights that were not finite.
        """
        return self._config.reset_inner_optimizer or self._resets_optimizer

    # ------------------------------------------------------------------ lifecycle

    def prepare_state(self, state: dict[str, Any]) -> None:
        """Give the next `start` a state of `state_dict` to continue from, with the model as it was then."""
        self._staged = state

    def start(self) -> None:
        """Become a node: restore what is known locally, start the threads, and wait a little for a first look.

        Raises:
            RunLockedError: another node of this name runs on this machine.
            RunFolderError: `state_dir` cannot be used.
            StoreRefusedError: the store cannot be used as it is; the message says what to check.
            CheckpointError: the prepared state is not of this model.
        """
        if self._session is not None:
            return
        session = _Session(
            self._config,
            self._model,
            self._schema,
            store=self._store,
            state_dir=self._state_dir,
            say=self._say,
            clock=self._clock,
        )
        try:
            session.begin(self._staged, self._start_wait)
        except BaseException:  # whatever ends the start, also an interrupt, leaves no thread and no lock; raised again
            session.end(0.0)
            raise
        self._session = session
        self._local_step, self._outer_step = session.node.local_step, session.node.version or 0
        self._install(session)

    def hand_over(self) -> None:
        """Commit what was trained since the last boundary, before the last checkpoint of a run.

        Waits up to `delta_upload_shutdown_timeout` for the upload of the delta before it, which takes up the spool, and
        not for its own.
        """
        if self._session is not None and self._handed_over_at != self._local_step:
            self._handed_over_at = self._local_step
            self._session.commit_rest(self._config.delta_upload_shutdown_timeout)

    def stop(self) -> None:
        """Commit and send what was trained since the last boundary, and end the threads. Waits for the store no longer
        than `delta_upload_shutdown_timeout`. What is not sent by then is sent after the next start.
        """
        session, self._session = self._session, None
        if session is None:
            return
        timeout = self._config.delta_upload_shutdown_timeout
        deadline = self._clock() + timeout
        try:
            session.send_rest(timeout)
            self._staged = session.node.state_dict()
        finally:
            session.end(max(0.0, deadline - self._clock()))

    def state_dict(self) -> dict[str, Any] | None:
        """What a checkpoint must hold. Its tensors are not copied; they never change. `pending_upload` is None, or has
        the `step` up to which a committed delta is not uploaded yet. None before the first start.
        """
        return self._staged if self._session is None else self._session.node.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state of `state_dict`: at the next start, or by a restart if this start was without it."""
        if self._session is None:
            self._staged = state
        elif state is not self._staged:
            self.stop()
            self._staged = state
            self.start()

    # ------------------------------------------------------------------ between two steps

    def count(self, samples: int, tokens: int | Tensor) -> None:
        """Add what the step that ends now was trained on."""
        if self._session is not None:
            self._session.node.count(samples, tokens)

    def after_optimizer_step(self, model: nn.Module, step: int) -> bool:
        """Do what is due after a global step.

        Returns:
            Whether a delta was accepted for upload, or global weights were installed.

        Raises:
            ValueError: this is not the model of this coordinator.
            RuntimeError: it is not started.
        """
        if unwrapped(model) is not self._model:
            raise ValueError("this coordinator was made for another model than the one that is trained")
        if self._session is None:
            raise RuntimeError("a coordinator must be started before the first step")
        self._local_step = step
        accepted = self._session.after_step(step)
        return self._install(self._session) or accepted

    def continue_at(self) -> Position | None:
        """Where the trainer should continue, because everything before is sent already."""
        position = None if self._session is None else self._session.node.continue_at()
        if position is not None:
            self._local_step = position.step
        return position

    def refresh(self) -> bool:
        """Look at the store on this thread, install what is new, and return whether there was anything.

        Raises:
            StoreError: the store did not answer.
            RuntimeError: the coordinator is not started.
        """
        if self._session is None:
            raise RuntimeError("a coordinator must be started before it looks at the store")
        self._session.poll()
        return self._install(self._session)

    def _install(self, session: _Session) -> bool:
        install = session.node.installable()
        if install is None:
            return False
        rebase_(self._model, install.new_base, install.base, adopt=install.adopt)
        session.node.installed(install)
        self._resets_optimizer = install.resets_optimizer
        self._last_global_step = session.node.local_step
        self._outer_step = install.manifest.version
        return True


DumbDiLoCo = DumbDiLoCoCoordinator


def build_master(
    config: DistributedConfig,
    store: Store,
    model: nn.Module,
    say: EventSink,
    *,
    stopping: threading.Event | None = None,
    store_id: str | None = None,
) -> MasterOuterLoop:
    """The master of a configuration.

    Args:
        config: its keys that `MasterSettings` has are used.
        store: as `connect` gives it.
        model: its values become version 0 if the store is empty.
        say: receives events and log messages; see `say_through`.
        stopping, store_id: see `MasterOuterLoop`.
    """
    settings: dict[str, Any] = {setting.name: getattr(config, setting.name) for setting in fields(MasterSettings)}
    return MasterOuterLoop(
        store, snapshot(model), schema=Schema.of(model), say=say, stopping=stopping, store_id=store_id, **settings
    )


class _Session:
    """A node from a start to its stop: its lock, its files, its threads.

    If its threads hang when it ends, it is left behind. It can then touch no file and log nothing any more, so that it
    does not disturb the next session.
    """

    def __init__(
        self,
        config: DistributedConfig,
        model: nn.Module,
        schema: Schema,
        *,
        store: Store | None,
        state_dir: Path,
        say: EventSink,
        clock: Callable[[], float],
    ) -> None:
        self._config = config
        self._model = model
        self._schema = schema
        self._state_dir = state_dir
        self._sink = say
        self._clock = clock
        self._stack = ExitStack()
        self._stopping = threading.Event()
        self._over = False
        self._store = connect(config, store, stopping=self._stopping)
        self._owns_store = store is None
        self._uploading = ReportedWork("the upload", self._upload, self._say)
        self._polling = ReportedWork("the look at the store", self._poll_and_note, self._say)
        self._spool_lock = threading.Lock()
        self._poll_lock = threading.Lock()
        self._polled = threading.Event()
        self._uploaded = threading.Event()
        self._refusal: StoreRefusedError | None = None
        self._threads: list[BackgroundThread] = []
        self._upload_thread: BackgroundThread | None = None
        self._poll_thread: BackgroundThread | None = None
        self._master: _LocalMaster | None = None
        self._boundary_at = clock()
        self.node: Node

    # ------------------------------------------------------------------ start and end

    def begin(self, state: Mapping[str, Any] | None, wait: float) -> None:
        """Take the node's folder, restore the node, start the threads, and wait for a first look."""
        config = self._config
        deadline = self._clock() + wait

        # The folder and the files in it. Locked first, so that a second node of this name touches nothing.
        name = resolve_node_id(config.node_id, self._state_dir)
        folder = node_folder(self._state_dir, self._store.url, name)
        self._stack.enter_context(NodeLock(folder))
        try:
            self._files = NodeFiles(folder)
        except OSError as error:
            raise RunFolderError(f"{folder}: {error.strerror or error}; set distributed.state_dir") from error
        self._stack.callback(self._files.close)

        # The node, restored from the checkpoint's state and from the disk. Nothing remote is asked before that.
        self.node = Node(
            self._schema,
            node=name,
            nonce=new_nonce(),
            codec=make_codec(config.codec),
            inner_steps=config.inner_steps,
            initial=snapshot(self._model, names=self._schema.names("trained")),
            say=self._say,
            now=lambda: datetime.now(UTC).isoformat(timespec="seconds"),
        )
        self._perform(self.node.begin(state))
        self._log("INFO", f"node {name} trains through {self._store.url}, and trusts everyone who can write there")

        # The master first, so that a new store has a version when this node looks.
        if config.role != "worker":
            loop = build_master(
                config, self._store, self._model, self._say, stopping=self._stopping, store_id=self.node.store
            )
            self._master = _LocalMaster(loop, self._say, on_version=self._wake_poll_thread)
            self._master.thread = self._start_thread("master", self._master.work)
            self._master.look_once_more(wait)
        if config.async_delta_upload:
            self._upload_thread = self._start_thread("upload", self._uploading)
        if config.async_global_poll:
            self._poll_thread = self._start_thread("poll", self._polling)
            if not self._polled.wait(max(0.0, deadline - self._clock())):
                self._log("WARNING", f"{self._store.url}: no answer after {wait:g} s; training starts without it")
        else:
            self._polling.attempt()

        # A store that refuses the first look will refuse the others: the run ends instead of training alone.
        if self._refusal is not None:
            raise self._refusal
        self._boundary_at = self._clock()

    def _start_thread(self, name: str, work: ReportedWork) -> BackgroundThread:
        thread = BackgroundThread(
            f"diloco-{name}",
            work,
            interval=self._config.poll_interval,
            failed=work.report,
            stopping=self._stopping,
        )
        self._threads.append(thread)
        thread.start()
        return thread

    def send_rest(self, timeout: float) -> None:
        """Commit what was trained since the last boundary; wait up to `timeout` seconds until the store has it."""
        deadline = self._clock() + timeout
        self.commit_rest(timeout)
        self._finish_upload(deadline)
        if self._master is not None and not self.node.has_spooled:
            self._master.look_once_more(max(0.0, deadline - self._clock()))

    def commit_rest(self, timeout: float) -> None:
        """Commit what was trained since the last boundary; wait up to `timeout` seconds until the spool is free."""
        if self.node.unsent_steps > 0:
            self._finish_upload(self._clock() + timeout)
            self._boundary(last=True)
            self._spool()

    def _finish_upload(self, deadline: float) -> None:
        """Commit on this thread what waits for it, and let the thread upload it."""
        self._spool()
        if self._upload_thread is None:
            # Boundaries uploaded on the training thread, and waited. The end of a run waits until the deadline only.
            self._upload_thread = self._start_thread("upload", self._uploading)
        self._uploaded.clear()
        self._upload_thread.wake(urgent=True)
        while self.node.has_spooled and self._uploaded.wait(max(0.0, deadline - self._clock())):
            self._uploaded.clear()

    def end(self, timeout: float) -> None:
        """End all threads, waiting up to `timeout` seconds for all of them together, and release the node's folder."""
        deadline = self._clock() + timeout
        self._stopping.set()
        ended = [thread.stop(max(0.0, deadline - self._clock())) for thread in self._threads]
        # From here on a thread that still hangs in a request can neither log nor touch the files.
        self._over = True
        self._stack.close()
        if self._owns_store and all(ended):
            self._store.close()

    # ------------------------------------------------------------------ the training thread

    def after_step(self, step: int) -> bool:
        """Note a step; at a boundary, give a copy of the weights away. True if one was accepted."""
        self.node.stepped(step)
        if not self.node.wants_boundary():
            return False
        if self._upload_thread is None:
            self._uploading.attempt()  # what an earlier boundary could not upload
        accepted = self._boundary()
        if self._poll_thread is None:
            self._polling.attempt()
        return accepted

    def _boundary(self, *, last: bool = False) -> bool:
        if self.node.start_boundary(last=last) != "queued":
            return False
        # The only thing that the training thread waits for: a copy of the weights into memory of the CPU.
        values = snapshot(self._model, self.node.spare(), names=self.node.exchanged)
        now = self._clock()
        self.node.give_snapshot(values, now - self._boundary_at)
        self._boundary_at = now
        if self._upload_thread is None:
            self._uploading.attempt()
        else:
            self._upload_thread.wake()
        return True

    # ------------------------------------------------------------------ the background threads

    def _upload(self) -> bool:
        self._spool()
        try:
            if self._perform(self.node.upload()) and self._master is not None:
                self._master.wake()
        finally:
            self._uploaded.set()
        return False

    def _spool(self) -> None:
        """On the upload thread; at the end of a run on the training thread, since that commit must not wait."""
        with self._spool_lock:
            self._perform(self.node.spool())
        if self.node.wants_version:
            self._wake_poll_thread()

    def _poll_and_note(self) -> bool:
        try:
            self.poll()
        except StoreRefusedError as error:
            # What the store holds may be repaired while this node trains alone; a missing permission ends the start.
            if not self._polled.is_set() and not isinstance(error, StoreContentError):
                self._refusal = error
            raise
        finally:
            self._polled.set()
        return False

    def poll(self) -> None:
        """Look at the store for a newer version, and prepare it."""
        with self._poll_lock:
            self._perform(self.node.poll())
        # A delta from before the start is sent once the first look has told that this is still the same store.
        if self._upload_thread is not None and self.node.has_spooled:
            self._upload_thread.wake()

    def _wake_poll_thread(self) -> None:
        if self._poll_thread is not None:
            self._poll_thread.wake()

    def _perform(self, procedure: Procedure[T]) -> T:
        return perform(procedure, self._store, self._files)

    # ------------------------------------------------------------------ events

    def _say(self, event: str, payload: Mapping[str, Any]) -> None:
        if not self._over:
            self._sink(event, payload)

    def _log(self, level: str, message: str) -> None:
        self._say("log", {"level": level, "message": message})


class _LocalMaster:
    """The master's work in the process of a node."""

    def __init__(self, loop: MasterOuterLoop, say: EventSink, *, on_version: Callable[[], None]) -> None:
        self.work = ReportedWork("the master's look at the store", self._look, say)
        self.thread: BackgroundThread | None = None
        self._loop = loop
        self._on_version = on_version
        self._awaited: threading.Event | None = None

    def wake(self) -> None:
        if self.thread is not None:
            self.thread.wake()

    def look_once_more(self, timeout: float) -> None:
        """Let a new look start, and wait up to `timeout` seconds for its end."""
        ended = threading.Event()
        self._awaited = ended
        if self.thread is not None:
            self.thread.wake(urgent=True)
        ended.wait(timeout)

    def _look(self) -> bool:
        # Only a look that starts after the request answers it: one that runs already may have missed the last delta.
        awaited, self._awaited = self._awaited, None
        before = self._loop.outer_step
        try:
            entered = self._loop.sync_once()
        finally:
            if awaited is not None:
                awaited.set()
        if self._loop.outer_step != before:
            self._on_version()
        return entered > 0
