"""Prepares data with two processes and is killed at it: `python -m tests.support.preparing REQUEST PLACE`."""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
from typing import Any

from speedtronic.data.prepare import prepare as module


def die(*whatever: Any, **options: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def main(request: str, place: str) -> None:
    options = json.loads(request)
    units = itertools.count(1)

    def told(progress: module.Progress) -> None:
        if f"unit {next(units)}" == place:
            die()

    if place == "publish":
        module.publish_folder = die
    clock = itertools.count(0, 1000).__next__  # every unit is noted
    module.prepare(options.pop("paths"), options.pop("out"), processes=2, on_progress=told, clock=clock, **options)


if __name__ == "__main__":
    main(*sys.argv[1:])
