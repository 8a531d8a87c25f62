"""`speedtronic eval`: measure a checkpoint on held-out data, or on standard tasks."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from speedtronic.cli import output
from speedtronic.cli.arguments import FoundCheckpoints, add_run_arguments, find_checkpoints
from speedtronic.errors import ConfigError

_OF_TASKS = ("include_path", "limit", "num_fewshot", "batch_size")
_SHOWN_LAST = ("targets", "batches", "duration_s")


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "eval",
        help="measure a checkpoint on held-out data, or on standard tasks",
        description="Evaluate the newest checkpoint of a run by the eval section of its configuration: the loss and "
        "the metrics on the held-out part and on eval.sets, and texts of eval.samples. Where the run kept an average "
        "of the weights (optimizer.ema), the average is evaluated. With --tasks, tasks of lm-eval run instead; they "
        "need a language model with its tokenizer, and speedtronic[lm-eval].",
    )
    add_run_arguments(parser, best=True)
    parser.set_defaults(settable=("",), run=run)
    parser.add_argument("--json", action="store_true", help="print a JSON object instead of tables")
    parser.add_argument("--device", metavar="D", help="auto, cpu, cuda, cuda:1, mps (default: run.device)")
    parser.add_argument("--tasks", metavar="A,B", help="run these tasks of lm-eval instead")
    parser.add_argument("--include-path", type=Path, metavar="DIR", help="a folder with further tasks in YAML")
    parser.add_argument("--limit", type=int, metavar="N", help="only so many documents of each task")
    parser.add_argument("--num-fewshot", type=int, metavar="N", help="examples before each question of a task")
    parser.add_argument("--batch-size", type=int, metavar="N", help="texts of a task at once (default: 8)")


def run(args: argparse.Namespace) -> int:
    tasks = [name.strip() for name in (args.tasks or "").split(",") if name.strip()]
    if args.tasks is not None and not tasks:
        raise ConfigError("--tasks: no task is named; write their names with commas between")
    if not tasks and (given := [name for name in _OF_TASKS if getattr(args, name) is not None]):
        raise ConfigError(f"--{given[0].replace('_', '-')}: is for tasks; name some with --tasks")
    for name in ("limit", "batch_size"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least 1, not {getattr(args, name)}")

    from speedtronic.runtime import import_plugins

    found = find_checkpoints(args)
    import_plugins(found.config.plugins, found.folder)
    result = _run_tasks(args, found, tasks) if tasks else _evaluate(args, found)
    if args.json:
        output.write(json.dumps(_strict(result), indent=2) + "\n")
        return 0
    output.write(f"step {result['step']}\n")
    kinds = {"SET": result.get("sets"), "TASK": result.get("tasks")}
    for heading, rows in kinds.items():
        if rows:
            _write_numbers(heading, rows)
    for sample in result.get("samples", ()):
        text = "".join(output.printable(part) if part != "\n" else part for part in sample["prompt"] + sample["text"])
        output.write(f"\n---\n{text}\n")
    return 0


def _evaluate(args: argparse.Namespace, found: FoundCheckpoints) -> dict[str, Any]:
    from speedtronic.generation import load_state
    from speedtronic.metrics import MetricLogger
    from speedtronic.runtime import evaluate_from_config

    if not found.has_config:
        # Code and files that a checkpoint names are not to be used: it may come from anywhere.
        raise ConfigError(
            f"{found.path}: no configuration of a run lies above it, and what data a checkpoint names is not read; "
            f"name the YAML it was trained with: CONFIG checkpoint.directory={found.path.absolute()}"
        )
    state = load_state(found.path, best=args.best)
    with MetricLogger(level="WARNING", stream=sys.stderr, progress="off") as logger:
        numbers = evaluate_from_config(found.config, state, device=args.device, logger=logger)
    own = {key: value for key, value in numbers.items() if key not in ("set", "sets", "samples")}
    result = {"step": state["step"], "sets": {numbers["set"]: own, **numbers.get("sets", {})}}
    return result | ({"samples": numbers["samples"]} if "samples" in numbers else {})


def _run_tasks(args: argparse.Namespace, found: FoundCheckpoints, tasks: list[str]) -> dict[str, Any]:
    from speedtronic.evaluation.lm_eval_tasks import run_tasks
    from speedtronic.generation import load_generator
    from speedtronic.precision import resolve_device

    generator = load_generator(
        found.path,
        extra=found.config.model.extra,
        overrides=found.overrides,
        best=args.best,
        device=resolve_device(args.device or found.config.run.device),
    )
    numbers = run_tasks(
        generator,
        tasks,
        include_path=args.include_path,
        limit=args.limit,
        num_fewshot=args.num_fewshot,
        batch_size=args.batch_size or 8,
    )
    return {"step": generator.step, "tasks": numbers}


def _write_numbers(heading: str, rows: Mapping[str, Mapping[str, float]]) -> None:
    keys = list(dict.fromkeys(key for numbers in rows.values() for key in numbers))
    keys.sort(key=lambda key: key in _SHOWN_LAST)
    table = [[name, *(_shown(key, numbers.get(key)) for key in keys)] for name, numbers in rows.items()]
    output.write_table([heading, *(key.replace("_", " ").upper() for key in keys)], table)


def _shown(key: str, value: float | None) -> str:
    if value is None:
        return "-"
    if isinstance(value, int):
        return str(value)
    return f"{value:.1f}" if key == "duration_s" else f"{value:.4f}" if 1e-3 <= abs(value) < 1e6 else f"{value:.4g}"


def _strict(value: Any) -> Any:
    """A tree for strict JSON, which has no NaN and no infinity."""
    if isinstance(value, Mapping):
        return {key: _strict(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_strict(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
