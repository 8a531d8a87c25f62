"""`DumbDiLoCoCoordinator`: a training process that is a node, and perhaps the master too.

The rules are in `node.py` and `rounds.py`. Here is when they run: on two lanes beside the training thread, which
itself counts, gives copies of the weights away at boundaries, and puts new ones into the model between two steps.
"""

from __future__ import annotations

import os
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from speedtronic.config import DistributedConfig
from speedtronic.distributed.codec import make_codec
from speedtronic.distributed.identity import NodeLock, new_session, node_folder, resolve_node_id
from speedtronic.distributed.node import Node
from speedtronic.distributed.node_files import NodeFiles
from speedtronic.distributed.outer import MasterOuterLoop
from speedtronic.distributed.protocol import Position
from speedtronic.distributed.requests import Say, perform
from speedtronic.distributed.stores.base import Store
from speedtronic.distributed.stores.connect import connect
from speedtronic.distributed.tensors import Schema, rebase_, snapshot
from speedtronic.distributed.threads import Lane
from speedtronic.errors import (
    RunFolderError,
    StoreContentError,
    StoreError,
    StoreRefusedError,
    StoreUnavailableError,
)
from speedtronic.metrics import MetricLogger

START_WAIT = 30.0
"""Seconds that a start waits for its first look at the store, so that a late node begins with the newest weights."""


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


