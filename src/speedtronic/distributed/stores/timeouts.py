"""Timeouts for calls that cannot be given one, such as those to a mounted folder."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from speedtronic.errors import StoreUnavailableError

T = TypeVar("T")

_MOST_HUNG = 4


class BoundedCalls:
    """Runs each call on a thread of its own and stops waiting for one that takes too long.

    A call that hangs keeps hanging, since nothing can end it. After a few of those no more are started until one ends,
    so that a dead mount costs a few threads and not one per request for hours.

    Args:
        url: of what is called, for messages.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._lock = threading.Lock()
        self._hung: list[threading.Thread] = []

    def within(self, timeout: float, call: Callable[[], T]) -> T:
        """What the call returns or raises.

        Raises:
            StoreUnavailableError: it took longer than `timeout` seconds, or too many others hang.
        """
        with self._lock:
            self._hung = [thread for thread in self._hung if thread.is_alive()]
            if len(self._hung) >= _MOST_HUNG:
                raise StoreUnavailableError(f"{self._url}: {len(self._hung)} earlier requests still hang")
        values: list[T] = []
        errors: list[BaseException] = []

        def run() -> None:
            try:
                values.append(call())
            except BaseException as error:  # noqa: BLE001 - the thread's edge: raised again in the thread that asked
                errors.append(error)

        thread = threading.Thread(target=run, name="store request", daemon=True)
        thread.start()
        thread.join(timeout)
        if errors:
            raise errors[0]
        if not values:
            with self._lock:
                self._hung.append(thread)
            raise StoreUnavailableError(f"{self._url}: no answer within {timeout:g} s")
        return values[0]
