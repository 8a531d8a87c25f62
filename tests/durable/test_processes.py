"""Living and dead processes are told apart."""

from __future__ import annotations

import os
import subprocess
import sys

from speedtronic.durable.processes import process_is_alive


def test_a_dead_process_is_known_to_be_dead() -> None:
    process = subprocess.Popen([sys.executable, "-S", "-c", ""])
    process.wait()
    assert not process_is_alive(process.pid)


def test_living_processes_are_known_to_live_whoever_they_belong_to() -> None:
    assert process_is_alive(os.getpid())
    assert process_is_alive(1)
