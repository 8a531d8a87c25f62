"""Optimizers and learning-rate schedules, and the factories that build them from a configuration."""

from speedtronic.optimizers.factory import build_adamw, parameter_groups
from speedtronic.optimizers.schedules import Schedule, learning_rate_schedule

__all__ = ["Schedule", "build_adamw", "learning_rate_schedule", "parameter_groups"]
