"""MLflow, through its client. `MLFLOW_TRACKING_URI` says where to: a server, or a file such as `sqlite:///mlflow.db`."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

from speedtronic.metrics.trackers import Point, TrackedRun, import_tracker

_TAG = "speedtronic.run_id"
_MOST_METRICS, _MOST_PARAMETERS = 1000, 100  # of one request (MLflow REST API, `runs/log-batch`)
_LONGEST_VALUE = 500  # characters of a parameter that every backend takes
_NOT_IN_NAMES = re.compile(r"[^\w\-. /]")


def open_mlflow(run: TrackedRun) -> MlflowTracker:
    return MlflowTracker(run)


class MlflowTracker:
    """A run in the experiment of `MLFLOW_EXPERIMENT_NAME`, or else in `speedtronic`.

    A tag holds the run's id. A resumed run is found by it, and goes on.
    """

    def __init__(self, run: TrackedRun) -> None:
        mlflow = import_tracker("mlflow")
        self._entities = mlflow.entities
        self._points: list[Point] = []
        self._client = client = mlflow.MlflowClient()
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "speedtronic")
        experiment = client.get_experiment_by_name(name)
        number = experiment.experiment_id if experiment is not None else client.create_experiment(name)
        if found := client.search_runs([number], f"tags.`{_TAG}` = '{run.run_id}'", max_results=1):
            self._run_id = found[0].info.run_id
            client.update_run(self._run_id, status="RUNNING")
            return
        self._run_id = client.create_run(number, tags={_TAG: run.run_id}, run_name=run.name).info.run_id
        parameters = [mlflow.entities.Param(key, value[:_LONGEST_VALUE]) for key, value in _flat(run.config)]
        for start in range(0, len(parameters), _MOST_PARAMETERS):
            client.log_batch(self._run_id, params=parameters[start : start + _MOST_PARAMETERS])

    def log(self, point: Point) -> None:
        self._points.append(point)

    def flush(self) -> None:
        # With the time of the event: MLflow keeps an equal metric only once, so that one sent twice does no harm.
        points, self._points = self._points, []
        metrics = [
            self._entities.Metric(_NOT_IN_NAMES.sub("_", name), value, int(point.time.timestamp() * 1000), point.step)
            for point in points
            for name, value in point.numbers.items()
        ]
        for start in range(0, len(metrics), _MOST_METRICS):
            self._client.log_batch(self._run_id, metrics=metrics[start : start + _MOST_METRICS])

    def close(self) -> None:
        self._client.set_terminated(self._run_id)


def _flat(values: Mapping[str, Any], under: str = "") -> Iterator[tuple[str, str]]:
    """`section.key` with its value, as text."""
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{under}{key}.")
        else:
            yield _NOT_IN_NAMES.sub("_", f"{under}{key}"), str(value)
