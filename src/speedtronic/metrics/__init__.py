"""Events of a run, and where they go: console, text file, JSON lines, a live progress line, hooks.

Importing this loads neither torch nor rich.
"""

from __future__ import annotations

from speedtronic.metrics.logger import MetricLogger
from speedtronic.metrics.records import Hook, Record, Sink, TrainingHook

__all__ = ["Hook", "MetricLogger", "Record", "Sink", "TrainingHook"]
