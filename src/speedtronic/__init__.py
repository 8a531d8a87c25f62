"""Speedtronic: a PyTorch training runtime.

Importing it loads neither torch nor any of its own parts: a name is fetched from its module when first used.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

__version__ = "3.0.0.dev0"

# For type checkers and editors; `_EXPORTS` says the same to the interpreter.
if TYPE_CHECKING:
    from speedtronic import runs as runs
    from speedtronic.config import CheckpointConfig as CheckpointConfig
    from speedtronic.config import Config as Config
    from speedtronic.config import ConfigError as ConfigError
    from speedtronic.config import DataConfig as DataConfig
    from speedtronic.config import DistributedConfig as DistributedConfig
    from speedtronic.config import LoggingConfig as LoggingConfig
    from speedtronic.config import ModelConfig as ModelConfig
    from speedtronic.config import OptimizerConfig as OptimizerConfig
    from speedtronic.config import PrecisionConfig as PrecisionConfig
    from speedtronic.config import RunConfig as RunConfig
    from speedtronic.config import SchedulerConfig as SchedulerConfig
    from speedtronic.config import ShapeValidationConfig as ShapeValidationConfig
    from speedtronic.config import SpeedtronicConfig as SpeedtronicConfig
    from speedtronic.config import load_config as load_config
    from speedtronic.config import load_yaml_config as load_yaml_config
    from speedtronic.distributed import DumbDiLoCo as DumbDiLoCo
    from speedtronic.distributed import DumbDiLoCoCoordinator as DumbDiLoCoCoordinator
    from speedtronic.model import GPT as GPT
    from speedtronic.model import GPTConfig as GPTConfig
    from speedtronic.model import ReferenceTransformer as ReferenceTransformer
    from speedtronic.model import set_gradient_checkpointing as set_gradient_checkpointing
    from speedtronic.optimizers import CautiousOptimizer as CautiousOptimizer
    from speedtronic.optimizers import HybridOptimizer as HybridOptimizer
    from speedtronic.optimizers import Muon as Muon
    from speedtronic.optimizers import ParameterRouting as ParameterRouting
    from speedtronic.optimizers import newton_schulz as newton_schulz
    from speedtronic.optimizers import post_polar_normalize as post_polar_normalize
    from speedtronic.optimizers import route_parameters as route_parameters
    from speedtronic.registry import ModelRegistry as ModelRegistry
    from speedtronic.registry import build_model as build_model
    from speedtronic.registry import register_model as register_model
    from speedtronic.registry import registry as registry
    from speedtronic.runtime import build_runtime as build_runtime
    from speedtronic.runtime import seed_everything as seed_everything
    from speedtronic.runtime import train_from_config as train_from_config
    from speedtronic.scheduling import StageInfo as StageInfo
    from speedtronic.scheduling import StageStreamScheduler as StageStreamScheduler
    from speedtronic.shapes import ShapeProfile as ShapeProfile
    from speedtronic.shapes import ShapeReport as ShapeReport
    from speedtronic.shapes import ShapeWarning as ShapeWarning
    from speedtronic.shapes import resolve_shape_profile as resolve_shape_profile
    from speedtronic.shapes import validate_startup_shapes as validate_startup_shapes
    from speedtronic.trainer import SpeedtronicTrainer as SpeedtronicTrainer
    from speedtronic.trainer import SyncCoordinator as SyncCoordinator
    from speedtronic.trainer import Trainer as Trainer
    from speedtronic.trainer import TrainingEngine as TrainingEngine
    from speedtronic.trainer import TrainResult as TrainResult

_EXPORTS = {
    "config": (
        "CheckpointConfig",
        "Config",
        "ConfigError",
        "DataConfig",
        "DistributedConfig",
        "LoggingConfig",
        "ModelConfig",
        "OptimizerConfig",
        "PrecisionConfig",
        "RunConfig",
        "SchedulerConfig",
        "ShapeValidationConfig",
        "SpeedtronicConfig",
        "load_config",
        "load_yaml_config",
    ),
    "distributed": ("DumbDiLoCo", "DumbDiLoCoCoordinator"),
    "model": ("GPT", "GPTConfig", "ReferenceTransformer", "set_gradient_checkpointing"),
    "optimizers": (
        "CautiousOptimizer",
        "HybridOptimizer",
        "Muon",
        "ParameterRouting",
        "newton_schulz",
        "post_polar_normalize",
        "route_parameters",
    ),
    "registry": ("ModelRegistry", "build_model", "register_model", "registry"),
    "runtime": ("build_runtime", "seed_everything", "train_from_config"),
    "scheduling": ("StageInfo", "StageStreamScheduler"),
    "shapes": ("ShapeProfile", "ShapeReport", "ShapeWarning", "resolve_shape_profile", "validate_startup_shapes"),
    "trainer": ("SpeedtronicTrainer", "SyncCoordinator", "Trainer", "TrainResult", "TrainingEngine"),
}
_MODULE_OF = {name: f"speedtronic.{module}" for module, names in _EXPORTS.items() for name in names}

_MODULES = frozenset({"runs"})  # that `import speedtronic` alone makes usable, when they are first used

__all__ = ["__version__", *_MODULE_OF]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"speedtronic.{name}")
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'speedtronic' has no attribute {name!r}")
    return getattr(import_module(_MODULE_OF[name]), name)


class _Package(ModuleType):
    """Keeps `speedtronic.registry` the registry object, where importing the module of that name would replace it."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "registry" and isinstance(value, ModuleType):
            value = value.registry
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULE_OF])
