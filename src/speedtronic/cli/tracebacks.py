"""An error in a user's code, shown so that the user finds the place: their own lines first, the message last."""

from __future__ import annotations

import os
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path

import speedtronic

_HEADING = "Your code, most recent call last:\n"
_ALL = "All calls:\n"


def format_error(error: BaseException) -> str:
    """The traceback of an error, with those of its causes.

    Where lines of the user's own are among the calls, they stand first, by themselves. A file of theirs that is no
    Python is shown alone: the calls that led to its import say nothing about it.
    """
    if isinstance(error, SyntaxError) and error.filename is not None and _is_own(error.filename):
        return "".join(traceback.format_exception_only(error))
    everything = "".join(traceback.format_exception(error))
    calls = [call for link in _chain(error) for call in traceback.extract_tb(link.__traceback__)]
    own = [call for call in calls if _is_own(call.filename)]
    if not own:
        return everything
    return _HEADING + "".join(traceback.StackSummary.from_list(own).format()) + _ALL + everything


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The causes of an error, the first one first, and the error itself."""
    links: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in links:
        links.append(link)
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    yield from reversed(links)


def _is_own(filename: str) -> bool:
    """Whether a file is the user's: neither ours nor installed, nor code that was made while running."""
    file = Path(os.path.realpath(filename))
    if filename.startswith("<") or not _INSTALLED.isdisjoint(file.parts):
        return False
    return not any(file.is_relative_to(place) for place in _NOT_OWN)


_INSTALLED = {"site-packages", "dist-packages"}
_NOT_OWN = {
    os.path.realpath(place) for place in (os.path.dirname(speedtronic.__file__), sysconfig.get_paths()["stdlib"])
}
