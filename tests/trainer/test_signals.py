"""A first signal is noted; handlers are put back; a second one kills."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading

import pytest

from speedtronic.trainer.signals import WATCHED, SignalWatch


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_first_signal_is_noted_and_does_not_interrupt(number: signal.Signals) -> None:
    with SignalWatch() as watch:
        assert watch.received is None
        signal.raise_signal(number)
        assert watch.received == number


def test_the_previous_handlers_come_back() -> None:
    before = [signal.getsignal(number) for number in WATCHED]
    with SignalWatch():
        assert signal.getsignal(signal.SIGINT) != before[0]
    assert [signal.getsignal(number) for number in WATCHED] == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_what_the_process_ignores_stays_ignored(number: signal.Signals) -> None:
    before = signal.signal(number, signal.SIG_IGN)
    try:
        with SignalWatch() as watch:
            signal.raise_signal(number)
            assert watch.received is None
        assert signal.getsignal(number) is signal.SIG_IGN
    finally:
        signal.signal(number, before)


@pytest.mark.parametrize("asked", [signal.SIGINT, signal.SIGTERM])
def test_a_hangup_comes_more_than_once_and_never_ends_the_process(asked: signal.Signals) -> None:
    with SignalWatch() as watch:
        for number in (signal.SIGHUP, signal.SIGHUP, asked, signal.SIGHUP):
            signal.raise_signal(number)
        assert watch.received == signal.SIGHUP


def test_outside_the_main_thread_nothing_is_watched() -> None:
    before = signal.getsignal(signal.SIGTERM)
    seen = []

    def watch() -> None:
        with SignalWatch() as watching:
            seen.append((watching.received, signal.getsignal(signal.SIGTERM)))

    thread = threading.Thread(target=watch)
    thread.start()
    thread.join()
    assert seen == [(None, before)]


@pytest.mark.parametrize("hangups", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_second_signal_ends_the_process_at_once(hangups: int) -> None:
    code = f"""
import signal
from speedtronic.trainer.signals import SignalWatch
with SignalWatch():
    for _ in range({hangups}):
        signal.raise_signal(signal.SIGHUP)
    signal.raise_signal(signal.SIGINT)
    signal.raise_signal(signal.SIGINT)
    print("still here")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGINT
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
