"""Keeps an update with a non-finite loss or gradient away from the weights."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

Policy = Literal["stop", "skip", "ignore"]


class NonFiniteGuard:
    """Decides for each update whether the optimizer may apply it.

    A fused optimizer takes the verdict as a tensor (`found_inf`, as gradient scalers hand it over) and leaves the
    weights alone by itself, so nothing is read back; for others one number per update is read. Under `stop` the
    verdict sticks: once an update was bad, no later one is applied until the trainer has seen it and raised.

    Attributes:
        refused: whether the last update is already known on the host to have been refused.
    """

    def __init__(self, policy: Policy, optimizer: torch.optim.Optimizer) -> None:
        self._policy = policy
        self._optimizer = optimizer
        self._gated = bool(vars(optimizer).get("_step_supports_amp_scaling", False))
        self._bad: Tensor | None = None
        self.refused = False

    def inspect(self, loss: Tensor, norm: Tensor) -> Tensor:
        """Return 1.0 where this update must not be applied, else 0.0: a 0-dim float32 tensor on the device."""
        bad = (~torch.isfinite(loss + norm)).to(torch.float32)
        if self._policy == "stop" and self._gated:
            self._bad = bad if self._bad is None else torch.maximum(self._bad, bad)
            return self._bad
        return bad

    def step(self, bad: Tensor) -> None:
        """Let the optimizer apply the update, unless `bad` forbids it."""
        if self._policy == "ignore":
            self._optimizer.step()
        elif self._gated:
            self._gated_step(bad)
        else:
            self.refused = bool(bad.item())
            if not self.refused:
                self._optimizer.step()

    def _gated_step(self, bad: Tensor) -> None:
        optimizer: Any = self._optimizer
        optimizer.found_inf = bad
        try:
            optimizer.step()
        finally:
            del optimizer.found_inf
