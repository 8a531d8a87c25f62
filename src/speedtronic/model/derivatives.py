"""When our own autograd functions may stand for torch's operations."""

from __future__ import annotations

import torch
from torch.autograd import forward_ad


def only_backward_differentiates() -> bool:
    """Whether the derivatives of what is computed now are taken by autograd's backward pass, if at all.

    That is what our autograd functions are written for, at any order. A compiler knows a better way itself. Forward
    mode and the transforms of `torch.func` nest in ways in which an autograd function loses terms without an error.
    """
    return not (
        torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
    )
