"""From files, text, mappings and `section.key=value` arguments to one tree that knows where each key was given."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path as FilePath
from typing import Any

from speedtronic.config.base import Section
from speedtronic.config.problems import Path, Place, Problem, in_words, is_unicode
from speedtronic.config.shorthands import full_path, in_full
from speedtronic.config.text import parse
from speedtronic.errors import ConfigError

_COMMAND_LINE = "command line"
_STARTS_LIKE_TEXT = re.compile(r"\s*(\{|[\w.-]+\s*:(\s|$))")


@dataclass
class Gathered:
    """A configuration in full form, not yet checked, with the place of each key and the problems found so far."""

    tree: dict[str, Any]
    places: dict[Path, Place] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    source: Place | None = None

    def located(self, problems: Iterable[Problem]) -> list[Problem]:
        """The problems with their places, in order of line. A key that was not given has the place of its section."""

        def place(path: Path) -> Place | None:
            path = full_path(path)
            above = (path[:length] for length in range(len(path), 0, -1))
            return next((self.places[key] for key in above if key in self.places), self.source)

        placed = [replace(problem, place=problem.place or place(problem.path)) for problem in problems]
        # A problem without a line, such as one of the command line, comes last.
        return sorted(placed, key=lambda problem: (problem.place and problem.place.line) or math.inf)


def gather(source: object, overrides: Sequence[str], sections: Mapping[str, type[Section]]) -> Gathered:
    """Read a source and apply overrides to it.

    Args:
        source: path of a file, text, a mapping, or a whole configuration.
        overrides: `section.key=value` strings; a later one wins over an earlier one.
        sections: the class of each section.

    Raises:
        ConfigError: the source or an override cannot be read at all, so there is nothing to check.
    """
    gathered = _read(source, sections)
    for text in overrides:
        _override(gathered, text, sections)
    return gathered


def _read(source: object, sections: Mapping[str, type[Section]]) -> Gathered:
    if isinstance(source, Section):
        source = source.given()
    if isinstance(source, Mapping):
        tree, problems = in_full(source, sections)
        return Gathered(tree, problems=problems)

    # A string is YAML or JSON text, or the path of a file. A file that exists is a file, whatever its name looks like.
    if isinstance(source, str) and (
        "\n" in source or (_STARTS_LIKE_TEXT.match(source) is not None and not os.path.exists(source))
    ):
        name, text = "<string>", source
    elif isinstance(source, str | os.PathLike):
        name = os.fspath(source)
        text = _file_text(name)
    else:
        raise ConfigError(
            f"cannot load a configuration from {in_words(source)}; give a path, YAML or JSON text, or a mapping"
        )

    parsed = parse(text, name)
    data = {} if parsed.data is None else parsed.data
    if not isinstance(data, dict):
        raise ConfigError(f"{name}: the top level must be a mapping of sections, not {in_words(data)}")
    tree, problems = in_full(data, sections)
    places = {full_path(path): place for path, place in parsed.places.items()}
    return Gathered(tree, places, _under_full_paths(parsed.problems) + problems, Place(name))


def _file_text(name: str) -> str:
    path = FilePath(name)
    if path.is_dir():
        raise ConfigError(f"{path}: is a folder; name the YAML or JSON file in it")
    try:
        return path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"{name}: no such file") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name}: not UTF-8 text: invalid byte at offset {error.start}") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{name}: cannot be read: {reason}") from None


def _override(gathered: Gathered, text: str, sections: Mapping[str, type[Section]]) -> None:
    key, equals, value = text.partition("=")
    path: Path = tuple(key.split("."))
    if not equals or not all(path):
        raise ConfigError(f"{_COMMAND_LINE}: {key!r}: write section.key=value")
    if not is_unicode(value):  # as a shell passes on a name with other bytes
        raise ConfigError(
            f"{_COMMAND_LINE}: {key}: must be valid Unicode text, not {in_words(value)}; rename a file or folder whose "
            "name is not UTF-8, or make a link to it"
        )
    parsed = parse(value, f"{_COMMAND_LINE}: {key}", at=path, numbered=False)

    # A tree of its own with this one value, so that shorthands mean the same as in a file.
    nested: Any = parsed.data
    for part in reversed(path):
        nested = {str(part): nested}
    tree, problems = in_full(nested, sections)
    place = Place(_COMMAND_LINE)
    found = _under_full_paths(parsed.problems) + problems
    gathered.problems += [replace(problem, place=place) for problem in found]
    if not parsed.problems:
        # `model={n_layer: 2}` joins the section; `model.extra={…}` replaces that key as a whole.
        depth = max(2, len(full_path(path)))
        for changed in _lay_over(gathered.tree, tree, depth):
            gathered.places[changed] = place


def _under_full_paths(problems: Iterable[Problem]) -> list[Problem]:
    return [replace(problem, path=full_path(problem.path)) for problem in problems]


def _lay_over(below: dict[str, Any], above: Mapping[str, Any], depth: int) -> list[Path]:
    """Put the values of `above` into `below`, joining mappings down to `depth` levels; returns the changed paths."""
    changed: list[Path] = []
    for key, value in above.items():
        under = below.get(key)
        if depth > 1 and isinstance(value, Mapping) and isinstance(under, dict):
            below[key] = joined = dict(under)  # the mapping itself may be the caller's
            changed += [(key, *path) for path in _lay_over(joined, value, depth - 1)]
        else:
            below[key] = value
            changed.append((key,))
    return changed
