"""The outer step: the optimizers that apply averaged pseudo-gradients, and the loop that runs a master over a store.

The optimizers are pure arithmetic. A round that brought the fraction f of what was expected (0 < f <= 1) moves the
weights by that fraction, and each pseudo-gradient that enters with f moves them by lr * f / (1 - momentum) in total,
the momentum's tail included. With f = 1 in every round, the Nesterov optimizers are DiLoCo's (Douillard et al., arXiv
2311.08105).
"""

from __future__ import annotations

import math
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

import torch
from torch import Tensor

from speedtronic.distributed.master import Master, MasterSettings, OuterOptimizer
from speedtronic.distributed.protocol import Manifest
from speedtronic.distributed.requests import EventSink, Procedure, T, perform
from speedtronic.distributed.schema import Schema, Tensors, TensorSpec, check_same, exchanged_dtype, has_fractions
from speedtronic.distributed.stores.base import Store
from speedtronic.distributed.threads import BackgroundThread, ReportedWork
from speedtronic.metrics import MetricLogger

__all__ = ["MasterOuterLoop", "NesterovOuterOptimizer"]

# Fractions that make up a round may add up to a little less.
_WHOLE_ROUND = 1.0 - 1e-9


# --- Optimizers


class SgdOuterOptimizer:
    """theta <- theta - lr * f * delta.

    Args:
        state: weights with the names and shapes of the pseudo-gradients.
        lr: the outer learning rate.
    """

    name = "sgd"

    def __init__(self, state: Mapping[str, Tensor], lr: float) -> None:
        _check_numbers(lr)
        self._lr = lr
        self._shapes = _zeros(state, device="meta")

    def step(self, state: Mapping[str, Tensor], delta: Mapping[str, Tensor], fraction: float = 1.0) -> None:
        _check_step(self._shapes, state, delta, fraction)
        for name, tensor in delta.items():
            state[name].add_(tensor * fraction, alpha=-self._lr)

    def tensors(self) -> Tensors:
        return {}

    def scalars(self) -> dict[str, float]:
        return {}

    def load(self, tensors: Mapping[str, Tensor], scalars: Mapping[str, float]) -> None:
        _check_load(self, tensors, scalars)


class NesterovOuterOptimizer:
    """Nesterov's momentum in fractions of rounds.

        m <- mu^f * m + f * delta
        theta <- theta - lr * (f * delta + mu * (1 - mu^f) / (1 - mu) * m)

    With f = 1 this is the step of `torch.optim.SGD(nesterov=True)`, bit for bit: m <- mu * m + delta;
    theta <- theta - lr * (delta + mu * m).

    Args:
        state: weights with the names and shapes of the pseudo-gradients; only floating-point and complex ones count.
        lr: the outer learning rate.
        momentum: mu, in [0, 1).
    """

    name = "nesterov"

    def __init__(self, state: Mapping[str, Tensor], lr: float, momentum: float = 0.9) -> None:
        _check_numbers(lr, momentum)
        self._lr = lr
        self._mu = momentum
        self._momentum = _zeros(state)

    @torch.no_grad()
    def step(self, state: Mapping[str, Tensor], delta: Mapping[str, Tensor], fraction: float = 1.0) -> None:
        _check_step(self._momentum, state, delta, fraction)
        mu = self._mu
        decay = mu**fraction
        # At f = 1 the factor is mu itself; the quotient would differ in its last bit.
        factor = mu if fraction == 1.0 else mu * (1.0 - decay) / (1.0 - mu)
        for name, momentum in self._momentum.items():
            part = delta[name].to(momentum.dtype) * fraction
            momentum.mul_(decay).add_(part)
            state[name].add_(part.add_(momentum, alpha=factor), alpha=-self._lr)

    def tensors(self) -> Tensors:
        return {f"momentum.{name}": tensor for name, tensor in self._momentum.items()}

    def scalars(self) -> dict[str, float]:
        return {}

    def load(self, tensors: Mapping[str, Tensor], scalars: Mapping[str, float]) -> None:
        _check_load(self, tensors, scalars)
        for name, tensor in self.tensors().items():
            tensor.copy_(tensors[name])


