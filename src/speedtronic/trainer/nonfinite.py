"""Keeps an update with a non-finite loss or gradient away from the model."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

Policy = Literal["stop", "skip", "ignore"]


class NonFiniteGuard:
    """Decides for each update whether the optimizer may apply it.

    A fused optimizer takes the verdict as a tensor (`found_inf`, as gradient scalers hand it over) and leaves the
    weights alone by itself, so nothing is read back; for others one number per update is read. Under `stop` the
    verdict sticks: once an update was bad, no later one is applied until the trainer has seen it and raised.

    The running statistics of norms are written by the forward pass, before there is a verdict. They are kept, and put
    back where the verdict is bad.

    Args:
        policy: what is done about a bad update; `ignore` applies it.
        optimizer: applies the updates.
        model: whose buffers are put back; without it none are.

    Attributes:
        refused: whether the last update is already known on the host to have been refused.
    """

    def __init__(self, policy: Policy, optimizer: torch.optim.Optimizer, model: nn.Module | None = None) -> None:
        self._policy = policy
        self._buffers = _running_statistics(model) if model is not None and policy != "ignore" else []
        self._kept: list[tuple[Tensor, Tensor]] = []
        self._optimizer = optimizer
        self._gated = bool(vars(optimizer).get("_step_supports_amp_scaling", False))
        self._bad: Tensor | None = None
        self.refused = False

    def keep_buffers(self) -> None:
        """Keep the buffers as they are now, before the forward passes of an update."""
        buffers = [owner._buffers[name] for owner, name in self._buffers]
        self._kept = [(buffer, buffer.clone()) for buffer in buffers if buffer is not None]

    def put_buffers_back(self, bad: Tensor | None = None) -> None:
        """Put the kept buffers back, where `bad` is 1.0; without it in any case."""
        for buffer, kept in self._kept:
            buffer.copy_(kept if bad is None else torch.where(bad > 0, kept, buffer))

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
        self.put_buffers_back(bad)

    def _gated_step(self, bad: Tensor) -> None:
        optimizer: Any = self._optimizer
        optimizer.found_inf = bad
        try:
            optimizer.step()
        finally:
            del optimizer.found_inf


def _running_statistics(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """The owners and names of the buffers that a checkpoint holds and a forward may write: averages and counts.

    Whole numbers of more than one are no statistics: quantised weights, which it would be a waste to copy.
    """
    saved = model.state_dict()
    return [
        (module, name)
        for path, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if f"{path}.{name}".removeprefix(".") in saved
        and buffer is not None
        and (buffer.is_floating_point() or buffer.ndim == 0)
    ]
