from __future__ import annotations

import signal
import threading

import pytest

from speedtronic.cli.interrupts import sigterm_unwinds


def test_sigterm_ends_by_an_exception_and_the_former_handler_is_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as stop, sigterm_unwinds():
        signal.raise_signal(signal.SIGTERM)
    assert stop.value.code == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is before


def test_in_another_thread_nothing_is_changed() -> None:
    before = signal.getsignal(signal.SIGTERM)
    seen = []

    def look() -> None:
        with sigterm_unwinds():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert seen == [before]
