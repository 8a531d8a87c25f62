"""The threads of DumbDiLoCo: only when work is done and how it ends. What they run knows nothing of threads."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable

from speedtronic.distributed.requests import EventSink
from speedtronic.errors import StoreError, StoreRefusedError, StoreUnavailableError

_LONGEST_PAUSE = 900.0  # seconds between requests that a store refuses


class BackgroundThread:
    """Does one kind of work again and again: when it is woken, and at the latest after an interval.

    After a StoreRefusedError it pauses for the interval, then for twice as long each time, up to 15 minutes: what was
    refused will most likely be refused again. Waking it does not end such a pause, since it is woken whenever there is
    more of the work that was refused.

    It runs once. It is a daemon thread, so that a request that hangs does not keep the process alive.

    Args:
        name: the thread's.
        work: done at once when the thread starts. True asks to be called again without a pause.
        interval: seconds between the end of one call and the next.
        failed: receives what `work` raised; the thread continues after the interval.
        stopping: set by `stop`. Threads that share one end together; waits inside `work` should wait on it.
        wait: waits for an event for some seconds, as `Event.wait` does.
    """

    def __init__(
        self,
        name: str,
        work: Callable[[], bool],
        *,
        interval: float,
        failed: Callable[[Exception], None],
        stopping: threading.Event | None = None,
        wait: Callable[[threading.Event, float], object] = threading.Event.wait,
    ) -> None:
        self._stopping = stopping if stopping is not None else threading.Event()
        self._work = work
        self._interval = interval
        self._failed = failed
        self._wait = wait
        self._woken = threading.Event()
        self._urged = threading.Event()  # ends a pause after a refusal too
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wake(self, *, urgent: bool = False) -> None:
        """Let the work be done soon, also if it is being done right now; if it was refused, only if this is urgent."""
        if urgent:
            self._urged.set()
        self._woken.set()

    def stop(self, timeout: float) -> bool:
        """Ask the thread to end, wait up to `timeout` seconds, and return whether it has ended.

        If a request hangs, the thread ends with that request.
        """
        self._stopping.set()
        self.wake(urgent=True)
        if self._thread.ident is not None:
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        pause = 0.0  # seconds, after a refusal
        while True:
            # Before the question whether to stop: `stop` sets these last, and they must not be lost.
            self._woken.clear()
            self._urged.clear()
            if self._stopping.is_set():
                return
            again = refused = False
            try:
                again = self._work()
            except Exception as error:  # noqa: BLE001 - the thread's edge: every failure is reported and tried again
                self._failed(error)
                refused = isinstance(error, StoreRefusedError)
            pause = max(self._interval, min(2 * pause, _LONGEST_PAUSE)) if refused else 0.0
            if refused:
                self._wait(self._urged, pause)
            elif not again:
                self._wait(self._woken, self._interval)


class ReportedWork:
    """Work with the store. An error is logged when it starts and when it is over, not at each attempt."""

    def __init__(self, name: str, work: Callable[[], bool], say: EventSink) -> None:
        self._name = name
        self._work = work
        self._say = say
        self._trouble: str | None = None

    def __call__(self) -> bool:
        again = self._work()
        if self._trouble is not None:
            self._trouble = None
            self._log("INFO", f"{self._name} works again")
        return again

    def attempt(self) -> None:
        """Do it on the calling thread, which continues also after an error of the store."""
        try:
            self()
        except StoreError as error:
            self.report(error)

    def report(self, error: Exception) -> None:
        # Messages of an unavailable store differ from attempt to attempt: one kind of error is one trouble.
        trouble = type(error).__name__ if isinstance(error, StoreUnavailableError) else str(error)
        if trouble == self._trouble:
            return
        self._trouble = trouble
        if isinstance(error, StoreUnavailableError):
            self._log("WARNING", f"{self._name} failed and is tried again: {error}")
        elif isinstance(error, StoreError):
            self._log("ERROR", f"{self._name} is refused and is tried again: {error}")
        else:
            trace = "".join(traceback.format_exception(error)).rstrip()
            self._log("WARNING", f"{self._name} failed and is tried again:\n{trace}")

    def _log(self, level: str, message: str) -> None:
        self._say("log", {"level": level, "message": message})
