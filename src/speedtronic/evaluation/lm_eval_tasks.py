"""Runs the tasks of lm-eval (EleutherAI's Language Model Evaluation Harness) on our models; needs its package."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from speedtronic.errors import ConfigError, MissingExtraError
from speedtronic.evaluation.text_scorer import TextScorer
from speedtronic.generation import TextGenerator

_RESAMPLES = 1000  # for the standard errors of metrics that are no means


def harness_model(generator: TextGenerator, *, batch_size: int = 8) -> Any:
    """The model as an `lm_eval.api.model.LM`, which `lm_eval.simple_evaluate` takes.

    Raises:
        MissingExtraError: lm-eval is not installed.
    """
    scorer = TextScorer(generator, batch_size=batch_size)

    def answering(answer: Any) -> Any:
        return lambda self, requests, **_: answer([request.args for request in requests])

    methods = {
        "loglikelihood": answering(scorer.loglikelihood),
        "loglikelihood_rolling": answering(
            lambda requests: scorer.loglikelihood_rolling([text for (text,) in requests])
        ),
        "generate_until": answering(scorer.generate_until),
    }
    return type("SpeedtronicLM", (_import("lm_eval.api.model").LM,), methods)()


def run_tasks(
    generator: TextGenerator,
    tasks: Sequence[str],
    *,
    include_path: Path | None = None,
    limit: int | None = None,
    num_fewshot: int | None = None,
    batch_size: int = 8,
) -> dict[str, dict[str, float]]:
    """Run tasks on a model, and return the numbers of each.

    Args:
        generator: the model with its tokenizer.
        tasks: names of lm-eval's tasks and groups, or of those in `include_path`.
        include_path: a folder with further tasks in YAML. These may name code and data, which is run and read.
        limit: only so many documents of each task.
        num_fewshot: examples before each question, instead of the task's own number.
        batch_size: texts in one forward pass.

    Returns:
        By task and metric; `METRIC_stderr` is its standard error, where it has one.

    Raises:
        MissingExtraError: lm-eval is not installed.
        ConfigError: there is no such task, or no such folder.
    """
    model = harness_model(generator, batch_size=batch_size)
    if include_path is not None and not include_path.is_dir():
        raise ConfigError(f"--include-path {include_path}: there is no such folder")
    manager = _import("lm_eval.tasks").TaskManager(include_path=None if include_path is None else str(include_path))
    for name in tasks:
        if not manager.match_tasks([name]):
            near = difflib.get_close_matches(name, manager.all_tasks, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(f"--tasks: lm-eval has no task {name!r}{hint} Your own are found by --include-path")
    found = _import("lm_eval").simple_evaluate(
        model=model,
        tasks=list(tasks),
        task_manager=manager,
        limit=limit,
        num_fewshot=num_fewshot,
        bootstrap_iters=_RESAMPLES,
        log_samples=False,
    )
    numbers: dict[str, dict[str, float]] = {}
    for task, values in found["results"].items():
        # A key is `metric,filter`; the filter of most tasks is none.
        named = {key.removesuffix(",none"): value for key, value in values.items()}
        numbers[task] = {
            key: int(value) if isinstance(value, Integral) else float(value)
            for key, value in named.items()
            if isinstance(value, Real)
        }
    return numbers


def _import(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtraError(
            f"the tasks of lm-eval need its package ({error}); install speedtronic[lm-eval]"
        ) from error
