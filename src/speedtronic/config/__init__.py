"""The configuration of a run: data only. Importing it loads no torch."""

from __future__ import annotations

from speedtronic.config.root import SpeedtronicConfig, changed_keys, load_config, load_yaml_config
from speedtronic.config.sections import (
    CheckpointConfig,
    CompileOptions,
    DataConfig,
    DistributedConfig,
    EvalConfig,
    LoggingConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    PrecisionConfig,
    RunConfig,
    SchedulerConfig,
    ShapeValidationConfig,
)
from speedtronic.errors import ConfigError

Config = SpeedtronicConfig

__all__ = [
    "CheckpointConfig",
    "CompileOptions",
    "Config",
    "ConfigError",
    "DataConfig",
    "DistributedConfig",
    "EvalConfig",
    "LoggingConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "PrecisionConfig",
    "RunConfig",
    "SchedulerConfig",
    "ShapeValidationConfig",
    "SpeedtronicConfig",
    "changed_keys",
    "load_config",
    "load_yaml_config",
]
