"""Cautious optimizers (Liang et al., arXiv 2411.16085): entries of an update that go up the gradient are left out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor


def agreeing(update: Tensor, gradient: Tensor, *, rescale: bool = False) -> Tensor:
    """Keep the entries of one weight's update that go down its gradient (arXiv 2411.16085, algorithm 1).

    Args:
        update: what would be added to the weight, of any shape. It is not changed.
        gradient: of the same shape.
        rescale: multiply what is kept by entries / (kept + 1), the paper's alpha, so that the step does not shrink.

    Returns:
        Shape and dtype of `update`; 0 where update · gradient >= 0, so where either is 0. An entry of the update that
        is not a number stays so.
    """
    # The sign alone: the product of two small numbers can vanish, that of a sign and a number cannot.
    downhill = torch.sign(gradient).neg_() * update
    kept = where_positive(update, downhill).to(update.dtype)
    return kept * rescaling(torch.count_nonzero(kept), kept) if rescale else kept


def where_positive(values: Tensor, condition: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return `values` where `condition` is positive or not a number, and 0 elsewhere.

    The derivative of a threshold is just that, in one vectorised pass on every device. A comparison and a fill go
    through a mask of bools, which takes a CPU eight times as long.
    """
    derivative = torch.ops.aten.threshold_backward
    if out is None:
        return cast(Tensor, derivative(values, condition, 0.0))
    return cast(Tensor, derivative.grad_input(values, condition, 0.0, grad_input=out))


def rescaling(kept: Tensor, weight: Tensor) -> Tensor:
    """Return entries / (kept + 1) for a weight of which `kept` entries move: 0-dim, fp32 or, for fp64 weights, fp64."""
    return weight.numel() / (kept + 1).to(torch.promote_types(weight.dtype, torch.float32))


class CautiousOptimizer(torch.optim.Optimizer):
    """Make any optimizer cautious: after its step, keep the entries of the change whose sign opposes the gradient's.

    With a base that maximises, those whose sign is the gradient's. The gradient is that at the start of the step.

    It costs a copy of every parameter that has a gradient, held during the step, one of the gradients too if the step
    has a closure, and some passes over all of them.
    `CautiousAdamW`, and `cautious` of `Muon` and `HybridOptimizer`, do the same without the copy.

    Decoupled weight decay is applied outside the mask: the base steps with its `weight_decay` at 0, and the weight is
    multiplied by 1 - lr · decay here. So it is for Speedtronic's optimizers and for torch's AdamW and Muon, and, with
    `decoupled_weight_decay`, NAdam and RAdam. Any other base's change is masked as a whole. Where decay is part of
    the direction, as in SGD, that is right; a decoupled decay that the base's groups do not tell of is masked too.

    `param_groups`, `state` and `defaults` are the base's own objects, and `state_dict` is the base's. The base's hooks
    run too. To leave out a step whose gradients overflowed, gradient scalers and the trainer read one number back from
    the device for each step, whatever the base can do by itself.

    Args:
        base: makes the step. It must not step by itself any more.
        rescale: scale what is kept of each parameter by entries / (kept + 1).
    """

    def __init__(self, base: torch.optim.Optimizer, *, rescale: bool = False) -> None:
        # Optimizer.__init__ would make groups and a state of its own. What it does for a copy makes only the hooks.
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
        """Let the base step, and take back what went up the gradient.

        Args:
            closure: evaluates the model anew. The base calls it as often as it does by itself: once, except for LBFGS.

        Returns:
            What the base's `step` returns.

        Raises:
            TypeError: a parameter is complex.
            RuntimeError: a gradient is sparse. Nothing has changed then, as after the other.
        """
        if closure is not None:
            closure = _evaluated(closure)
        moving = [(p, group) for group in self.param_groups for p in group["params"] if p.grad is not None]
        for parameter, _ in moving:
            refuse_complex(parameter)
            refuse_sparse(parameter)
        before = [parameter.clone() for parameter, _ in moving]
        # A base that calls the closure again leaves the gradients of where it came to.
        slopes = [parameter.grad if closure is None else parameter.grad.clone() for parameter, _ in moving]
        with self._undecayed():
            loss = self.base.step() if closure is None else self.base.step(closure)
        for (parameter, group), old, slope in zip(moving, before, slopes, strict=True):
            change = parameter - old
            kept = agreeing(change, -slope if group.get("maximize") else slope, rescale=self.rescale)
            parameter.copy_(old.mul_(1 - _decoupled_decay(group)).add_(kept))
        return loss

    @contextmanager
    def _undecayed(self) -> Iterator[None]:
        """Keep the base from decaying weights in the groups where decay is decoupled."""
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
        """Return the base's state, which the base by itself can load too: the keys `state` and `param_groups`."""
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        state_dict = self.base.state_dict()
        for after in self._optimizer_state_dict_post_hooks.values():
            state_dict = _replaced(state_dict, after(self, state_dict))
        return state_dict

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned, here or of the base.

        Raises:
            ValueError: it does not fit the base.
        """
        state_dict = state_dict.copy()
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = _replaced(state_dict, before(self, state_dict))
        self.base.load_state_dict(state_dict)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def __getstate__(self) -> dict[str, Any]:
        return {"base": self.base, "rescale": self.rescale}


def refuse_complex(parameter: Tensor) -> None:
    """Raise TypeError, naming the shape, if a parameter is complex."""
    if parameter.is_complex():
        raise TypeError(
            f"a parameter of shape {tuple(parameter.shape)} is complex, and a cautious update goes by the sign of real "
            "numbers: make the parameter real (torch.view_as_real)"
        )


def refuse_sparse(parameter: Tensor) -> None:
    """Raise RuntimeError, naming the shape, if the gradient of a parameter is sparse."""
    if parameter.grad is not None and parameter.grad.layout is not torch.strided:
        raise RuntimeError(
            f"the gradient of a parameter of shape {tuple(parameter.shape)} is sparse, and the optimizer needs a dense "
            "one: build its nn.Embedding with sparse=False"
        )


def _replaced(state_dict: dict[str, Any], by_hook: dict[str, Any] | None) -> dict[str, Any]:
    return state_dict if by_hook is None else by_hook


def _evaluated(closure: Callable[[], Any]) -> Callable[[], Any]:
    """Call `closure` now, so that the gradients are known, and return one that gives its answer to the first caller."""
    with torch.enable_grad():
        answers = [closure()]
    return lambda: answers.pop() if answers else closure()


def _is_decoupled(group: dict[str, Any]) -> bool:
    """Torch's Adam family says so in the group. Muon's decay always is, and only Muon has Newton–Schulz steps."""
    return bool(group.get("decoupled_weight_decay", "ns_steps" in group))


def _decoupled_decay(group: dict[str, Any]) -> Any:
    return group["lr"] * group["weight_decay"] if _is_decoupled(group) else 0.0