class DelayedNesterovOuterOptimizer(NesterovOuterOptimizer):
    """Nesterov's momentum that moves once a round, however many fractions make it up.

    Liu et al., "Asynchronous Local-SGD Training for Language Modeling" (arXiv 2401.09135), their delayed Nesterov
    update with c = 0, with any fractions in place of its N updates of 1/N: each step applies the gradient's own part
    and adds it to a buffer. When the fractions have made up a round, the momentum takes in the buffer and is applied.

        buffer <- buffer + f * delta;  count <- count + f
        theta <- theta - lr * f * delta
        if count >= 1:  m <- mu * m + buffer;  theta <- theta - lr * mu * m;  buffer <- 0;  count <- count - 1

    Arguments as for `NesterovOuterOptimizer`, with which it agrees if f = 1 in every round.
    """

    name = "delayed_nesterov"

    def __init__(self, state: Mapping[str, Tensor], lr: float, momentum: float = 0.9) -> None:
        super().__init__(state, lr, momentum)
        self._buffer = _zeros(state)
        self._count = 0.0

    @torch.no_grad()
    def step(self, state: Mapping[str, Tensor], delta: Mapping[str, Tensor], fraction: float = 1.0) -> None:
        _check_step(self._momentum, state, delta, fraction)
        # The fractions of the rounds so far. A whole round lets the momentum move once.
        self._count += fraction
        round_is_over = self._count >= _WHOLE_ROUND
        if round_is_over:
            self._count -= 1.0
        for name, momentum in self._momentum.items():
            part = delta[name].to(momentum.dtype) * fraction
            self._buffer[name].add_(part)
            if round_is_over:
                momentum.mul_(self._mu).add_(self._buffer[name])
                self._buffer[name].zero_()
                part.add_(momentum, alpha=self._mu)
            state[name].add_(part, alpha=-self._lr)

    def tensors(self) -> Tensors:
        return super().tensors() | {f"buffer.{name}": tensor for name, tensor in self._buffer.items()}

    def scalars(self) -> dict[str, float]:
        return {"count": self._count}

    def load(self, tensors: Mapping[str, Tensor], scalars: Mapping[str, float]) -> None:
        count = float(scalars.get("count", 0.0))
        if not abs(count) <= 1.0:
            raise ValueError(f"the state of an outer optimizer has a count of {count} rounds; it must be at most 1")
        super().load(tensors, scalars)
        self._count = count


def make_outer(name: str, state: Mapping[str, Tensor], lr: float, momentum: float) -> OuterOptimizer:
    """The outer optimizer of this name.

    Args:
        name: `nesterov`, `sgd` (which has no momentum) or `delayed_nesterov`.
        state, lr, momentum: as for `NesterovOuterOptimizer`.

    Raises:
        ValueError: the name is none of these, lr is not positive, or momentum is not in [0, 1).
    """
    match name:
        case "nesterov":
            return NesterovOuterOptimizer(state, lr, momentum)
        case "delayed_nesterov":
            return DelayedNesterovOuterOptimizer(state, lr, momentum)
        case "sgd":
            return SgdOuterOptimizer(state, lr)
    raise ValueError(f"there is no outer optimizer {name!r}; there are nesterov, sgd, delayed_nesterov")


def outer_optimizer(settings: MasterSettings) -> Callable[[Mapping[str, Tensor]], OuterOptimizer]:
    """What makes the outer optimizer of some settings, given the trained weights."""
    return lambda weights: make_outer(settings.outer, weights, settings.lr, settings.momentum)


def _zeros(state: Mapping[str, Tensor], device: str | None = None) -> Tensors:
    """Zeros for each tensor that can be moved, in float32 or wider."""
    return {
        name: torch.zeros_like(tensor, dtype=torch.promote_types(tensor.dtype, torch.float32), device=device)
        for name, tensor in state.items()
        if has_fractions(tensor.dtype)
    }


def _check_numbers(lr: float, momentum: float = 0.0) -> None:
    if not 0.0 < lr < math.inf:
        raise ValueError(f"an outer learning rate must be a positive number, not {lr}")
    if not 0.0 <= momentum < 1.0:
        raise ValueError(f"an outer momentum must be at least 0 and less than 1, not {momentum}")


def _check_step(own: Tensors, state: Mapping[str, Tensor], delta: Mapping[str, Tensor], fraction: float) -> None:
    if not 0.0 < fraction <= 1.0:
        raise ValueError(f"the fraction of a round must be more than 0 and at most 1, not {fraction}")
    check_same(own, delta)
    check_same(own, {name: state[name] for name in own if name in state})


def _check_load(outer: OuterOptimizer, tensors: Mapping[str, Tensor], scalars: Mapping[str, float]) -> None:
    try:
        check_same(outer.tensors(), tensors)
    except ValueError as error:
        raise ValueError(f"this is not the state of the outer optimizer {outer.name}: {error}") from error
    if scalars.keys() != outer.scalars().keys():
        raise ValueError(f"this is not the state of the outer optimizer {outer.name}: it has the numbers {[*scalars]}")


# --- The master as an object with a thread


