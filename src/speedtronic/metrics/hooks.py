"""Calls a hook on a thread of its own, so that one that hangs or is slow holds nobody up for long."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from speedtronic.metrics.records import Hook, TrainingHook

_SHARE = 0.05  # of the time that passes, which a hook may take besides its patience
_LONGEST_QUEUE = 1000  # events that a hook which has fallen behind may still hear


class HookThread:
    """Tells one hook of events, always on the same thread.

    `tell` waits for the hook, so that what it does is done when the event's sender goes on. A hook that has taken more
    than `patience` seconds and a twentieth of the time since then is no longer waited for: it hears the events that
    follow when it is ready for them, the first thousand that it has not come to yet, and misses the others.

    Args:
        hook: what is called.
        patience: seconds.
        failed: told of the event and of what the hook raised.
        warn: told when the hook has fallen behind, and how many events it has missed in the end.
    """

    def __init__(
        self,
        hook: Hook,
        patience: float,
        failed: Callable[[Hook, str, BaseException], None],
        warn: Callable[[str], None],
    ) -> None:
        self.hook = hook
        self._patience = patience
        self._failed = failed
        self._warn = warn
        self._began = time.monotonic()
        self._taken = 0.0
        self._behind = False
        self._missed = 0
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()

    def tell(self, event: str, payload: dict[str, Any]) -> None:
        """Let the hook hear an event.

        Raises:
            BaseException: the hook raised what is no `Exception`, such as `KeyboardInterrupt`, and was waited for.
        """
        call = _Call(self.hook, event, payload, self._failed, awaited=not self._behind)
        if threading.current_thread() is self._thread:
            call.run()  # the hook sends an event itself, and hears of it
        elif not self._put(call):
            self._missed += 1
            return
        elif self._behind:
            return
        elif not self._came_back(call):
            self._warn(
                f"hook {hook_name(self.hook)} takes too long, now on {event}: training no longer waits for it, so it "
                "hears of events late, and misses some when it lags far behind"
            )
            return
        call.raise_failure()

    def close(self) -> None:
        """End the thread, once the hook has heard what is left or `patience` seconds have passed."""
        with self._lock:
            thread, self._thread = self._thread, None
        if thread is None or threading.current_thread() is thread:
            return
        _end(self._calls)
        thread.join(self._patience)
        missed, self._missed = self._missed, 0
        if thread.is_alive():
            missed += max(0, self._calls.qsize() - 1)  # the last is the word that there will be no more
            self._warn(f"hook {hook_name(self.hook)} has not come back; {missed} events were left for it")
        elif missed:
            self._warn(f"hook {hook_name(self.hook)} was too slow to hear of {missed} events")

    def _put(self, call: _Call) -> bool:
        with self._lock:
            # A fork leaves its child without the thread, and the queue in whatever state it was.
            if self._thread is None or not self._thread.is_alive():
                self._calls = SimpleQueue()
                self._thread = threading.Thread(target=_work, args=(self._calls,), name="hook", daemon=True)
                self._thread.start()
                weakref.finalize(self, _end, self._calls)
        if self._calls.qsize() >= _LONGEST_QUEUE:
            return False
        self._calls.put(call)
        return True

    def _came_back(self, call: _Call) -> bool:
        """Wait for a call, within what the hook may still take."""
        begin = time.monotonic()
        call.done.wait(self._patience + _SHARE * (begin - self._began) - self._taken)
        self._taken += time.monotonic() - begin
        self._behind = call.abandon()
        return not self._behind


class _Call:
    """One event for a hook. What the hook raises is its sender's to report, as long as the sender waits."""

    def __init__(
        self,
        hook: Hook,
        event: str,
        payload: dict[str, Any],
        failed: Callable[[Hook, str, BaseException], None],
        *,
        awaited: bool,
    ) -> None:
        self.done = threading.Event()
        self._hook = hook
        self._event = event
        self._payload = payload
        self._failed = failed
        self._failure: BaseException | None = None
        self._abandoned = not awaited
        self._lock = threading.Lock()

    def run(self) -> None:
        try:
            if isinstance(self._hook, TrainingHook):
                self._hook.on_event(self._event, self._payload)
            else:
                self._hook(self._event, self._payload)
        except BaseException as error:  # noqa: BLE001 - foreign code at the edge of a thread; the sender is told
            self._failure = error
        with self._lock:
            self.done.set()
            if self._abandoned:
                self._report()

    def abandon(self) -> bool:
        """Leave the rest to the hook's thread; false when the call has just ended."""
        with self._lock:
            self._abandoned = not self.done.is_set()
            return self._abandoned

    def raise_failure(self) -> None:
        if self._failure is not None and not isinstance(self._failure, Exception):
            raise self._failure
        self._report()

    def _report(self) -> None:
        if self._failure is not None:
            self._failed(self._hook, self._event, self._failure)


def hook_name(hook: Hook) -> str:
    """What messages call a hook."""
    return str(getattr(hook, "__qualname__", type(hook).__qualname__))


def _work(calls: SimpleQueue[_Call | None]) -> None:
    while (call := calls.get()) is not None:
        call.run()
        del call  # it would keep the hook, and who is told of its failures, alive until the next event


def _end(calls: SimpleQueue[_Call | None]) -> None:
    # May run while a thread is within this very queue, when garbage is collected there; a SimpleQueue allows that.
    calls.put(None)
