"""The standard output of a command: it may be closed, full, or lack characters, and none of that is a traceback."""

from __future__ import annotations

import io
import os
import sys
from contextlib import suppress

from speedtronic.errors import SpeedtronicError


class OutputError(SpeedtronicError):
    """The standard output cannot be written to."""


def prepare() -> None:
    """Let whatever is printed from here on be printable: without a standard output it goes nowhere, and a
    character that the encoding lacks is escaped."""
    if sys.stdout is None:  # as it is when the shell closed it: `>&-`
        # Also keeps the descriptor of the standard output from becoming that of the next file that is opened.
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - open as long as the process
    elif isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def write(text: str) -> None:
    """Write to the standard output at once.

    Raises:
        BrokenPipeError: the reader is gone.
        OutputError: it cannot be written for another reason, such as a full disk.
    """
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputError(f"cannot write to the standard output: {error.strerror or error}") from error


def finish() -> None:
    """Write what was printed and not written yet. Raises as `write` does."""
    write("")


def abandon() -> None:
    """Let what could not be written go nowhere: the interpreter would try, and complain, once more at exit."""
    with suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(nowhere, sys.stdout.fileno())
        finally:
            os.close(nowhere)
