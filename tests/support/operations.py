"""Counts the operations that a card would be asked for, and what the host reads of it, on a machine without one."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from speedtronic.optimizers import adamw, muon
from speedtronic.trainer import ema

# They take memory or look at it, and compute nothing.
_NO_WORK = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "promote_types", "detach"}
# What `item`, `bool`, `tolist` on a card and their like come to.
_READS = {"_local_scalar_dense", "is_nonzero", "nonzero", "masked_select", "equal"}


class Operations(TorchDispatchMode):
    """Counts what is dispatched while it is entered. A `_foreach_` operation is one, as on a card it is a few launches.

    Attributes:
        counts: by name, without views and what only takes memory.
        reads: by name, those for which the host waits until a card has come so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.reads: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2]
        if name in _READS:
            self.reads[name] += 1
        elif func.namespace == "aten" and not func.is_view and name not in _NO_WORK:
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))

    @property
    def total(self) -> int:
        return self.counts.total()


def act_as_on_a_card(patch: pytest.MonkeyPatch) -> None:
    """Let the CPU's tensors be treated as those of a card: sizes of pieces, and verdicts that the host cannot see."""
    patch.setattr(adamw, "CPU_PIECE", adamw.ACCELERATOR_PIECE)
    patch.setattr(muon, "_STACK_ELEMENTS", {})
    for module in (muon, ema):
        patch.setattr(module, "_is_on_host", lambda tensor: False)
