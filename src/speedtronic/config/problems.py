"""What can be wrong with a configuration: one problem, one line, the full key and the remedy."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from speedtronic.config.secrets import may_be_shown
from speedtronic.errors import ConfigError

Path = tuple[str | int, ...]

REMOVED_KEYS = {
    "distributed.collaborators": "the nodes are those whose deltas lie under `in/` in the store; "
    "set distributed.expected_nodes to say how many there should be",
    "distributed.cache_dir": "use distributed.state_dir",
    "distributed.delta_upload_queue_size": "the spool holds one delta; no size is needed",
    "distributed.delta_upload_overflow": "a boundary that meets a full spool skips, and the next delta is "
    "cumulative; no policy is needed",
}

# What other trainers call our keys. A close spelling would not find these.
COMMON_NAMES = {
    "batch_size": "data.micro_batch_size",
    "device_type": "run.device",
    "gradient_accumulation_steps": "data.target_batch_size",
    "hidden_size": "model.d_model",
    "learning_rate": "optimizer.lr",
    "max_grad_norm": "optimizer.grad_clip",
    "max_iters": "run.max_steps",
    "num_heads": "model.n_head",
    "num_layers": "model.n_layer",
    "num_steps": "run.max_steps",
    "sequence_length": "model.max_seq_len",
    "total_steps": "run.max_steps",
}


@dataclass(frozen=True)
class Place:
    """Where a key was given: a file and its line, or the command line, which has none."""

    source: str
    line: int | None = None

    def __str__(self) -> str:
        return self.source if self.line is None else f"{self.source}:{self.line}"


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong. Its place is not known when the values came from Python."""

    path: Path
    message: str
    place: Place | None = None

    def __str__(self) -> str:
        place = str(self.place or "")
        return ": ".join(part for part in (place, dotted(self.path), self.message) if part)


class InvalidConfigError(ConfigError):
    """A `ConfigError` that still knows its problems one by one, so that a loader can add where they stand."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__(self.problems)

    def __str__(self) -> str:
        return "\n".join(str(problem) for problem in self.problems)


def dotted(path: Path) -> str:
    """`("optimizer", "betas", 0)` → `optimizer.betas[0]`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def short_number(value: float) -> str:
    """`1.0` → `1`, `0.5` → `0.5`."""
    return str(int(value)) if value == int(value) else str(value)


def in_words(value: object) -> str:
    """A wrong value as a reader of YAML would call it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return _shortened(str(value)) if not _too_long_to_print(value) else "a number that large"
    if isinstance(value, str):
        return f"the text {_shortened(repr(value))}"
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, list | tuple):
        return "a list"
    return f"a {type(value).__name__}"


def _too_long_to_print(value: float) -> bool:
    # Python refuses to write an int of more than 4300 digits.
    return isinstance(value, int) and value.bit_length() > 1024


def _shortened(text: str, limit: int = 60) -> str:
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def unknown_key(path: Path, known: Mapping[str, Sequence[str]]) -> Problem:
    """The problem of a key that does not exist, with the nearest that does.

    Args:
        path: full path of the unknown key.
        known: the keys of each section by the section's name; the top level is called "".
    """
    key = dotted(path)
    if key in REMOVED_KEYS:
        return Problem(path, f"is gone since 2.0: {REMOVED_KEYS[key]}")
    nearest = _nearest(path, known)
    return Problem(path, f"unknown key; did you mean {nearest}?" if nearest else "unknown key")


def _nearest(path: Path, known: Mapping[str, Sequence[str]]) -> str:
    *parents, leaf = (str(part) for part in path)
    section = ".".join(parents)
    same_name = [_full(other, leaf) for other, keys in known.items() if leaf in keys]
    if same_name:
        return _either(same_name)
    if leaf in COMMON_NAMES:
        return COMMON_NAMES[leaf]
    beside = difflib.get_close_matches(leaf, known.get(section, ()), n=1, cutoff=0.6)
    if beside:
        return _full(section, beside[0])
    everywhere = {_full(other, key): key for other, keys in known.items() for key in keys}
    close = difflib.get_close_matches(leaf, everywhere.values(), n=1, cutoff=0.75)
    return next((full for full, key in everywhere.items() if key in close), "")


def _full(section: str, key: str) -> str:
    return f"{section}.{key}" if section else key


def _either(keys: Sequence[str]) -> str:
    return " or ".join([", ".join(keys[:-1]), keys[-1]] if len(keys) > 1 else keys)


def problems_of(error: ValidationError, prefix: Path, known: Mapping[str, Sequence[str]]) -> list[Problem]:
    """The problems in pydantic's error, in our words; `prefix` is the path of the section it is about."""
    problems: list[Problem] = []
    for detail in error.errors(include_url=False):
        cause = detail.get("ctx", {}).get("error")
        path = (*prefix, *detail["loc"])
        if isinstance(cause, InvalidConfigError):
            problems += cause.problems
        elif detail["type"] == "extra_forbidden":
            problems.append(unknown_key(path, known))
        else:
            problems.append(Problem(path, _message(detail["type"], detail, secret=not may_be_shown(path))))
    return problems


_WANTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "text",
    "list_type": "a list",
    "dict_type": "a mapping",
    "string_unicode": "valid Unicode text",
}
_BOUNDS = {
    "greater_than": ("gt", "greater than {}"),
    "greater_than_equal": ("ge", "at least {}"),
    "less_than": ("lt", "less than {}"),
    "less_than_equal": ("le", "at most {}"),
}


def _message(kind: str, detail: Mapping[str, Any], *, secret: bool) -> str:
    context = detail.get("ctx", {})
    got = "" if secret else f", not {in_words(detail['input'])}"
    if kind in _WANTED:
        hint = "; write true or false without quotes" if _means_a_switch(kind, detail["input"]) else ""
        return f"must be {_WANTED[kind]}{got}{hint}"
    if kind in _BOUNDS:
        bound, words = _BOUNDS[kind]
        return f"must be {words.format(short_number(context[bound]))}{got}"
    if kind == "literal_error":
        return f"must be {context['expected']}{got}"
    if kind in ("string_too_short", "too_short") and isinstance(detail["input"], str):
        return "must not be empty"
    if kind in ("too_short", "too_long"):
        wanted = context.get("min_length", context.get("max_length"))
        return f"must have {wanted} items, not {len(detail['input'])}"
    if kind == "value_error":
        return str(context["error"])
    return str(detail["msg"])


def _means_a_switch(kind: str, value: object) -> bool:
    return kind == "bool_type" and str(value).lower() in {"yes", "no", "on", "off", "true", "false", "y", "n"}
