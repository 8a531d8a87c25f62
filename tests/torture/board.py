"""What a process wrote into memory that outlives it: where it was when it was killed, and which faults it met."""

from __future__ import annotations

import mmap
import threading
from enum import IntEnum


class Phase(IntEnum):
    """What a training process is doing, as far as its checkpoints are concerned."""

    IDLE = 0
    START = 1
    LOAD = 2
    TRAINING = 3
    SNAPSHOT = 4
    WRITE = 5
    RENAME = 6
    POINTER = 7
    PRUNE = 8
    CLEANUP = 9
    END = 10


MEANINGS = {
    Phase.START: "importing, building, taking the lock",
    Phase.LOAD: "reading a checkpoint, restoring from it",
    Phase.TRAINING: "forward, backward, optimizer, logging",
    Phase.SNAPSHOT: "copying the state",
    Phase.WRITE: "writing and flushing the files",
    Phase.RENAME: "giving the folder its name",
    Phase.POINTER: "replacing latest.json",
    Phase.PRUNE: "removing old checkpoints",
    Phase.CLEANUP: "removing what a killed process left",
    Phase.END: "leaving",
}


class Fault(IntEnum):
    """What the file layer was made to do."""

    ENOSPC = 0
    EIO = 1
    SHORT_WRITE = 2
    SLOW_FSYNC = 3


class Board:
    """Shared between a process and the children it forks; a kill does not undo what was written.

    Two threads of a child leave their mark: the one that trains, and the one that writes checkpoints.
    """

    def __init__(self) -> None:
        self._cells = memoryview(mmap.mmap(-1, mmap.PAGESIZE)).cast("I")

    def clear(self) -> None:
        for cell in range(2 + len(Fault)):
            self._cells[cell] = 0

    def enter(self, phase: Phase) -> None:
        """Note what this thread does from now on."""
        self._cells[0 if threading.current_thread() is threading.main_thread() else 1] = phase

    def writer_is_idle(self) -> None:
        self._cells[1] = Phase.IDLE

    def count(self, fault: Fault) -> None:
        self._cells[2 + fault] += 1

    @property
    def phase(self) -> Phase:
        """What was being done last: by the writer, if it was at work, else by the thread that trains."""
        return Phase(self._cells[1] or self._cells[0])

    @property
    def faults(self) -> dict[Fault, int]:
        return {fault: self._cells[2 + fault] for fault in Fault}
