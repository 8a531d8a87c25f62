"""Ctrl-C, SIGTERM and SIGHUP as a request to finish the step, instead of an end in the middle of one."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

from speedtronic.ranks import Group

# A terminal that is closed, or a connection to one that is lost, is a SIGHUP. Windows has no such signal.
_HANGUP = None if sys.platform == "win32" else signal.SIGHUP
WATCHED = tuple(number for number in (signal.SIGINT, signal.SIGTERM, _HANGUP) if number is not None)


class SignalWatch:
    """Context manager that keeps the first SIGINT, SIGTERM or SIGHUP in `noted`. A second one ends the process.

    A SIGHUP does not count for that: when a terminal is closed, the shell and the kernel both send it, and a service
    manager sends it together with SIGTERM.

    Only the main thread of a process may install handlers. In other threads `noted` stays None.

    Attributes:
        noted: the signal to this process.
        agreed: with other ranks, the signal that all of them know of, and act on.
    """

    def __init__(self, group: Group | None = None) -> None:
        self.noted: signal.Signals | None = None
        self.agreed: signal.Signals | None = None
        self._alone = group is None or group.size == 1
        self._is_asked = False
        self._previous: dict[signal.Signals, Any] = {}

    @property
    def received(self) -> signal.Signals | None:
        """The signal to act on; None if there was none."""
        return self.noted if self._alone else self.agreed

    def __enter__(self) -> SignalWatch:
        if threading.current_thread() is threading.main_thread():
            handler: Callable[[int, FrameType | None], None] = self._note
            # A signal that the process ignores, as background jobs of a shell and `nohup` do, stays ignored.
            watched = [number for number in WATCHED if signal.getsignal(number) is not signal.SIG_IGN]
            self._previous = {number: signal.signal(number, handler) for number in watched}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, handler in self._previous.items():
            # None is a handler that was not installed from Python, and Python cannot install it again.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number != _HANGUP:
            if self._is_asked:
                self._end(number)
            self._is_asked = True
        self.noted = self.noted or signal.Signals(number)

    def _end(self, number: int) -> None:
        if sys.stdout is not None and sys.stdout.isatty():
            # A live progress line has hidden the cursor, and nothing else will show it again.
            os.write(sys.stdout.fileno(), b"\x1b[?25h\n")
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
