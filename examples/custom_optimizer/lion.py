"""Your own optimizer: Lion (Chen et al., arXiv 2302.06675), which moves every entry of a weight by the same amount.

`custom_optimizer.yaml` names the class. It is called with the parameter groups, `optimizer.lr` and `optimizer.args`.
The groups know which weights decay, and have the options of `optimizer.groups`.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch


class Lion(torch.optim.Optimizer):
    def __init__(
        self, params: Iterable[Any], lr: float, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            fast, slow = group["betas"]
            for weight in group["params"]:
                if weight.grad is None:  # frozen, or not a part of this loss
                    continue
                state = self.state[weight]
                average = state.setdefault("exp_avg", torch.zeros_like(weight))
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                weight.sub_(average.lerp(weight.grad, 1 - fast).sign_(), alpha=group["lr"])
                average.lerp_(weight.grad, 1 - slow)
        return loss
