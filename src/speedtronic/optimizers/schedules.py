"""Learning-rate schedules: pure functions from an optimizer step to a factor of the base learning rate.

Every schedule warms up in the same way: `max(1e-8, (step + 1) / warmup_steps)` while `step < warmup_steps`. After that,
with progress p = clip((step - warmup) / max(1, max_steps - warmup), 0, 1) and r = `min_lr_ratio`:

    constant  1
    cosine    r + (1 - r) · ½ · (1 + cos πp)          (Loshchilov & Hutter, arXiv 1608.03983, one cycle)
    linear    r + (1 - r) · (1 - p)
    wsd       1 until the last `decay_steps`, then linear down to r   (warmup-stable-decay, arXiv 2404.06395)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from speedtronic.config import SchedulerConfig
from speedtronic.errors import ConfigError
from speedtronic.registry import call_factory

Schedule = Callable[[int], float]

# Without `decay_steps`, a `wsd` schedule decays over the last fifth of the run.
DEFAULT_DECAY_FRACTION = 0.2


def learning_rate_schedule(config: SchedulerConfig) -> Schedule:
    """Return the factor of the base learning rate as a function of the 0-based optimizer step.

    A function that `config.name` names as `package.module:function` is called with the section and its `args`, and
    returns the curve after the warmup.

    Raises:
        ConfigError: the decay of `wsd` would begin before its warmup has ended, or there is no such function, or it
            returns no function.
    """
    if (problem := config.check_decay()) is not None:
        raise ConfigError(f"scheduler.decay_steps: {problem}")
    after_warmup = partial(_AFTER_WARMUP[config.name], config) if config.name in _AFTER_WARMUP else _own_curve(config)

    def factor(step: int) -> float:
        if step < config.warmup_steps:
            return max(1e-8, (step + 1) / config.warmup_steps)
        return after_warmup(step)

    return factor


def _own_curve(config: SchedulerConfig) -> Schedule:
    curve: Any = call_factory(config.name, config, key="scheduler.name", args=config.args)
    if not callable(curve):
        raise ConfigError(
            f"scheduler.name: {config.name} returned {type(curve).__name__}, not a function from the number of updates "
            "to a share of the peak learning rate"
        )
    return curve  # type: ignore[no-any-return]  # what it returns is the user's


def _constant(config: SchedulerConfig, step: int) -> float:
    return 1.0


def _cosine(config: SchedulerConfig, step: int) -> float:
    floor = config.min_lr_ratio
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * _progress(config, step)))


def _linear(config: SchedulerConfig, step: int) -> float:
    floor = config.min_lr_ratio
    return floor + (1 - floor) * (1 - _progress(config, step))


def wsd_decay_steps(config: SchedulerConfig) -> int:
    """The number of updates at the end of a `wsd` schedule in which it decays."""
    horizon = _horizon(config)
    last_part = min(round(DEFAULT_DECAY_FRACTION * horizon), horizon - config.warmup_steps)
    return config.decay_steps or max(1, last_part)


def _wsd(config: SchedulerConfig, step: int) -> float:
    floor = config.min_lr_ratio
    remaining = min(1.0, max(0.0, (_horizon(config) - step) / wsd_decay_steps(config)))
    return floor + (1 - floor) * remaining


_AFTER_WARMUP: dict[str, Callable[[SchedulerConfig, int], float]] = {
    "constant": _constant,
    "cosine": _cosine,
    "linear": _linear,
    "wsd": _wsd,
}


def _progress(config: SchedulerConfig, step: int) -> float:
    """The share of the run after warmup that is over, in [0, 1]."""
    span = max(1, _horizon(config) - config.warmup_steps)
    return min(1.0, max(0.0, (step - config.warmup_steps) / span))


def _horizon(config: SchedulerConfig) -> int:
    assert config.max_steps is not None, "resolved when the configuration was loaded"
    return config.max_steps