class MasterOuterLoop:
    """Makes global versions of the deltas in a store: one look at a time, or again and again on a thread of its own.

    All of its state is in the store. A restarted one continues from the last version, with the same momentum; several
    at once make one history.

    Args:
        store: where the nodes put their deltas.
        state: the model's values, for version 0 if there is none yet; copied. With a `schema` every entry of it, as
            `snapshot` gives them; without one, floating-point and complex entries are trained and others are buffers.
        outer_lr: η. None: 1.0, or 0.7 if rounds wait for all nodes.
        outer_momentum: μ. None: 0.5, or 0.9 if rounds wait for all nodes.
        poll_interval: seconds between looks.
        outer: `nesterov`, `sgd` or `delayed_nesterov`.
        schema: of the model.
        codec: the encoding of the deltas.
        expected_nodes, quorum, grace, inner_steps, max_staleness, keep_versions: see `MasterSettings`.
        say: receives events and log messages; None prints them to the terminal.
        stopping: set by `stop`. Pauses between attempts at a request wait on it, so that they end too.
        clock: monotonic seconds.
        store_id: see `Master`.
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
        inner_steps: int | None = None,
        max_staleness: float | None = None,
        keep_versions: int = 8,
        say: EventSink | None = None,
        stopping: threading.Event | None = None,
        clock: Callable[[], float] = time.monotonic,
        store_id: str | None = None,
    ) -> None:
        settings = MasterSettings(
            outer_lr=outer_lr,
            outer_momentum=outer_momentum,
            outer=outer,
            codec=codec,
            expected_nodes=expected_nodes,
            quorum=quorum,
            grace=grace,
            inner_steps=inner_steps,
            max_staleness=max_staleness,
            keep_versions=keep_versions,
            poll_interval=poll_interval,
        )
        if schema is None:
            schema = Schema(
                {
                    name: TensorSpec(
                        "trained" if has_fractions(tensor.dtype) else "newest",
                        tuple(tensor.shape),
                        exchanged_dtype(tensor.dtype),
                    )
                    for name, tensor in state.items()
                }
            )
        self._store = store
        self._say = say or say_through(MetricLogger())
        self._master = Master(
            schema,
            {name: state[name].detach().to("cpu", spec.dtype, copy=True) for name, spec in schema.entries.items()},
            settings,
            new_outer=outer_optimizer(settings),
            nonce=lambda: uuid.uuid4().hex,
            clock=clock,
            now=lambda: datetime.now(UTC).isoformat(timespec="milliseconds"),
            say=self._say,
            store_id=store_id,
        )
        self._interval = poll_interval
        self._stopping = stopping or threading.Event()
        self._thread: BackgroundThread | None = None
        self._busy = threading.Lock()  # held while weights and momentum may belong to no version
        self._newest: Manifest | None = None

    @property
    def newest(self) -> Manifest | None:
        """The version that was made or read last; None before the first look."""
        return self._newest

    @property
    def outer_step(self) -> int:
        """The number of `newest`; 0 before the first look."""
        return self._newest.version if self._newest is not None else 0

    def sync_once(self) -> int:
        """Look once for deltas, and make a version of them if a round is due; version 0 if there is none.

        Returns:
            How many deltas entered.

        Raises:
            StoreUnavailableError: the store did not answer. The next call makes up for it.
            StoreContentError: the store holds another model, or what cannot be read.
            StoreRefusedError: the store denies access.
        """
        with self._busy:
            return self._perform(self._master.poll())

    def snapshot(self) -> Tensors:
        """A copy of the global weights as of `outer_step`; of the initial ones before the first look.

        Waits for a look that is in progress. Raises what `sync_once` raises, if the last one failed and the weights
        must be read again.
        """
        with self._busy:
            if self._newest is not None and self._master.head is None:
                self._perform(self._master.adopt())
            return {name: tensor.clone() for name, tensor in self._master.weights.items()}

    def published(self) -> tuple[Manifest, Tensors] | None:
        """A version and a copy of its weights, at once: None while a look is in progress, and where it must be read."""
        if not self._busy.acquire(blocking=False):
            return None
        try:
            head = self._master.head
            return (head, {name: tensor.clone() for name, tensor in self._master.weights.items()}) if head else None
        finally:
            self._busy.release()

    def start(self) -> None:
        """Look again and again on a thread, until `stop`. Does nothing while the thread runs."""
        if self._thread is not None and not self._stopping.is_set():
            return
        self._stopping.clear()
        work = ReportedWork("the master's look at the store", lambda: self.sync_once() > 0, self._say)
        self._thread = BackgroundThread(
            "speedtronic-master", work, interval=self._interval, failed=work.report, stopping=self._stopping
        )
        self._thread.start()

    def stop(self, timeout: float = 5.0) -> bool:
        """End the thread, and wait for it up to `timeout` seconds. It can be started again.

        An interrupted look leaves nothing behind that would stop the next one, here or on another machine.

        Returns:
            Whether it has ended; if not, it ends with the request in which it is.
        """
        if self._thread is None:
            return True
        ended = self._thread.stop(timeout)
        if ended:
            self._thread = None
        return ended

    def wake(self) -> None:
        """Let the thread look now."""
        if self._thread is not None:
            self._thread.wake(urgent=True)

    def _perform(self, procedure: Procedure[T]) -> T:
        try:
            return perform(procedure, self._store)
        finally:
            self._newest = self._master.head or self._newest


def say_through(logger: MetricLogger) -> EventSink:
    """What passes the events and log messages of DumbDiLoCo to a logger."""
    log = {"INFO": logger.info, "WARNING": logger.warning, "ERROR": logger.error}

    def say(event: str, payload: Mapping[str, Any]) -> None:
        if event == "log":
            log[payload["level"].upper()](payload["message"])
        else:
            logger.emit(event, payload)

    return say