class DumbDiLoCoCoordinator:
    """Trains a model together with other nodes that share nothing but a store.

    It has every call of the trainer's `FullCoordinator`. No step waits for the store, unless `async_delta_upload` or
    `async_global_poll` is false: then that part is done at boundaries on the training thread. Any role but `worker`
    makes versions too.

    Args:
        config: the `distributed` section.
        model: the module that is trained, on any device and in any precision; a `torch.compile`d one too.
        store: used in place of that which `config.repo_id` names.
        state_dir: used in place of `config.state_dir`, for the spool and the ledger.
        logger: receives events and words; one that prints to the terminal without it.
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
        self._model = _plain(model)
        self._schema = Schema.of(self._model)
        self._store = store
        self._state_dir = Path(state_dir if state_dir is not None else config.state_dir)
        self._say = say_through(logger or MetricLogger())
        self._start_wait = start_wait
        self._clock = clock
        self._life: _Life | None = None
        self._staged: dict[str, Any] | None = None
        self._handed_over_at: int | None = None
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
        """Whether the trainer is to clear the optimizer's state after an exchange; as configured."""
        return self._config.reset_inner_optimizer

    # ------------------------------------------------------------------ lifecycle

    def prepare_state(self, state: dict[str, Any]) -> None:
        """Give the next `start` a state of `state_dict` to go on from, when the model is as it was then."""
        self._staged = state

    def start(self) -> None:
        """Become a node: take up what is known locally, start the lanes, and wait a little for a first look.

        Raises:
            RunLockedError: another node of this name runs on this machine.
            RunFolderError: `state_dir` cannot be used.
            StoreRefusedError: the store cannot be used as it is; the message says what to check.
            CheckpointError: the prepared state is not of this model.
        """
        if self._life is not None:
            return
        life = _Life(self._config, self._model, self._schema, self._store, self._state_dir, self._say, self._clock)
        try:
            life.begin(self._staged, self._start_wait)
        except BaseException:  # whatever ends the start, an interrupt too, leaves no lane and no lock; it is raised on
            life.end(0.0)
            raise
        self._life = life
        self._local_step, self._outer_step = life.node.local_step, life.node.version or 0
        self._install(life)

    def hand_over(self) -> None:
        """Hand over what was trained since the last boundary, before the last checkpoint of a run.

        Waits up to `delta_upload_shutdown_timeout` for the delta before it, whose place it needs, and not for its own.
        """
        if self._life is not None and self._handed_over_at != self._local_step:
            self._handed_over_at = self._local_step
            self._life.hand_over(self._config.delta_upload_shutdown_timeout)

    def stop(self) -> None:
        """Hand over what was trained since the last boundary, and end the lanes; waits for the store no longer than
        `delta_upload_shutdown_timeout`. What is not sent by then is sent after the next start.
        """
        life, self._life = self._life, None
        if life is None:
            return
        timeout = self._config.delta_upload_shutdown_timeout
        deadline = self._clock() + timeout
        try:
            life.hand_over_the_rest(timeout)
            self._staged = life.node.state_dict()
        finally:
            life.end(max(0.0, deadline - self._clock()))

    def state_dict(self) -> dict[str, Any] | None:
        """What a checkpoint must hold. Its tensors are not copied; they never change. `pending_upload` is None, or says
        up to which `step` a delta is on its way. None before the first start.
        """
        return self._staged if self._life is None else self._life.node.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state of `state_dict`: at the next start, or by starting anew when this start was without it."""
        if self._life is None:
            self._staged = state
        elif state is not self._staged:
            self.stop()
            self._staged = state
            self.start()

    # ------------------------------------------------------------------ between two steps

    def count(self, samples: int, tokens: int | Tensor) -> None:
        """Add what the step that ends now was trained on."""
        if self._life is not None:
            self._life.node.count(samples, tokens)

    def after_optimizer_step(self, model: nn.Module, step: int) -> bool:
        """Do what is due after a global step.

        Returns:
            Whether a delta was accepted for upload, or global weights were installed.

        Raises:
            ValueError: this is not the model that the coordinator was made for.
            RuntimeError: it is not started.
        """
        if _plain(model) is not self._model:
            raise ValueError("this coordinator was made for another model than the one that is trained")
        if self._life is None:
            raise RuntimeError("a coordinator must be started before it is told of steps")
        self._local_step = step
        accepted = self._life.after_step(step)
        return self._install(self._life) or accepted

    def continue_at(self) -> Position | None:
        """Where the trainer should go on, because what lies before is handed over already."""
        position = None if self._life is None else self._life.node.continue_at()
        if position is not None:
            self._local_step = position.step
        return position

    def refresh(self) -> bool:
        """Look at the store on this thread, install what is new, and return whether there was anything.

        Raises:
            StoreError: the store did not answer.
            RuntimeError: the coordinator is not started.
        """
        if self._life is None:
            raise RuntimeError("a coordinator must be started before it looks at the store")
        self._life.look()
        return self._install(self._life)

    def _install(self, life: _Life) -> bool:
        install = life.node.installable()
        if install is None:
            return False
        rebase_(self._model, install.new_base, install.base, adopt=install.adopt)
        life.node.installed(install)
        self._last_global_step = life.node.local_step
        self._outer_step = install.manifest.version
        return True


DumbDiLoCo = DumbDiLoCoCoordinator


def build_master(
    config: DistributedConfig, store: Store, model: nn.Module, say: Say, *, stopping: threading.Event | None = None
) -> MasterOuterLoop:
    """The master of a configuration.

    Args:
        config: read are the keys of rounds and of the outer step.
        store: as `connect` gives it.
        model: its values become version 0 where the store is empty.
        say: told of events and of words, as `say_through` makes one.
        stopping: see `MasterOuterLoop`.
    """
    return MasterOuterLoop(
        store,
        snapshot(model),
        schema=Schema.of(model),
        outer_lr=config.outer_lr,
        outer_momentum=config.outer_momentum,
        poll_interval=config.poll_interval,
        outer=config.outer,
        codec=config.codec,
        expected_nodes=config.expected_nodes,
        quorum=config.quorum,
        grace=config.grace,
        max_staleness=config.max_staleness,
        keep_versions=config.keep_versions,
        say=say,
        stopping=stopping,
    )


def say_through(logger: MetricLogger) -> Say:
    """What the parts of DumbDiLoCo tell events and words to, as a function that passes them to a logger."""
    words = {"INFO": logger.info, "WARNING": logger.warning, "ERROR": logger.error}

    def say(event: str, payload: Mapping[str, Any]) -> None:
        if event == "log":
            words[payload["level"].upper()](payload["message"])
        else:
            logger.emit(event, payload)

    return say


class _Life:
    """A node from a start to its stop: its lock, its files, its lanes.

    One whose lanes hang is left behind when it ends. It can then touch no file and say no word any more, so that the
    next life does not meet it.
    """

    def __init__(
        self,
        config: DistributedConfig,
        model: nn.Module,
        schema: Schema,
        store: Store | None,
        state_dir: Path,
        say: Say,
        clock: Callable[[], float],
    ) -> None:
        self._config = config
        self._model = model
        self._schema = schema
        self._state_dir = state_dir
        self._tell = say
        self._clock = clock
        self._stack = ExitStack()
        self._stopping = threading.Event()
        self._over = False
        self._store = connect(config, store, stopping=self._stopping)
        self._opened_it = store is None
        self._sending = _Watched("the upload", self._send, self._say)
        self._looking = _Watched("the look at the store", self._look, self._say)
        self._spooling = threading.Lock()
        self._polling = threading.Lock()
        self._looked = threading.Event()
        self._sent = threading.Event()
        self._refusal: StoreRefusedError | None = None
        self._lanes: list[Lane] = []
        self._upload: Lane | None = None
        self._poll: Lane | None = None
        self._master: _Master | None = None
        self._since = clock()
        self.node: Node

    # ------------------------------------------------------------------ beginning and end

    def begin(self, state: Mapping[str, Any] | None, wait: float) -> None:
        config = self._config
        name = resolve_node_id(config.node_id, self._state_dir)
        folder = node_folder(self._state_dir, self._store.url, name)
        self._stack.enter_context(NodeLock(folder))
        try:
            self._files = NodeFiles(folder)
        except OSError as error:
            raise RunFolderError(f"{folder}: {error.strerror or error}; set distributed.state_dir") from error
        self._stack.callback(self._files.close)
        self.node = Node(
            self._schema,
            node=name,
            session=new_session(),
            codec=make_codec(config.codec),
            inner_steps=config.inner_steps,
            initial=snapshot(self._model, names=self._schema.names("trained")),
            say=self._say,
            now=_now,
        )
        perform(self.node.begin(state), self._store, self._files)
        self._log("INFO", f"node {name} trains through {self._store.url}, and trusts all who can write there")
        self._start_lanes(wait)
        self._since = self._clock()

    def _start_lanes(self, wait: float) -> None:
        """The master first, so that a store which it begins has a version when this node looks."""
        deadline = self._clock() + wait
        if self._config.role != "worker":
            loop = build_master(self._config, self._store, self._model, self._say, stopping=self._stopping)
            self._master = _Master(loop, self._say, made_a_version=self._wake_the_poll)
            self._master.lane = self._started("master", self._master.watched)
            self._master.look_once_more(wait)
        if self._config.async_delta_upload:
            self._upload = self._started("upload", self._sending)
        if self._config.async_global_poll:
            self._poll = self._started("poll", self._looking)
            answered = self._looked.wait(max(0.0, deadline - self._clock()))
        else:
            self._looking.attempt()
            answered = True
        if not answered:
            self._log("WARNING", f"{self._store.url}: no answer after {wait:g} s; training begins without it")
        if self._refusal is not None:
            raise self._refusal

    def _started(self, name: str, work: _Watched) -> Lane:
        lane = Lane(
            f"diloco-{name}",
            work,
            interval=self._config.poll_interval,
            failed=work.note,
            stopping=self._stopping,
        )
        self._lanes.append(lane)
        lane.start()
        return lane

    def hand_over_the_rest(self, timeout: float) -> None:
        """Commit what was trained since the last boundary; wait up to `timeout` seconds until the store has it."""
        deadline = self._clock() + timeout
        self.hand_over(timeout)
        self._finish_sending(deadline)
        if self._master is not None and not self.node.uploads:
            self._master.look_once_more(max(0.0, deadline - self._clock()))

    def hand_over(self, timeout: float) -> None:
        """Commit what was trained since the last boundary; wait up to `timeout` seconds for the place that it needs."""
        if self.node.unsent_steps > 0:
            self._finish_sending(self._clock() + timeout)
            self._hand_over(last=True)
            self._spool()

    def _finish_sending(self, deadline: float) -> None:
        """Commit on this thread what waits for it, and let the lane send it."""
        self._spool()
        if self._upload is None:  # it was done at boundaries, and waited for; the end of a run waits for so long only
            self._upload = self._started("upload", self._sending)
        self._sent.clear()
        self._upload.wake()
        while self.node.uploads and self._sent.wait(max(0.0, deadline - self._clock())):
            self._sent.clear()

    def end(self, timeout: float) -> None:
        """End the lanes, waiting up to `timeout` seconds for all of them together, and give the node's folder back."""
        deadline = self._clock() + timeout
        self._stopping.set()
        ended = [lane.stop(max(0.0, deadline - self._clock())) for lane in self._lanes]
        self._over = True
        self._stack.close()
        if self._opened_it and all(ended):
            self._store.close()

    # ------------------------------------------------------------------ the training thread

    def after_step(self, step: int) -> bool:
        """Note a step; at a boundary, give a copy of the weights away. True when one was accepted."""
        self.node.stepped(step)
        if not self.node.wants_boundary():
            return False
        if self._upload is None:
            self._sending.attempt()  # what an earlier boundary could not send
        accepted = self._hand_over()
        if self._poll is None:
            self._looking.attempt()
        return accepted

    def _hand_over(self, *, last: bool = False) -> bool:
        if self.node.take(last=last) != "queued":
            return False
        values = snapshot(self._model, self.node.spare(), names=self.node.exchanged)
        now = self._clock()
        self.node.boundary(values, now - self._since)
        self._since = now
        if self._upload is None:
            self._sending.attempt()
        else:
            self._upload.wake()
        return True

    # ------------------------------------------------------------------ the lanes

    def _send(self) -> bool:
        self._spool()
        try:
            if perform(self.node.upload(), self._store, self._files) and self._master is not None:
                self._master.wake()
        finally:
            self._sent.set()
        return False

    def _spool(self) -> None:
        """On the upload's lane, and at the end on the training thread: what is handed over then must not wait."""
        with self._spooling:
            perform(self.node.spool(), self._store, self._files)

    def _look(self) -> bool:
        try:
            self.look()
        except StoreRefusedError as error:
            # What the store holds may come right while this node trains alone; what it does not allow will not.
            if not self._looked.is_set() and not isinstance(error, StoreContentError):
                self._refusal = error
            raise
        finally:
            self._looked.set()
        return False

    def look(self) -> None:
        """Look at the store for a newer version, and prepare it."""
        with self._polling:
            perform(self.node.poll(), self._store, self._files)
        # A delta from before the start is sent once the first look has told that this is still the same store.
        if self._upload is not None and self.node.uploads:
            self._upload.wake()

    def _wake_the_poll(self) -> None:
        if self._poll is not None:
            self._poll.wake()

    # ------------------------------------------------------------------ words

    def _say(self, event: str, payload: Mapping[str, Any]) -> None:
        if not self._over:
            self._tell(event, payload)

    def _log(self, level: str, message: str) -> None:
        self._say("log", {"level": level, "message": message})


