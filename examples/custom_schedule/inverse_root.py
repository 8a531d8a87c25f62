"""Your own schedule: the learning rate falls with the square root of the step (Vaswani et al., arXiv 1706.03762).

`custom_schedule.yaml` names the function. It is called with the `scheduler` section and `scheduler.args`, and returns a
function from the number of updates so far to a share of `optimizer.lr`. The warmup is not its affair.
"""

from collections.abc import Callable

from speedtronic import SchedulerConfig


def inverse_square_root(config: SchedulerConfig, *, offset: int = 0) -> Callable[[int], float]:
    start = config.warmup_steps + offset + 1
    return lambda step: (start / (step + offset + 1)) ** 0.5
