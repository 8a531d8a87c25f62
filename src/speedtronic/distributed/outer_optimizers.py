"""The outer optimizers: how the mean of the nodes' pseudo-gradients moves the global weights. Pure arithmetic.

A round that brought the fraction f of what was expected (0 < f <= 1) moves the weights by that fraction, and each
pseudo-gradient that enters with f moves them by lr * f / (1 - momentum) in total, the momentum's tail included. With
f = 1 in every round, the Nesterov optimizers are DiLoCo's (Douillard et al., arXiv 2311.08105).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from speedtronic.distributed.tensors import Tensors, check_same

# Fractions that make up a round may add up to a little less.
_WHOLE_ROUND = 1.0 - 1e-9


class OuterOptimizer(Protocol):
    """Moves weights by pseudo-gradients, which point from where the nodes are to where they were."""

    @property
    def name(self) -> str:
        """What `distributed.outer` calls it."""

    def step(self, state: Mapping[str, Tensor], delta: Mapping[str, Tensor], fraction: float = 1.0) -> None:
        """Move weights, in place.

        Args:
            state: the weights. What `delta` does not name stays as it is.
            delta: the mean pseudo-gradient, of every tensor that is trained, in float32 or complex64.
            fraction: f, what share of the expected weight has come.

        Raises:
            ValueError: names or shapes are not those that the optimizer was made for, or f is not in (0, 1]. Nothing
                was changed.
        """

    def tensors(self) -> Tensors:
        """What it remembers, under names of its own. The tensors themselves: the next step changes them."""

    def scalars(self) -> dict[str, float]:
        """The numbers that it remembers."""

    def load(self, tensors: Mapping[str, Tensor], scalars: Mapping[str, float]) -> None:
        """Continue from what another one of this kind remembered; the values are copied.

        Raises:
            ValueError: they are not those of this optimizer. Nothing was changed.
        """


class SgdOuterOptimizer:
    """theta <- theta - lr * f * delta.

    Args:
        state: weights whose names and shapes pseudo-gradients have.
        lr: the outer learning rate.
    """

    name = "sgd"

    def __init__(self, state: Mapping[str, Tensor], lr: float) -> None:
        self._lr = _positive(lr)
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
        state: weights whose names and shapes pseudo-gradients have; only floating-point and complex ones count.
        lr: the outer learning rate.
        momentum: mu, in [0, 1).
    """

    name = "nesterov"

    def __init__(self, state: Mapping[str, Tensor], lr: float, momentum: float = 0.9) -> None:
        self._lr = _positive(lr)
        self._mu = _checked_momentum(momentum)
        self._momentum = _zeros(state)

    @torch.no_grad()
    def step(self, state: Mapping[str, Tensor], delta: Mapping[str, Tensor], fraction: float = 1.0) -> None:
        _check_step(self._momentum, state, delta, fraction)
        mu = self._mu
        decay = mu**fraction
        share = mu if fraction == 1.0 else mu * (1.0 - decay) / (1.0 - mu)
        for name, momentum in self._momentum.items():
            part = delta[name].to(momentum.dtype) * fraction
            momentum.mul_(decay).add_(part)
            state[name].add_(part.add_(momentum, alpha=share), alpha=-self._lr)

    def tensors(self) -> Tensors:
        return _prefixed("momentum", self._momentum)

    def scalars(self) -> dict[str, float]:
        return {}

    def load(self, tensors: Mapping[str, Tensor], scalars: Mapping[str, float]) -> None:
        _check_load(self, tensors, scalars)
        _fill(self.tensors(), tensors)


class DelayedNesterovOuterOptimizer:
    """Nesterov's momentum that moves once a round, however many fractions make it up.

    Liu et al., "Asynchronous Local-SGD Training for Language Modeling" (arXiv 2401.09135), their delayed Nesterov
    update with c = 0, its N updates of 1/N being here any fractions: each step applies the gradient's own part and
    gathers it, and when the fractions have made up a round, the momentum takes in what was gathered and is applied.

        buffer <- buffer + f * delta;  count <- count + f
        theta <- theta - lr * f * delta
        if count >= 1:  m <- mu * m + buffer;  theta <- theta - lr * mu * m;  buffer <- 0;  count <- count - 1

    Arguments as of `NesterovOuterOptimizer`, with which it agrees when f = 1 in every round.
    """

    name = "delayed_nesterov"

    def __init__(self, state: Mapping[str, Tensor], lr: float, momentum: float = 0.9) -> None:
        self._lr = _positive(lr)
        self._mu = _checked_momentum(momentum)
        self._momentum = _zeros(state)
        self._buffer = _zeros(state)
        self._count = 0.0

    @torch.no_grad()
    def step(self, state: Mapping[str, Tensor], delta: Mapping[str, Tensor], fraction: float = 1.0) -> None:
        _check_step(self._momentum, state, delta, fraction)
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
        return _prefixed("momentum", self._momentum) | _prefixed("buffer", self._buffer)

    def scalars(self) -> dict[str, float]:
        return {"count": self._count}

    def load(self, tensors: Mapping[str, Tensor], scalars: Mapping[str, float]) -> None:
        _check_load(self, tensors, scalars)
        count = scalars["count"]
        if not abs(count) <= 1.0:
            raise ValueError(f"an outer optimizer that has gathered {count} rounds is none")
        _fill(self.tensors(), tensors)
        self._count = float(count)


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


def _zeros(state: Mapping[str, Tensor], device: str | None = None) -> Tensors:
    """Zeros for each tensor that can be moved, in float32 or wider."""
    return {
        name: torch.zeros_like(tensor, dtype=torch.promote_types(tensor.dtype, torch.float32), device=device)
        for name, tensor in state.items()
        if tensor.is_floating_point() or tensor.is_complex()
    }


def _prefixed(prefix: str, tensors: Tensors) -> Tensors:
    return {f"{prefix}.{name}": tensor for name, tensor in tensors.items()}


def _fill(own: Tensors, others: Mapping[str, Tensor]) -> None:
    for name, tensor in own.items():
        tensor.copy_(others[name])


def _positive(lr: float) -> float:
    if not 0.0 < lr < math.inf:
        raise ValueError(f"an outer learning rate is a positive number, not {lr}")
    return lr


def _checked_momentum(momentum: float) -> float:
    if not 0.0 <= momentum < 1.0:
        raise ValueError(f"an outer momentum is at least 0 and less than 1, not {momentum}")
    return momentum


def _check_step(own: Tensors, state: Mapping[str, Tensor], delta: Mapping[str, Tensor], fraction: float) -> None:
    if not 0.0 < fraction <= 1.0:
        raise ValueError(f"the fraction of a round is more than 0 and at most 1, not {fraction}")
    check_same(own, delta)
    check_same(own, {name: state[name] for name in own if name in state})


def _check_load(outer: OuterOptimizer, tensors: Mapping[str, Tensor], scalars: Mapping[str, float]) -> None:
    try:
        check_same(outer.tensors(), tensors)
    except ValueError as error:
        raise ValueError(f"this is not the state of the outer optimizer {outer.name}: {error}") from error
    if scalars.keys() != outer.scalars().keys():
        raise ValueError(f"this is not the state of the outer optimizer {outer.name}: it has the numbers {[*scalars]}")
