"""The events of a run, and the sinks that write them: console, text file, JSON lines, progress line; and hooks.

Importing this loads neither torch nor rich.
"""

from __future__ import annotations

from speedtronic.metrics.logger import MetricLogger
from speedtronic.metrics.records import Hook, Record, Sink, TrainingHook

__all__ = ["Hook", "MetricLogger", "Record", "Sink", "TrainingHook"]
