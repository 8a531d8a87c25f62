"""What worker processes of a pool are asked to do in tests."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from speedtronic.data.prepare.encode import Unit
from speedtronic.errors import DataError


def size(unit: Unit) -> tuple[int, int]:
    """The size of the unit, and in which process it was found."""
    return sum(chunk.size for chunk in unit.chunks), os.getpid()


def parallelism(unit: Unit) -> str | None:
    return os.environ.get("TOKENIZERS_PARALLELISM")


def refuse(unit: Unit) -> None:
    raise DataError("this unit is wrong")


def die(unit: Unit) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def hang(unit: Unit) -> int:
    """Leave a sign of life, then work for longer than any test."""
    Path(os.environ["SIGNS"], str(os.getpid())).touch()
    time.sleep(600)
    return 0
