"""The events of a run, and what gets them: console, text file, JSON lines, progress line, trackers, hooks.

Importing this loads neither torch nor rich nor a tracker's package.
"""

from __future__ import annotations

from speedtronic.metrics.logger import MetricLogger
from speedtronic.metrics.records import Hook, Record, Sink, TrainingHook
from speedtronic.metrics.tensorboard import TensorboardHook
from speedtronic.metrics.wandb import WandbHook

__all__ = ["Hook", "MetricLogger", "Record", "Sink", "TensorboardHook", "TrainingHook", "WandbHook"]
