"""Trackio, which keeps its runs on this machine."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

from tests.support.tracking import EVAL_LOSS, RUN_ID, TRAIN_LOSS, track_and_resume

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]  # its imports take seconds, and warn


def test_a_resumed_run_continues_its_curve_in_the_same_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # read when trackio is imported
    pytest.importorskip("trackio", reason="speedtronic[trackio] is not installed")
    track_and_resume(tmp_path, "trackio")
    storage = import_module("trackio.sqlite_storage").SQLiteStorage
    assert storage.get_runs("speedtronic") == [f"my run-{RUN_ID[:8]}"]
    logs = storage.get_logs("speedtronic", f"my run-{RUN_ID[:8]}")
    for tag, points in (("train/loss", TRAIN_LOSS), ("eval/loss", EVAL_LOSS)):
        assert [(log["step"], log[tag]) for log in logs if tag in log] == points
