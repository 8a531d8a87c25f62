"""torch's optimizer methods, without the wrappers that import `torch._dynamo`.

torch wraps some methods of its optimizers for programs that compile an optimizer. The first call of such a method
imports `torch._dynamo`, and with it sympy and more. That takes as long as `import torch` itself, at the start of every
run. A run compiles its model, and `CautiousAdamW` one formula, but never these methods. So this module unwraps them.
"""

from __future__ import annotations

from inspect import unwrap

import torch


class WithoutDynamo(torch.optim.Optimizer):
    """The base of this package's optimizers. It comes before a class of torch: `class A(WithoutDynamo, AdamW)`."""

    add_param_group = unwrap(torch.optim.Optimizer.add_param_group)
    load_state_dict = unwrap(torch.optim.Optimizer.load_state_dict)
    state_dict = unwrap(torch.optim.Optimizer.state_dict)
    zero_grad = unwrap(torch.optim.Optimizer.zero_grad)


class AdamW(WithoutDynamo, torch.optim.AdamW):
    """`torch.optim.AdamW`: the same steps, bit for bit, and the same state dict."""

    # The wrapper also switches gradients off, except for a differentiable update, which no run asks for.
    step = torch.no_grad()(unwrap(torch.optim.AdamW.step))
