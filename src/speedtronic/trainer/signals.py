"""Ctrl-C and SIGTERM as a request to finish the step, instead of a traceback in the middle of one."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

WATCHED = (signal.SIGINT, signal.SIGTERM)


class SignalWatch:
    """Context manager: while it is open, the first SIGINT or SIGTERM is noted in `received`, the second one kills.

    Only the main thread of a process may install handlers; elsewhere nothing is watched and `received` stays None.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> SignalWatch:
        if threading.current_thread() is threading.main_thread():
            handler: Callable[[int, FrameType | None], None] = self._note
            # What the process was told to ignore, as a shell tells its background jobs, stays ignored.
            heard = [number for number in WATCHED if signal.getsignal(number) is not signal.SIG_IGN]
            self._previous = {number: signal.signal(number, handler) for number in heard}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, handler in self._previous.items():
            # A handler that was not installed from Python cannot be put back by it; the default is the nearest.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            _show_cursor()
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.received = signal.Signals(number)


def _show_cursor() -> None:
    """Undo what a live progress line did to the terminal, which will have no other occasion."""
    if sys.stdout is not None and sys.stdout.isatty():
        os.write(sys.stdout.fileno(), b"\x1b[?25h\n")
