"""The master as an object with a thread: what runs `Master` over a store, by itself or beside a training process."""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

import torch
from torch import Tensor

from speedtronic.distributed.master import Master, MasterSettings
from speedtronic.distributed.outer_optimizers import NesterovOuterOptimizer
from speedtronic.distributed.requests import Procedure, Say, T, perform
from speedtronic.distributed.stores.base import Store
from speedtronic.distributed.tensors import Schema, Tensors, TensorSpec
from speedtronic.distributed.threads import Lane
from speedtronic.errors import StoreRefusedError

__all__ = ["MasterOuterLoop", "NesterovOuterOptimizer"]

_log = logging.getLogger(__name__)


class MasterOuterLoop:
    """Makes global versions of the deltas in a store: one look at a time, or again and again on a thread of its own.

    All of its state is in the store. One that is started anew continues where the last version ended, with the same
    momentum; several at once make one history.

    Args:
        store: where the nodes put their deltas.
        state: the model's values, for version 0 where there is none yet; copied. With a `schema` every entry of it, as
            `snapshot` gives them; without one floating-point and complex entries are trained and others are buffers.
        outer_lr: η. None: 1.0, or 0.7 where rounds wait for all nodes.
        outer_momentum: μ. None: 0.5, or 0.9 where rounds wait for all nodes.
        poll_interval: seconds between looks.
        outer: `nesterov`, `sgd` or `delayed_nesterov`.
        schema: of the model.
        codec: in which the deltas are encoded.
        expected_nodes, quorum, grace, max_staleness, keep_versions: see `MasterSettings`.
        say: told of events and of words for the log; None sends the words to `logging`.
        stopping: set by `stop`, so that pauses between attempts at a request, which wait for it, end too.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        store: Store,
        state: Mapping[str, Tensor],
        *,
        outer_lr: float | None = 1.0,
        outer_momentum: float | None = 0.5,
        poll_interval: float = 60.0,
        outer: str = "nesterov",
        schema: Schema | None = None,
        codec: str = "fp32",
        expected_nodes: int | None = None,
        quorum: int | None = None,
        grace: float | None = None,
        max_staleness: float | None = None,
        keep_versions: int = 8,
        say: Say | None = None,
        stopping: threading.Event | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        schema = schema or _schema_of(state)
        settings = MasterSettings(
            lr=outer_lr,
            momentum=outer_momentum,
            outer=outer,
            codec=codec,
            expected_nodes=expected_nodes,
            quorum=quorum,
            grace=grace,
            max_staleness=max_staleness,
            keep_versions=keep_versions,
            poll_interval=poll_interval,
        )
        self._store = store
        self._say = say or _to_logging
        self._master = Master(
            schema,
            {name: state[name].detach().to("cpu", spec.dtype, copy=True) for name, spec in schema.entries.items()},
            settings,
            nonce=lambda: uuid.uuid4().hex,
            clock=clock,
            now=lambda: datetime.now(UTC).isoformat(timespec="milliseconds"),
            say=self._say,
        )
        self._interval = poll_interval
        self._stopping = stopping or threading.Event()
        self._lane: Lane | None = None
        self._busy = threading.Lock()  # held while weights and momentum may be on their way to another version
        self._version: int | None = None

    @property
    def outer_step(self) -> int:
        """The version that was made or read last; 0 before the first look."""
        return self._version or 0

    def sync_once(self) -> int:
        """Look once for deltas, and make a version of them if a round is due; version 0 if there is none.

        Returns:
            How many deltas entered.

        Raises:
            StoreUnavailableError: the store did not answer. The next call makes up for it.
            StoreContentError: the store holds another model, or what cannot be read.
            StoreRefusedError: the store will not let us.
        """
        with self._busy:
            return self._perform(self._master.poll())

    def snapshot(self) -> Tensors:
        """A copy of the global weights as of `outer_step`; of the initial ones before the first look.

        Waits for a look that is in progress. Raises what `sync_once` raises, when the last one failed and the weights
        must be read again.
        """
        with self._busy:
            if self._version is not None and self._master.head is None:
                self._perform(self._master.adopt())
            return {name: tensor.clone() for name, tensor in self._master.weights.items()}

    def start(self) -> None:
        """Look again and again on a thread, until `stop`. While it runs, nothing happens."""
        if self._lane is not None and not self._stopping.is_set():
            return
        self._stopping.clear()
        self._lane = Lane(
            "speedtronic-master", self._work, interval=self._interval, failed=self._failed, stopping=self._stopping
        )
        self._lane.start()

    def stop(self, timeout: float = 5.0) -> bool:
        """End the thread, and wait for it up to `timeout` seconds. It can be started again.

        A look that is cut off leaves nothing behind that the next one, here or on another machine, cannot go on from.

        Returns:
            Whether it has ended; if not, it ends with the request in which it is.
        """
        if self._lane is None:
            return True
        ended = self._lane.stop(timeout)
        if ended:
            self._lane = None
        return ended

    def wake(self) -> None:
        """Let the thread look now."""
        if self._lane is not None:
            self._lane.wake()

    def _work(self) -> bool:
        return self.sync_once() > 0

    def _perform(self, procedure: Procedure[T]) -> T:
        try:
            return perform(procedure, self._store)
        finally:
            if self._master.head is not None:
                self._version = self._master.head.version

    def _failed(self, error: Exception) -> None:
        level = "ERROR" if isinstance(error, StoreRefusedError) else "WARNING"
        self._say("log", {"level": level, "message": f"the master could not look at {self._store.url}: {error}"})


def _schema_of(state: Mapping[str, Tensor]) -> Schema:
    return Schema({name: _spec_of(tensor) for name, tensor in state.items()})


def _spec_of(tensor: Tensor) -> TensorSpec:
    if tensor.is_complex():
        return TensorSpec("trained", tuple(tensor.shape), torch.complex64)
    if tensor.is_floating_point():
        return TensorSpec("trained", tuple(tensor.shape), torch.float32)
    return TensorSpec("newest", tuple(tensor.shape), tensor.dtype)


def _to_logging(event: str, payload: Mapping[str, Any]) -> None:
    if event == "log":
        _log.log(logging.getLevelNamesMapping()[payload["level"]], "%s", payload["message"])
