"""DumbDiLoCo: nodes that share nothing but a store train one model together.

A name is fetched from its module when it is first used: what looks at a store needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

# For type checkers and editors; `_EXPORTS` says the same to the interpreter.
if TYPE_CHECKING:
    from speedtronic.distributed.coordinator import DumbDiLoCo as DumbDiLoCo
    from speedtronic.distributed.coordinator import DumbDiLoCoCoordinator as DumbDiLoCoCoordinator
    from speedtronic.distributed.outer import MasterOuterLoop as MasterOuterLoop
    from speedtronic.distributed.outer import NesterovOuterOptimizer as NesterovOuterOptimizer
    from speedtronic.distributed.stores import open_store as open_store
    from speedtronic.distributed.tensors import average_deltas as average_deltas
    from speedtronic.distributed.tensors import compute_pseudo_gradient as compute_pseudo_gradient
    from speedtronic.distributed.tensors import cpu_state_dict as cpu_state_dict
    from speedtronic.distributed.tensors import load_safetensors as load_safetensors
    from speedtronic.distributed.tensors import save_safetensors as save_safetensors

_EXPORTS = {
    "coordinator": ("DumbDiLoCo", "DumbDiLoCoCoordinator"),
    "outer": ("MasterOuterLoop", "NesterovOuterOptimizer"),
    "stores": ("open_store",),
    "tensors": (
        "average_deltas",
        "compute_pseudo_gradient",
        "cpu_state_dict",
        "load_safetensors",
        "save_safetensors",
    ),
}
_MODULE_OF = {name: f"speedtronic.distributed.{module}" for module, names in _EXPORTS.items() for name in names}

__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'speedtronic.distributed' has no attribute {name!r}")
    return getattr(import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULE_OF])
