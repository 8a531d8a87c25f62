"""`tune`: the fastest way to run on this machine, found by measuring real steps on a copy of the state."""

from speedtronic.tuning.plan import Choices, Measured, Plan
from speedtronic.tuning.tune import Workbench, measure_plan, plan_of_run

__all__ = ["Choices", "Measured", "Plan", "Workbench", "measure_plan", "plan_of_run"]
