"""The short ways to write a configuration, written in full: `max_steps`, `hub:`, `optimizer: muon`, …"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from speedtronic.config.base import Section
from speedtronic.config.problems import Path, Problem, in_words, unknown_key
from speedtronic.config.secrets import may_be_shown

SECTION_NAMES = {"hub": "distributed", "diloco": "distributed"}
HOMES = {
    **dict.fromkeys(("name", "seed", "device", "max_steps", "output_dir", "log_every"), "run"),
    **dict.fromkeys(("muon_plus", "cautious"), "optimizer"),
}
NAMED_BY_TEXT = {"optimizer": "name", "parallel": "strategy", "precision": "mode"}


def full_path(path: Path) -> Path:
    """`("max_steps",)` → `("run", "max_steps")`; `("hub", "token")` → `("distributed", "token")`."""
    if not path:
        return path
    head = str(path[0])
    if head in HOMES:
        return (HOMES[head], *path)
    return (SECTION_NAMES.get(head, head), *path[1:])


def in_full(values: Mapping[Any, Any], sections: Mapping[str, type[Section]]) -> tuple[dict[str, Any], list[Problem]]:
    """Write a configuration without shorthands, each section as a dict; also returns the problems found.

    Args:
        values: sections as mappings, as `Section`s or by name, values of the top level, and shorthands.
        sections: the class of each section.
    """
    tree: dict[str, Any] = {}
    problems: list[Problem] = []
    for key, value in values.items():
        name = SECTION_NAMES.get(key, key)
        if not isinstance(key, str):
            problems.append(Problem((str(key),), "a key must be text"))
        elif key in HOMES:
            continue
        elif name in tree:
            problems.append(Problem((key,), f"{name} is given twice, under two names"))
        elif name in sections:
            tree[name] = _section(name, value, sections[name], problems)
        else:
            tree[name] = _switch(value, problems) if name == "compile" else value

    # Keys of the top level move into their sections last, when the sections are there to be compared with.
    for key in [key for key in values if key in HOMES]:
        value, home = values[key], tree.setdefault(HOMES[key], {})
        if key in home and (home[key] != value or type(home[key]) is not type(value)):
            problems.append(Problem((key,), f"contradicts {HOMES[key]}.{key}; give one of the two"))
        home.setdefault(key, value)
    return tree, problems


def _section(name: str, value: object, kind: type[Section], problems: list[Problem]) -> dict[str, Any]:
    if value is None:  # a heading under which every key is commented out
        return {}
    if isinstance(value, kind):
        return value.given()
    if isinstance(value, Mapping):
        problems += [Problem((name, str(key)), "a key must be text") for key in value if not isinstance(key, str)]
        return {key: item for key, item in value.items() if isinstance(key, str)}
    if name in NAMED_BY_TEXT and isinstance(value, str):
        return {NAMED_BY_TEXT[name]: value}
    got = f", not {in_words(value)}" if may_be_shown((name,)) else ""
    problems.append(Problem((name,), f"must be a mapping of keys{got}"))
    return {}


def _switch(value: object, problems: list[Problem]) -> object:
    if not isinstance(value, Mapping):
        return value
    extra = [key for key in value if key != "enabled"]
    problems += [unknown_key(("compile", str(key)), Section.known_keys) for key in extra]
    if "enabled" not in value:
        problems.append(Problem(("compile",), "must be true or false, or a mapping with enabled: true or false"))
    return value.get("enabled", False)
