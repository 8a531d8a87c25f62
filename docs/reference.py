"""Writes `docs/api.md` from the package itself: names, signatures, events, checkpoint keys and commands.

`make docs` runs it; a test compares the page with what it would write now, so a change to the surface of the package
is always a change to the page too.
"""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, ForwardRef, TypeVar

import speedtronic
from speedtronic import _MODULE_OF
from speedtronic.cli import build_parser
from speedtronic.config.base import Section
from speedtronic.metrics.events import EVENTS

PAGE = Path(__file__).with_name("api.md")

MODULES = (
    "speedtronic",
    "speedtronic.config",
    "speedtronic.runtime",
    "speedtronic.trainer",
    "speedtronic.model",
    "speedtronic.registry",
    "speedtronic.data",
    "speedtronic.precision",
    "speedtronic.shapes",
    "speedtronic.optimizers",
    "speedtronic.checkpoint",
    "speedtronic.metrics",
    "speedtronic.distributed",
    "speedtronic.evaluation",
    "speedtronic.generation",
    "speedtronic.runs",
    "speedtronic.report",
    "speedtronic.errors",
    "speedtronic.cli",
)

CHECKPOINT_KEYS = {
    "step": "global step, an int",
    "samples": "samples trained on so far",
    "tokens": "tokens trained on so far",
    "model": "the model's `state_dict`, under its plain names",
    "optimizer": "the optimizer's `state_dict`",
    "scheduler": "the LR schedule's `state_dict`, or null",
    "scaler": "the gradient scaler's `state_dict`, or null",
    "ema": "the averaged weights of `optimizer.ema` by the model's names, float32 (float64 as float64), or null",
    "coordinator": "the coordinator's `state_dict`, or null",
    "callbacks": "each callback's `state_dict` by the name of its class (`Name 2` for the second of a class), or null",
    "tuning": "the plan of `tune`: what was chosen, on which machine, and what was measured; or null",
    "rng.python": "state of Python's `random`",
    "rng.numpy": "state of NumPy's global generator",
    "rng.torch": "state of torch's CPU generator",
    "data.loader": "the position in the data, as the loader tells it",
    "data.epoch": "the number of the epoch, from 0",
    "data.generators": "states of the loader's own random number generators",
    "metrics.loss": "the last reported loss, or null",
    "metrics.eval_loss": "the validation loss, of the average where one is kept, if measured at this step; else null",
    "metrics.monitored": "the number of `eval.monitor` at this step, where that is not the loss: `name`, `mode` and "
    "`value`; or null",
    "monitor": "the best value of `eval.monitor` so far, its step, and how many evaluations there were since",
    "precision": "the precision mode, for information",
    "config": "the configuration, secrets hidden, for information and for the list of changes on resume",
    "tokenizer": "the tokenizer's description, or null (runs from a configuration)",
    "base": "of a model with `model.lora`, the SHA-256 of each file of its frozen weights; else null (runs from a "
    "configuration)",
}

_MEMBERS = (FunctionType, property, classmethod, staticmethod)

_INTRODUCTION = """\
# API

<!-- Written by `make docs`. Change the docstrings, not this page. -->

Everything here is public: names, arguments, event keys, checkpoint keys and options change only on purpose, and a
change shows in this page. The configuration's keys have [a page of their own](configuration.md).
"""


def page() -> str:
    """The whole page, in Markdown."""
    parts = [_INTRODUCTION, *map(_module, MODULES), _events(), _checkpoint(), _commands()]
    return "\n".join(parts)


# ---------------------------------------------------------------------- Python


def _module(name: str) -> str:
    module = import_module(name)
    entries = [_entry(module, public) for public in _public_names(module)]
    return "\n".join([f"## `{name}`", "", _summary(module), "", *entries, ""])


def _public_names(module: ModuleType) -> list[str]:
    if hasattr(module, "__all__"):
        return list(module.__all__)
    return [name for name, value in vars(module).items() if not name.startswith("_") and _is_own(value, module)]


def _is_own(value: object, module: ModuleType) -> bool:
    return not isinstance(value, TypeVar) and getattr(value, "__module__", None) == module.__name__


def _entry(module: ModuleType, name: str) -> str:
    value = getattr(module, name)
    original = getattr(value, "__name__", name)
    if module is speedtronic and name in _MODULE_OF:
        return f"- `{name}`, of `{_MODULE_OF[name]}`"
    if original != name and getattr(module, original, None) is value:
        return f"- `{name}` = `{original}`"
    if inspect.isclass(value):
        return "\n".join(_class(name, value))
    if inspect.isroutine(value):
        return _line(name, _signature(value), value)
    return f"- `{name}`: {_described(value)}"


def _described(value: object) -> str:
    if isinstance(value, str | int):
        return "text" if isinstance(value, str) else f"`{value}`"
    return f"a `{type(value).__name__}`" if type(value).__module__.startswith("speedtronic") else "a type"


