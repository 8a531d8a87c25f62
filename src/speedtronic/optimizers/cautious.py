"""Cautious optimizers (Liang et al., arXiv 2411.16085): they leave out the entries of an update that go uphill."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor


def agreeing(update: Tensor, gradient: Tensor, *, rescale: bool = False) -> Tensor:
    """Keep the entries of one weight's update that go down its gradient (arXiv 2411.16085, algorithm 1).

    Args:
        update: the change of the weight, of any shape. It is not changed.
        gradient: of the same shape.
        rescale: multiply the kept entries by entries / (kept + 1), the paper's alpha, so that the step does not shrink.

    Returns:
        A tensor of the shape and dtype of `update`. It is 0 where update · gradient >= 0, and so where either is 0. A
        NaN in `update` stays NaN.
    """
    # Take the sign first: the product of two small numbers can become zero, that of a sign and a number cannot.
    downhill = torch.sign(gradient).neg_() * update
    kept = where_positive(update, downhill).to(update.dtype)
    return kept * rescale_factor(torch.count_nonzero(kept), kept) if rescale else kept


def where_positive(values: Tensor, condition: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return `values` where `condition` is positive or NaN, and 0 elsewhere.

    The derivative of a threshold does exactly this, in one vectorised pass on every device. A comparison and a fill
    would need a mask of bools, which takes a CPU eight times as long.
    """
    derivative = torch.ops.aten.threshold_backward
    if out is None:
        return cast(Tensor, derivative(values, condition, 0.0))
    return cast(Tensor, derivative.grad_input(values, condition, 0.0, grad_input=out))


def rescale_factor(kept: Tensor, weight: Tensor) -> Tensor:
    """Return entries / (kept + 1) for a weight with `kept` moving entries: 0-dim, fp32, or fp64 for fp64 weights."""
    return weight.numel() / (kept + 1).to(torch.promote_types(weight.dtype, torch.float32))


class CautiousOptimizer(torch.optim.Optimizer):
    """Make any optimizer cautious: after its step, keep only the entries of the change that go down the gradient.

    If the base maximises, keep those that go up. The gradient is the one from the start of the step.

    During the step this holds a copy of every parameter that has a gradient, and of the gradients too if the step has a
    closure; it also takes some passes over all of them. `CautiousAdamW`, and the option `cautious` of `Muon` and
    `HybridOptimizer`, need no copy.

    Decoupled weight decay is not masked: the base steps with its `weight_decay` at 0, and this class multiplies the
    weight by 1 - lr · decay. This holds for Speedtronic's optimizers, for torch's AdamW and Muon, and for NAdam and
    RAdam with `decoupled_weight_decay`. For any other base, the mask covers the whole change. That is right if decay is
    part of the direction, as in SGD. If a base has a decoupled decay that its groups do not declare, the mask covers
    that decay too.

    `param_groups`, `state` and `defaults` are the base's own objects, and `state_dict` is the base's. The base's hooks
    run too. To skip a step whose gradients overflowed, gradient scalers and the trainer read one number back from the
    device for each step, even if the base could do without.

    Args:
        base: makes the step. Do not step it yourself any more.
        rescale: scale the kept entries of each parameter's change by entries / (kept + 1).
    """

    def __init__(self, base: torch.optim.Optimizer, *, rescale: bool = False) -> None:
        # `Optimizer.__init__` would make its own groups and state. `__setstate__`, meant for copies, makes hooks only.
        super().__setstate__({"base": base, "rescale": rescale})

    base: torch.optim.Optimizer
    rescale: bool

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]  # torch declares an attribute
        """The param groups of the base."""
        return self.base.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]  # torch declares an attribute
        """The state of the base."""
        return self.base.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]  # torch declares an attribute
        """The default options of the base."""
        return self.base.defaults

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Let the base step, and take back the entries that went up the gradient.

        Args:
            closure: evaluates the model again. It is called as often as the base calls it: once, except for LBFGS.

        Returns:
            The result of the base's `step`.

        Raises:
            TypeError: a parameter is complex.
            RuntimeError: a gradient is sparse. After any of these errors, nothing has changed.
        """
        if closure is not None:
            closure = _evaluated(closure)
        moving = [(p, group) for group in self.param_groups for p in group["params"] if p.grad is not None]
        for parameter, _ in moving:
            refuse_complex(parameter)
            refuse_sparse(parameter)
        before = [parameter.clone() for parameter, _ in moving]
        # A base that calls the closure again overwrites the gradients, so keep those of the start.
        slopes = [parameter.grad if closure is None else parameter.grad.clone() for parameter, _ in moving]
        with self._without_decoupled_decay():
            loss = self.base.step() if closure is None else self.base.step(closure)
        for (parameter, group), old, slope in zip(moving, before, slopes, strict=True):
            change = parameter - old
            kept = agreeing(change, -slope if group.get("maximize") else slope, rescale=self.rescale)
            decay = group["lr"] * group["weight_decay"] if _is_decoupled(group) else 0.0
            parameter.copy_(old.mul_(1 - decay).add_(kept))
        return loss

    @contextmanager
    def _without_decoupled_decay(self) -> Iterator[None]:
        """Keep the base from decaying weights in the groups with decoupled decay."""
        groups = [group for group in self.param_groups if _is_decoupled(group)]
        decays = [group["weight_decay"] for group in groups]
        for group in groups:
            group["weight_decay"] = 0.0
        try:
            yield
        finally:
            for group, decay in zip(groups, decays, strict=True):
                group["weight_decay"] = decay

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, as the base does."""
        self.base.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group to the base."""
        self.base.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return the base's state, with the keys `state` and `param_groups`. The base can load it too."""
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        state_dict = self.base.state_dict()
        for after in self._optimizer_state_dict_post_hooks.values():
            replaced = after(self, state_dict)
            state_dict = state_dict if replaced is None else replaced
        return state_dict

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a result of `state_dict`, of this optimizer or of the base.

        Raises:
            ValueError: the state does not fit the base.
        """
        state_dict = state_dict.copy()
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            replaced = before(self, state_dict)
            state_dict = state_dict if replaced is None else replaced
        self.base.load_state_dict(state_dict)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def __getstate__(self) -> dict[str, Any]:
        return {"base": self.base, "rescale": self.rescale}


def refuse_complex(parameter: Tensor) -> None:
    """Raise TypeError, naming the shape, if a parameter is complex."""
    if parameter.is_complex():
        raise TypeError(
            f"a parameter of shape {tuple(parameter.shape)} is complex, and a cautious update needs the signs of real "
            "numbers: make the parameter real (torch.view_as_real)"
        )


def refuse_sparse(parameter: Tensor) -> None:
    """Raise RuntimeError, naming the shape, if the gradient of a parameter is sparse."""
    if parameter.grad is not None and parameter.grad.layout is not torch.strided:
        raise RuntimeError(
            f"the gradient of a parameter of shape {tuple(parameter.shape)} is sparse, and the optimizer needs a dense "
            "one: build its nn.Embedding with sparse=False"
        )


def _evaluated(closure: Callable[[], Any]) -> Callable[[], Any]:
    """Call `closure` now, so that there are gradients. The first call of the returned closure gives the same result."""
    with torch.enable_grad():
        results = [closure()]
    return lambda: results.pop() if results else closure()


def _is_decoupled(group: dict[str, Any]) -> bool:
    """Torch's Adam family says so in the group. Muon's decay is always decoupled, and only Muon has `ns_steps`."""
    return bool(group.get("decoupled_weight_decay", "ns_steps" in group))
