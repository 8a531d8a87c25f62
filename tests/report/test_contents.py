"""What the report says of runs: the numbers of their logs, what happened, and where they differ."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from speedtronic import runs
from speedtronic.report.contents import contents, labels
from tests.support.logs import LogWriter


def shown(*folders: Path) -> dict[str, Any]:
    return contents([runs.load(folder) for folder in folders])


def column(table: dict[str, Any], name: str) -> list[float]:
    found = table["columns"][name]
    kind = {64: "<f8", 32: "<f4"}[found["bits"]]
    return list(np.frombuffer(base64.b64decode(found["data"]), dtype=kind).tolist())


def titles(page: dict[str, Any], key: str = "charts") -> list[str]:
    return [chart["title"] for chart in page[key]]


@pytest.fixture
def log(tmp_path: Path) -> LogWriter:
    return LogWriter(tmp_path / "run")


def test_the_tables_hold_the_numbers_of_the_log(log: LogWriter) -> None:
    log.start(0, target=60)
    for step in range(1, 61):
        log.step(
            step, loss=1.0, interval_loss=1 / step, lr=9.0, lr_applied=0.5, grad_norm=2.0, tokens=2**40 + step,
            interval_tokens_per_sec=8.0 * step, interval_steps_per_sec=4.0,
        )  # fmt: skip
    log.write("eval", step=30, loss=0.25, accuracy=0.5)
    (run,) = shown(log.file.parent)["runs"]
    steps = run["tables"]["steps"]
    assert (steps["rows"], steps["of"]) == (60, 60)
    assert column(steps, "tokens") == [2**40 + step for step in range(1, 61)], "exact"
    np.testing.assert_allclose(column(steps, "loss"), [1 / step for step in range(1, 61)], rtol=1e-7)
    assert set(column(steps, "lr")) == {0.5}
    assert column(steps, "throughput")[-1] == 480
    assert column(run["tables"]["times"], "p99") == [0.25] * 6
    evals = run["tables"]["evals"]
    assert (column(evals, "loss"), column(evals, "tokens"), column(evals, "step")) == ([0.25], [2**40 + 30], [30])


def test_only_charts_with_numbers_are_there_and_each_metric_of_an_evaluation_has_one(log: LogWriter) -> None:
    log.step(1)
    assert titles(shown(log.file.parent)) == ["Loss"]
    log.step(2, grad_norm=1.0, mfu=0.4)
    log.write("eval", step=2, loss=2.0, targets=10, batches=1, duration_s=0.1, accuracy=0.5, perplexity=7.4)
    page = shown(log.file.parent)
    assert titles(page) == [
        "Loss", "Held out: accuracy", "Held out: perplexity", "Gradient norm", "Model FLOP utilisation",
    ]  # fmt: skip
    assert titles(page, "node_charts") == []


def test_a_log_without_a_single_step_is_shown_too(log: LogWriter) -> None:
    log.start(0)
    page = shown(log.file.parent)
    assert (page["charts"], [mark["kind"] for mark in page["runs"][0]["marks"]]) == ([], ["start"])


def test_each_kind_of_event_is_a_mark_with_its_words(log: LogWriter) -> None:
    log.start(0)
    log.step(1)
    log.write("checkpoint", step=1, path="/somewhere/step_1")
    log.write("checkpoint", step=1, path=None, error="disk full")
    log.write("optimizer_step_skipped", step=1, reason="overflow", scale=2.0)
    log.write("nonfinite", step=2, loss=float("nan"), grad_norm=None, action="skip")
    log.write("log", level="WARNING", message="beware")
    log.write("log", level="INFO", message="quiet")
    log.write("interrupted", step=1, signal="SIGTERM")
    log.write("train_end", step=1)
    log.start(1)
    (run,) = shown(log.file.parent)["runs"]
    assert {mark["kind"]: mark["words"] for mark in run["marks"]} == {
        "start": ["began at step 0"],
        "checkpoint": ["step 1"],
        "failed save": ["disk full"],
        "skipped update": ["step 1: overflow"],
        "not finite": ["step 2: skip"],
        "warning": ["beware"],
        "interruption": ["SIGTERM at step 1"],
        "end": ["ended at step 1"],
        "resume": ["continued at step 1"],
    }
    assert [message[1:] for message in run["messages"]] == [["WARNING", "beware"]]
    places = {mark["kind"]: column(mark["table"], "step") for mark in run["marks"]}
    assert places["warning"] == [1], "an event without a step lies at the steps around it"


def test_of_very_many_events_some_are_marked_and_all_are_counted(log: LogWriter) -> None:
    for step in range(1, 1001):
        log.write("checkpoint", step=step, path="p")
    (mark,) = shown(log.file.parent)["runs"][0]["marks"]
    steps = column(mark["table"], "step")
    assert (mark["count"], len(steps), steps[0], steps[-1]) == (1000, 400, 1, 1000)


def test_a_node_of_dumb_diloco_shows_what_it_sent_and_took(log: LogWriter) -> None:
    log.start(0)
    for step in range(1, 5):
        log.step(step, tokens=8 * step)
        log.write("delta_uploaded", seq=step, bytes=1000, session=1)
        log.write("global_installed", step=step, version=step, staleness=1, pending=0)
    log.write("delta_rejected", seq=4, session=1, reason="norm")
    log.write("delta_upload_failed", error="gone")
    page = shown(log.file.parent)
    (run,) = page["runs"]
    assert titles(page, "node_charts") == ["Version", "Staleness", "Bytes sent"]
    assert column(run["tables"]["sent"], "bytes") == [1000, 2000, 3000, 4000]
    assert column(run["tables"]["installs"], "tokens") == [8, 16, 24, 32]
    node = run["node"]
    assert (node["role"], node["bytes sent"], node["deltas refused"], node["why refused"]) == (
        "node",
        "4.0 kB",
        "1",
        "norm",
    )


def test_a_master_shows_its_versions_by_time(log: LogWriter) -> None:
    for version in (1, 2):
        log.write("outer_step", version=version, deltas=2, nodes=2, fraction=1.0, rounds=version, rejected=version - 1)
    page = shown(log.file.parent)
    assert titles(page, "node_charts") == ["Versions published", "A version's deltas"]
    outer = page["runs"][0]["tables"]["outer"]
    assert column(outer, "version") == [1, 2]
    assert "step" not in outer["columns"]
    assert page["runs"][0]["node"]["role"] == "master"


def test_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    for name in ("a", "b"):
        LogWriter(tmp_path / name).step(1)
        (tmp_path / name / "config.yaml").write_text("run: {name: same}\n", encoding="utf-8")
    read = [runs.load(tmp_path / name) for name in ("a", "b", "a")]
    assert labels(read[:1]) == ["same"]
    assert labels(read[:2]) == [f"same ({tmp_path / 'a'})", f"same ({tmp_path / 'b'})"]
    assert len(set(labels(read))) == 3


def test_samples_and_configurations_are_shown_as_text(log: LogWriter) -> None:
    log.write("sample", step=5, prompt="def ", text="f(x):")
    (log.file.parent / "config.yaml").write_text(
        "model: {extra: {deep: [1, null]}, tie_weights: false}\n", encoding="utf-8"
    )
    page = shown(log.file.parent)
    (run,) = page["runs"]
    assert run["samples"] == [{"step": 5, "prompt": "def ", "text": "f(x):"}]
    assert run["config"] == {"model.extra.deep": "[1, null]", "model.tie_weights": "false"}
    assert page["defaults"]["model.tie_weights"] == "true"
