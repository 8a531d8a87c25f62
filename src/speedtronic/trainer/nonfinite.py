"""Keeps an update with a loss or gradient that is not finite (NaN or infinite) away from the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from speedtronic.errors import NonFiniteError

Policy = Literal["stop", "skip", "ignore"]


class NonFiniteGuard:
    """Decides for each update whether the optimizer may apply it.

    A fused optimizer takes the verdict as a tensor (`found_inf`, as from a gradient scaler) and skips a bad update by
    itself, so the host reads nothing. For other optimizers, and on MPS, the host reads one number per update. Under
    `stop` the verdict is sticky: after a bad update no later one is applied, until the trainer reads the verdict and
    raises.

    The forward pass writes the running statistics of norms before there is a verdict. So they are copied first, and put
    back where the verdict is bad.

    Args:
        policy: what to do about a bad update; `ignore` applies it.
        optimizer: applies the updates.
        model: the owner of the buffers that are put back; without it none are.
        on_host: whether the host is to know of each update whether it was refused, even if a fused optimizer could do
            without.

    Attributes:
        refused: whether the host knows that the last update was refused.
    """

    def __init__(
        self,
        policy: Policy,
        optimizer: torch.optim.Optimizer,
        model: nn.Module | None = None,
        *,
        on_host: bool = False,
    ) -> None:
        self._policy = policy
        self._buffers = running_statistics(model) if model is not None and policy != "ignore" else []
        self._kept: list[tuple[nn.Module, str, Tensor, Tensor]] = []
        self._optimizer = optimizer
        # torch's fused kernels for MPS take `found_inf`, and do not look at it (FusedAdamWKernelImpl.mm of torch 2.9).
        on_mps = any(p.device.type == "mps" for group in optimizer.param_groups for p in group["params"])
        supports = bool(vars(optimizer).get("_step_supports_amp_scaling", False))
        self._takes_verdict = supports and not on_mps and not on_host
        self._bad: Tensor | None = None
        self.refused = False

    def keep_buffers(self) -> None:
        """Copy the buffers, before the forward passes of an update."""
        self._kept = [
            (owner, name, buffer, buffer.clone())
            for _, owner, name in self._buffers
            if (buffer := owner._buffers[name]) is not None
        ]

    def put_buffers_back(self, bad: Tensor | None = None) -> None:
        """Put the copies back where `bad` is 1.0; always, where it is None."""
        for owner, name, buffer, kept in self._kept:
            now = owner._buffers[name]
            if bad is None:
                buffer.copy_(kept)
            elif now is not None and now.shape == kept.shape:
                buffer.copy_(torch.where(bad > 0, kept, now.detach()))
            elif bool(bad > 0):  # of a tensor with another shape, only the host can decide
                buffer.copy_(kept)
            else:
                continue
            if now is not buffer:  # a forward pass has put another tensor in its place
                setattr(owner, name, buffer)

    def inspect(self, loss: Tensor, norm: Tensor) -> Tensor:
        """Return 1.0 where this update must not be applied, else 0.0: a 0-dim float32 tensor on the device."""
        # The sum is finite only where both are, and only then the difference is 0 and not NaN.
        total = loss + norm
        bad = (total - total).nan_to_num(1.0).to(torch.float32)
        if self._policy == "stop" and self._takes_verdict:
            # The host will know only at the next log, so a bad update also refuses those after it.
            self._bad = bad if self._bad is None else torch.maximum(self._bad, bad)
            return self._bad
        return bad

    def step(self, bad: Tensor) -> None:
        """Let the optimizer apply the update, unless `bad` forbids it."""
        if self._policy == "ignore":
            self._optimizer.step()
        elif self._takes_verdict:
            optimizer: Any = self._optimizer
            optimizer.found_inf = bad
            try:
                optimizer.step()
            finally:
                del optimizer.found_inf
        else:
            self.refused = bool(bad.item())
            if not self.refused:
                self._optimizer.step()
        self.put_buffers_back(bad)

    def step_with_closure(self, evaluate: Callable[[], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor, Tensor]:
        """Let an optimizer that calls the model several times make its step, and undo it if something is not finite.

        Args:
            evaluate: computes the gradients for the weights of now; returns loss and gradient norm.

        Returns:
            Loss and norm of the first evaluation, or those that are not finite; and 1.0 if the update was refused.
        """
        seen: list[tuple[Tensor, Tensor, Tensor]] = []

        def closure() -> Tensor:
            loss, norm = evaluate()
            seen.append((loss, norm, self.inspect(loss, norm)))
            if self._policy != "ignore" and bool(seen[-1][2].item()):
                raise _NotFiniteError
            return loss

        weights = [p for group in self._optimizer.param_groups for p in group["params"]]
        before = [weight.detach().clone() for weight in weights]
        try:
            self._optimizer.step(closure)  # type: ignore[arg-type]  # torch's own optimizers take a tensor too
        except _NotFiniteError:
            with torch.no_grad():
                for weight, kept in zip(weights, before, strict=True):
                    weight.copy_(kept)
            # What it remembers is of a step that was not made, so it starts over.
            self._optimizer.state.clear()
            self.put_buffers_back()
            self.refused = True
            return seen[-1]
        self.refused = False
        return seen[0]


class _NotFiniteError(Exception):
    """Ends a step of an optimizer that was evaluating the model."""


def nonfinite_error(step: int, *, loss: float, norm: float, no_target: bool = False) -> NonFiniteError:
    """The error that ends a run under the policy `stop`; `no_target` where the loss was a mean over no label."""
    if no_target:
        return NonFiniteError(
            f"step {step}: the loss is {loss:g}, since all labels of a batch are -100 and the model's own mean over no "
            "target is NaN; the weights are those of the step before. Leave such batches out of the data, return a "
            "loss of 0 for them, or set data.loss_normalization: tokens, which gives them no weight",
            step=step,
        )
    return NonFiniteError(
        f"step {step}: the loss is {loss:g} and the gradient norm {norm:g}; the weights are those of the step before. "
        "Lower the learning rate, set optimizer.grad_clip, or look at the data; run.on_nonfinite: skip leaves such "
        "updates out",
        step=step,
    )


def running_statistics(model: nn.Module) -> list[tuple[str, nn.Module, str]]:
    """The buffers that a checkpoint holds and a forward pass may write: averages and counts.

    Each as its full name, its owner, and its name there. A tensor of many integers is left out: those are quantised
    weights, which no forward pass writes.
    """
    saved = model.state_dict()
    return [
        (full_name, module, name)
        for path, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if (full_name := f"{path}.{name}".removeprefix(".")) in saved
        and buffer is not None
        and (buffer.is_floating_point() or buffer.ndim == 0)
    ]
