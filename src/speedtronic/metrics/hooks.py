"""Calls a hook on its own thread, so that a hook that hangs or is slow does not hold training up for long."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from speedtronic.metrics.records import Hook, TrainingHook

_SHARE = 0.05  # of the time that passes: a hook may take so much besides its patience
_LONGEST_QUEUE = 1000  # events that wait for a hook that has fallen behind


class HookThread:
    """Tells one hook of events, always on the same thread.

    `tell` waits for the hook, so that its work is done when the sender of the event goes on. The waits of a hook may
    take `patience` seconds and a twentieth of the time that passes, all together. After that, `tell` no longer waits:
    up to a thousand events queue for the hook, and it misses the others.

    Args:
        hook: the hook to call.
        patience: seconds.
        failed: called with the hook, the event and the exception that the hook raised.
        warn: called with a message when the hook falls behind, and with the number of events that it missed in the end.
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
        """Send an event to the hook.

        Raises:
            BaseException: `tell` waited for the hook, and it raised something other than an `Exception`, such as
                `KeyboardInterrupt`.
        """
        call = _Call(self.hook, event, payload, self._failed, awaited=not self._behind)
        if threading.current_thread() is self._thread:
            # The hook itself sent this event, and its thread cannot wait for itself.
            call.run()
        else:
            if not self._enqueue(call):
                self._missed += 1
                return
            if self._behind:
                return  # nobody waits, and the hook's thread reports a failure
            if not self._wait_for(call):
                self._warn(
                    f"hook {hook_name(self.hook)} takes too long, now on {event}: training no longer waits for it, so "
                    "it gets events late, and misses some if it falls far behind"
                )
                return
        # The call has ended in time, so its failure is reported here.
        call.raise_failure()

    def close(self) -> None:
        """End the thread, after the hook has had all events or `patience` seconds have passed."""
        with self._lock:
            thread, self._thread = self._thread, None
        if thread is None or threading.current_thread() is thread:
            return
        _put_end_mark(self._calls)
        thread.join(self._patience)
        missed, self._missed = self._missed, 0
        if thread.is_alive():
            missed += max(0, self._calls.qsize() - 1)  # the last item is the end mark
            self._warn(f"hook {hook_name(self.hook)} has not returned; {missed} events did not reach it")
        elif missed:
            self._warn(f"hook {hook_name(self.hook)} was too slow and missed {missed} events")

    def _enqueue(self, call: _Call) -> bool:
        """Queue a call for the thread, which is started if there is none; false if the queue is full."""
        with self._lock:
            # A forked child has no thread, and its copy of the queue may be in any state: start over with both.
            if self._thread is None or not self._thread.is_alive():
                self._calls = SimpleQueue()
                self._thread = threading.Thread(target=_run_calls, args=(self._calls,), name="hook", daemon=True)
                self._thread.start()
                weakref.finalize(self, _put_end_mark, self._calls)
        if self._calls.qsize() >= _LONGEST_QUEUE:
            return False
        self._calls.put(call)
        return True

    def _wait_for(self, call: _Call) -> bool:
        """Wait for a call, for as long as the hook may still take; false if it did not return in that time."""
        # What is left of the patience, and a share of the time since the hook was added.
        begin = time.monotonic()
        call.done.wait(self._patience + _SHARE * (begin - self._began) - self._taken)
        self._taken += time.monotonic() - begin
        self._behind = call.abandon()
        return not self._behind


class _Call:
    """One event for a hook. If the hook raises, the sender reports it; once abandoned, the hook's thread does."""

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
        except BaseException as error:  # noqa: BLE001 - user code at the edge of a thread; the sender is told
            self._failure = error
        with self._lock:
            self.done.set()
            if self._abandoned:
                self._report()

    def abandon(self) -> bool:
        """Let the hook's thread report a failure; false if the call has just ended, and the sender can report it."""
        with self._lock:
            self._abandoned = not self.done.is_set()
            return self._abandoned

    def raise_failure(self) -> None:
        """Report what the hook raised. Raise it if it must end the run, such as `KeyboardInterrupt`."""
        if self._failure is not None and not isinstance(self._failure, Exception):
            raise self._failure
        self._report()

    def _report(self) -> None:
        if self._failure is not None:
            self._failed(self._hook, self._event, self._failure)


def hook_name(hook: Hook) -> str:
    """The name of a hook in messages."""
    return str(getattr(hook, "__qualname__", type(hook).__qualname__))


def _run_calls(calls: SimpleQueue[_Call | None]) -> None:
    while (call := calls.get()) is not None:
        call.run()
        del call  # it would keep the hook and its logger alive until the next event


def _put_end_mark(calls: SimpleQueue[_Call | None]) -> None:
    # The garbage collector may call this while the thread is inside this very queue. A SimpleQueue allows that.
    calls.put(None)
