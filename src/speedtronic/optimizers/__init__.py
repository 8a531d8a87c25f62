"""Optimizers and learning-rate schedules, and the factories that build them from a configuration."""

from speedtronic.optimizers.cautious import CautiousOptimizer
from speedtronic.optimizers.factory import build_adamw, build_hybrid, parameter_groups
from speedtronic.optimizers.hybrid import HybridOptimizer
from speedtronic.optimizers.muon import Muon, post_polar_normalize
from speedtronic.optimizers.newton_schulz import newton_schulz, orthogonalize
from speedtronic.optimizers.routing import ParameterRouting, route_parameters
from speedtronic.optimizers.schedules import Schedule, learning_rate_schedule

__all__ = [
    "CautiousOptimizer",
    "HybridOptimizer",
    "Muon",
    "ParameterRouting",
    "Schedule",
    "build_adamw",
    "build_hybrid",
    "learning_rate_schedule",
    "newton_schulz",
    "orthogonalize",
    "parameter_groups",
    "post_polar_normalize",
    "route_parameters",
]
