"""Checkpoints that are durable, verified and run no code when loaded; random states; the lock of a folder."""

from __future__ import annotations

from speedtronic.checkpoint.entries import CheckpointEntry
from speedtronic.checkpoint.manager import CheckpointManager
from speedtronic.checkpoint.rng import capture_rng_state, restore_rng_state
from speedtronic.checkpoint.tree import check
from speedtronic.durable.lock import RunLock
from speedtronic.errors import CheckpointError

__all__ = [
    "CheckpointEntry",
    "CheckpointError",
    "CheckpointManager",
    "RunLock",
    "capture_rng_state",
    "check",
    "restore_rng_state",
]
