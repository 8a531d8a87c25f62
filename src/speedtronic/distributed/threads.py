"""The threads of DumbDiLoCo. What they run is written without them; here is only when it runs and how it ends."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Lane:
    """A thread that does one kind of work again and again: when it is woken, and at the latest after an interval.

    A lane runs once. It is a daemon thread, so that a request which hangs keeps no process from ending.

    Args:
        name: the thread's.
        work: done at once when the lane starts; true asks to be called again without a pause.
        interval: seconds between the end of one call and the next.
        failed: told of what `work` raised; the lane goes on after the interval.
        stopping: set by `stop`. Lanes that share one end together; what waits within `work` should wait on it.
    """

    def __init__(
        self,
        name: str,
        work: Callable[[], bool],
        *,
        interval: float,
        failed: Callable[[Exception], None],
        stopping: threading.Event | None = None,
    ) -> None:
        self.stopping = stopping if stopping is not None else threading.Event()
        self._work = work
        self._interval = interval
        self._failed = failed
        self._woken = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        """Let the work be done soon, also when it is being done right now."""
        self._woken.set()

    def stop(self, timeout: float) -> bool:
        """Ask the lane to end, wait for it up to `timeout` seconds, and return whether it has ended.

        One that has not, since a request hangs, ends with that request.
        """
        self.stopping.set()
        self.wake()
        if self._thread.ident is not None:
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while not self.stopping.is_set():
            self._woken.clear()
            if not self._again():
                self._woken.wait(self._interval)

    def _again(self) -> bool:
        try:
            return self._work()
        except Exception as error:  # noqa: BLE001 - the thread's edge: whatever fails is said, and tried again later
            self._failed(error)
            return False
