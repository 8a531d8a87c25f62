"""MLflow with a database in a file, and with a server that hangs."""

from __future__ import annotations

import socket
import threading
from importlib import import_module
from pathlib import Path

import pytest

from speedtronic.metrics.tracker_feed import opener_of
from tests.support.tracking import BEGAN, EVAL_LOSS, RUN_ID, TRAIN_LOSS, Tracked, track_and_resume

pytest.importorskip("mlflow", reason="speedtronic[mlflow] is not installed")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]  # its imports take seconds, and warn


def test_a_resumed_run_continues_its_curve_in_the_same_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    track_and_resume(tmp_path, "mlflow")
    client = import_module("mlflow").MlflowClient()
    experiment = client.get_experiment_by_name("speedtronic")
    (run,) = client.search_runs([experiment.experiment_id])
    for tag, points in (("train/loss", TRAIN_LOSS), ("eval/loss", EVAL_LOSS)):
        history = client.get_metric_history(run.info.run_id, tag)
        assert sorted((metric.step, metric.value) for metric in history) == points
        assert {metric.timestamp for metric in history} == {int(BEGAN.timestamp() * 1000)}
    assert run.info.status == "FINISHED"
    assert (run.info.run_name, run.data.tags["speedtronic.run_id"]) == ("my run", RUN_ID)
    assert run.data.params["run.max_steps"] == "8"
    assert run.data.params["distributed.token"] == "<redacted>"


def test_points_that_are_sent_twice_are_there_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a power cut, which may cost the file that says how far the tracker is."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    track_and_resume(tmp_path, "mlflow")
    (tmp_path / "trackers/fake.json").unlink()
    again = Tracked(tmp_path, opener_of("mlflow"), patience=120.0)
    again.start(8)
    again.close()
    client = import_module("mlflow").MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("speedtronic").experiment_id])
    history = client.get_metric_history(run.info.run_id, "train/loss")
    assert sorted((metric.step, metric.value) for metric in history) == TRAIN_LOSS


def test_a_server_that_hangs_holds_nothing_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:  # takes connections, and never answers
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{server.getsockname()[1]}")
        monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
        monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
        tracked = Tracked(tmp_path, opener_of("mlflow"), patience=0.1)
        tracked.start()
        tracked.steps(1, 8)
        tracked.close()
    # The thread ends now that nobody listens, and before the environment is the former one again.
    for thread in [thread for thread in threading.enumerate() if thread.name == "tracker-fake"]:
        thread.join(120.0)
        assert not thread.is_alive()
    assert tracked.messages == ["fake did not take all of this run; the rest is sent when the run is resumed"]
