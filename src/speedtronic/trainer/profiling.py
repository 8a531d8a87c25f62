"""Where the time of a step goes: a trace of some steps, and a table of its phases."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from speedtronic.trainer.callbacks import Callback, RunView

Phase = Literal["data", "forward", "backward", "update"]
WARM_UP = 3
"""Steps before the trace: the first ones compile, load kernels and take memory from the system."""

_PREFIX = "step: "
_NOTHING = nullcontext()


def phase(name: Phase) -> AbstractContextManager[object]:
    """A range of this name in the trace of whichever torch profiler is running; without one, nothing."""
    # A range costs some microseconds even if nobody looks; asking costs a tenth of one.
    if torch._C._autograd._profiler_enabled():
        return torch.profiler.record_function(_PREFIX + name)
    return _NOTHING


class StepProfiler(Callback):
    """Traces some steps of a run after its first ones, writes the trace, and logs a table of the phases.

    Args:
        steps: how many; fewer where the run ends before.
        trace: the file for the trace, in the JSON that chrome://tracing and https://ui.perfetto.dev show.
    """

    def __init__(self, steps: int, trace: Path) -> None:
        self._steps = steps
        self._trace = trace
        self._profiler: Any = None
        self._first = 0
        self._started = 0.0
        self._done = False

    def on_train_start(self, run: RunView) -> None:
        self._first = run.step + WARM_UP

    def on_step_end(self, run: RunView) -> None:
        if self._done:
            return
        if self._profiler is None and run.step >= self._first and run.step < run.target:
            self._begin(run)
        elif self._profiler is not None and run.step >= self._first + self._steps:
            self._finish(run)

    def on_train_end(self, run: RunView) -> None:
        if self._profiler is not None:
            self._finish(run)
        elif not self._done:
            run.logger.warning(
                f"nothing was profiled: the trace begins after {WARM_UP} steps, and the run has ended by then; "
                "let it train more of them"
            )

    def _begin(self, run: RunView) -> None:
        self._first = run.step
        # Without a list, the profiler traces everything that this build of torch can.
        self._profiler = torch.profiler.profile()
        self._profiler.start()
        self._started = time.perf_counter()

    def _finish(self, run: RunView) -> None:
        profiler, self._profiler, self._done = self._profiler, None, True
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds = time.perf_counter() - self._started
        profiler.stop()
        steps = run.step - self._first
        times = {event.key.removeprefix(_PREFIX): event for event in profiler.key_averages()}
        host = {name: 1e-6 * times[name].cpu_time_total for name in get_args(Phase) if name in times}
        where = f"written to {self._trace}"
        try:
            self._trace.parent.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(self._trace))
        except (OSError, RuntimeError) as error:  # the latter is how torch says that it cannot open a file
            where = f"not written to {self._trace}: {error}"
        run.logger.info(
            f"profile of the steps {self._first + 1} to {run.step}, trace {where}\n{phase_table(host, seconds, steps)}"
        )


def phase_table(host: Mapping[str, float], seconds: float, steps: int) -> str:
    """A table of the time that each phase takes on the host.

    Args:
        host: seconds of each phase over all steps.
        seconds: what all steps took; what the phases do not explain is the rest.
        steps: how many they were.
    """
    rows = {**host, "the rest": max(0.0, seconds - sum(host.values())), "all": seconds}
    lines = [f"{'phase':10}{'ms a step':>10}{'share':>8}"]
    lines += [f"{name:10}{1e3 * value / steps:10.3f}{value / seconds:8.1%}" for name, value in rows.items()]
    lines.append("Times of the host, with the cost of tracing. A GPU works on while the host goes on: see the trace.")
    return "\n".join(lines)
