"""Problems of a configuration: each is one line with its place, the full key, what is wrong and what would be right."""

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

# Names that other trainers use for our keys. A search for a close spelling would not find them.
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
    """One thing that is wrong. Its place is unknown when the values came from Python."""

    path: Path
    message: str
    place: Place | None = None

    def __str__(self) -> str:
        place = str(self.place or "")
        return ": ".join(part for part in (place, dotted(self.path), self.message) if part)


class InvalidConfigError(ConfigError):
    """A `ConfigError` that keeps its problems one by one, so that a loader can add their places."""

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
    """A wrong value in the words of someone who writes YAML."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        # Python refuses to write an int of more than 4300 digits.
        too_long = isinstance(value, int) and value.bit_length() > 1024
        return "a number that large" if too_long else _shortened(str(value))
    if isinstance(value, str):
        return f"the text {_shortened(repr(value))}"
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, list | tuple):
        return "a list"
    return f"a {type(value).__name__}"


def is_unicode(text: str) -> bool:
    """Whether text can be written as UTF-8. A file's name with other bytes cannot: Python holds them as surrogates."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


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
        return Problem(path, f"was removed after 2.0: {REMOVED_KEYS[key]}")
    nearest = _nearest(path, known)
    return Problem(path, f"unknown key; did you mean {nearest}?" if nearest else "unknown key")


def _nearest(path: Path, known: Mapping[str, Sequence[str]]) -> str:
    """The key that was probably meant; empty where none comes near."""
    if len(path) > 2:
        return ""  # in an item of a list or mapping, whose keys are not those of a section
    *parents, leaf = (str(part) for part in path)
    section = ".".join(parents)
    every_key = {f"{other}.{key}" if other else key: key for other, keys in known.items() for key in keys}

    # The right name in the wrong section; then the name that other trainers use; then a typing error in this section;
    # then one in any section, which must be closer, because there are more keys to be close to.
    same_name = [full for full, key in every_key.items() if key == leaf]
    if same_name:
        *others, last = same_name
        return f"{', '.join(others)} or {last}" if others else last
    if leaf in COMMON_NAMES:
        return COMMON_NAMES[leaf]
    close = difflib.get_close_matches(leaf, known.get(section, ()), n=1, cutoff=0.6)
    if close:
        return f"{section}.{close[0]}" if section else close[0]
    close = difflib.get_close_matches(leaf, every_key.values(), n=1, cutoff=0.75)
    return next((full for full, key in every_key.items() if key in close), "")


def problems_of(error: ValidationError, prefix: Path, known: Mapping[str, Sequence[str]]) -> list[Problem]:
    """Translate pydantic's error into our problems.

    Args:
        error: of one section.
        prefix: the path of that section.
        known: the keys of each section, as in `unknown_key`.
    """
    problems: list[Problem] = []
    for detail in error.errors(include_url=False):
        cause = detail.get("ctx", {}).get("error")
        # pydantic marks the key of a mapping that is wrong itself.
        path = (*prefix, *(part for part in detail["loc"] if part != "[key]"))
        if isinstance(cause, InvalidConfigError):
            problems += cause.problems
        elif detail["type"] == "extra_forbidden":
            problems.append(unknown_key(path, known))
        else:
            problems.append(Problem(path, _message(detail["type"], detail, secret=not may_be_shown(path))))
    return problems


_WANTED = {
    "model_type": "a mapping of keys",
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
_SWITCHES = {"yes", "no", "on", "off", "true", "false", "y", "n"}
_BOUNDS = {
    "greater_than": ("gt", "greater than {}"),
    "greater_than_equal": ("ge", "at least {}"),
    "less_than": ("lt", "less than {}"),
    "less_than_equal": ("le", "at most {}"),
}


def _message(kind: str, detail: Mapping[str, Any], *, secret: bool) -> str:
    """What must be there and what is there instead, unless that is secret, for one kind of pydantic's errors."""
    context = detail.get("ctx", {})
    got = "" if secret else f", not {in_words(detail['input'])}"
    if kind in _WANTED:
        # In YAML 1.2 `no` and `"true"` are text, which surprises those who mean a switch.
        means_a_switch = kind == "bool_type" and str(detail["input"]).lower() in _SWITCHES
        hint = "; write true or false without quotes" if means_a_switch else ""
        return f"must be {_WANTED[kind]}{got}{hint}"
    if kind in _BOUNDS:
        bound, words = _BOUNDS[kind]
        return f"must be {words.format(short_number(context[bound]))}{got}"
    if kind == "missing":
        return "is needed"
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