class _Watched:
    """Work with the store that says what goes wrong when it begins to, and not at each attempt."""

    def __init__(self, name: str, work: Callable[[], bool], say: Say) -> None:
        self._name = name
        self._work = work
        self._say = say
        self._trouble: str | None = None

    def __call__(self) -> bool:
        again = self._work()
        if self._trouble is not None:
            self._trouble = None
            self._log("INFO", f"{self._name} works again")
        return again

    def attempt(self) -> None:
        """Do it on the calling thread, which goes on whatever the store says."""
        try:
            self()
        except StoreError as error:
            self.note(error)

    def note(self, error: Exception) -> None:
        trouble = type(error).__name__ if isinstance(error, StoreUnavailableError) else str(error)
        if trouble == self._trouble:
            return
        self._trouble = trouble
        if isinstance(error, StoreUnavailableError):
            self._log("WARNING", f"{self._name} does not succeed, is tried again, and training goes on: {error}")
        elif isinstance(error, StoreError):
            self._log("ERROR", f"{self._name} is refused, and training goes on alone: {error}")
        else:
            trace = "".join(traceback.format_exception(error)).rstrip()
            self._log("WARNING", f"{self._name} failed, and is tried again:\n{trace}")

    def _log(self, level: str, message: str) -> None:
        self._say("log", {"level": level, "message": message})


class _Master:
    """The master's work beside a node's."""

    def __init__(self, loop: MasterOuterLoop, say: Say, *, made_a_version: Callable[[], None]) -> None:
        self.watched = _Watched("the master's look at the store", self._look, say)
        self.lane: Lane | None = None
        self._loop = loop
        self._made_a_version = made_a_version
        self._awaited: threading.Event | None = None

    def wake(self) -> None:
        if self.lane is not None:
            self.lane.wake()

    def look_once_more(self, timeout: float) -> None:
        """Let a look begin now, and wait up to `timeout` seconds for its end."""
        ended = threading.Event()
        self._awaited = ended
        self.wake()
        ended.wait(timeout)

    def _look(self) -> bool:
        awaited, self._awaited = self._awaited, None
        before = self._loop.outer_step
        try:
            entered = self._loop.sync_once()
        finally:
            if awaited is not None:
                awaited.set()
        if self._loop.outer_step != before:
            self._made_a_version()
        return entered > 0


def _plain(model: nn.Module) -> nn.Module:
    """The module inside a `torch.compile`d one."""
    inner = model._modules.get("_orig_mod")
    return model if inner is None else inner