def _class(name: str, kind: type) -> Iterator[str]:
    plain = issubclass(kind, Section | BaseException | dict) or getattr(kind, "_is_protocol", False)
    yield _line(name, "" if plain else _signature(kind), kind)
    for member, value in vars(kind).items():
        if _is_shown(kind, member, value):
            yield "    " + _member(member, value)


def _is_shown(kind: type, member: str, value: object) -> bool:
    """Whether a member is public, and more than an override that needs no word of its own."""
    if member.startswith("_") or not isinstance(value, _MEMBERS):
        return False
    return bool(value.__doc__) or not any(hasattr(base, member) for base in kind.__bases__)


def _member(name: str, value: Any) -> str:
    function = getattr(value, "__func__", value)
    if isinstance(value, property):
        return _line(f".{name}", "", value)
    if function.__name__ != name:
        return f"- `.{name}` = `.{function.__name__}`"
    return _line(f".{name}", _signature(function, bound=not isinstance(value, staticmethod)), value)


def _line(name: str, signature: str, value: object) -> str:
    summary = _summary(value)
    return f"- `{name}{signature}`: {summary}" if summary else f"- `{name}{signature}`"


def _signature(function: Any, *, bound: bool = False) -> str:
    signature = inspect.signature(function)
    shown: list[str] = []
    before = None
    for parameter in list(signature.parameters.values())[1 if bound else 0 :]:
        if parameter.kind is parameter.KEYWORD_ONLY and before not in (
            parameter.KEYWORD_ONLY,
            parameter.VAR_POSITIONAL,
        ):
            shown.append("*")
        shown.append(_parameter(parameter))
        before = parameter.kind
    returned = signature.return_annotation
    arrow = "" if inspect.isclass(function) or returned is signature.empty else f" -> {_annotation(returned)}"
    return f"({', '.join(shown)}){arrow}"


def _parameter(parameter: inspect.Parameter) -> str:
    text = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "") + parameter.name
    if parameter.annotation is not parameter.empty:
        text += f": {_annotation(parameter.annotation)}"
    if parameter.default is not parameter.empty:
        text += f" = {_default(parameter.default)}"
    return text


def _default(value: object) -> str:
    shown = getattr(value, "__name__", None) or repr(value)
    return "…" if shown.startswith(("<", "_")) else shown


def _annotation(annotation: Any) -> str:
    if isinstance(annotation, ForwardRef):
        return annotation.__forward_arg__
    return annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))


def _summary(value: object) -> str:
    """The first paragraph of the docstring, on one line."""
    text = inspect.cleandoc(value.__doc__ or "").split("\n\n")[0]
    return " ".join(text.split())


# ---------------------------------------------------------------------- events, checkpoints, commands


def _events() -> str:
    rows = [
        f"| `{name}` | {kind.meaning} | {', '.join(f'`{key}`' for key in kind.keys)}"
        f"{''.join(f', sometimes `{key}`' for key in kind.sometimes)} |"
        for name, kind in EVENTS.items()
    ]
    head = [
        "## Events",
        "",
        "What `MetricLogger.emit` sends to the sinks and hooks. A JSON line has besides them `event`, `run_id`,",
    ]
    head += ["`elapsed_s` and `time`.", "", "| event | when | keys |", "|---|---|---|"]
    return "\n".join([*head, *rows, ""])


def _checkpoint() -> str:
    rows = [f"| `{key}` | {meaning} |" for key, meaning in CHECKPOINT_KEYS.items()]
    head = [
        "## Checkpoint",
        "",
        "What `CheckpointManager.load_latest` gives back of a run on the CPU.",
        "",
        "| key | what it is |",
        "|---|---|",
    ]
    return "\n".join([*head, *rows, ""])


def _commands() -> str:
    lines = ["## Commands", ""]
    for name, parser in _leaf_parsers(build_parser()):
        lines += [f"### `{name}`", "", (parser.description or "").strip(), "", *map(_option, _options(parser)), ""]
    return "\n".join(lines).rstrip() + "\n"


def _leaf_parsers(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    groups = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not groups:
        yield parser.prog, parser
    for group in groups:
        for child in dict.fromkeys(group.choices.values()):
            yield from _leaf_parsers(child)


def _options(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    return [action for action in parser._actions if not isinstance(action, argparse._HelpAction)]


def _option(action: argparse.Action) -> str:
    value = action.metavar or ("|".join(map(str, action.choices)) if action.choices else None)
    takes_value = action.nargs != 0 and value is not None
    names = " ".join(action.option_strings) or str(value or action.dest)
    shown = f"{names} {value}" if action.option_strings and takes_value else names
    needed = " (required)" if action.required and action.option_strings else ""
    return f"- `{shown}`{needed}: {(action.help or '') % vars(action)}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
