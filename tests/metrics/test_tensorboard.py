"""Event files of TensorBoard, read by TensorBoard itself."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from speedtronic.metrics import MetricLogger, TensorboardHook
from tests.support.models import Silence
from tests.support.tracking import BEGAN, EVAL_LOSS, RUN_ID, TRAIN_LOSS, track_and_resume

pytest.importorskip("tensorboard", reason="speedtronic[tensorboard] is not installed")


def events_in(folder: Path) -> Any:
    accumulator = import_module("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return events


def curve(events: Any, tag: str) -> list[tuple[int, float]]:
    return [(scalar.step, scalar.value) for scalar in events.Scalars(tag)]


def test_a_resumed_run_continues_its_curve(tmp_path: Path) -> None:
    track_and_resume(tmp_path, "tensorboard")
    folder = tmp_path / "trackers" / f"tensorboard-{RUN_ID[:8]}"
    assert len(list(folder.iterdir())) == 2
    events = events_in(folder)
    assert events.Tags()["scalars"] == ["train/loss", "eval/loss"]
    assert curve(events, "train/loss") == TRAIN_LOSS
    assert curve(events, "eval/loss") == EVAL_LOSS
    assert events.Scalars("train/loss")[0].wall_time == BEGAN.timestamp()
    (text,) = {event.tensor_proto.string_val[0].decode() for event in events.Tensors("configuration")}
    assert '"max_steps": 8' in text
    assert '"token": "<redacted>"' in text


def test_the_hook_writes_the_numbers_of_every_event(tmp_path: Path) -> None:
    hook = TensorboardHook(str(tmp_path))
    logger = MetricLogger(stream=Silence(), hooks=[hook], every_steps=100)
    logger.emit("train_start", {"step": 0, "target_steps": 2})
    logger.emit("train_step", {"step": 1, "loss": 2.5, "grad_norm": float("nan"), "note": "x"})
    logger.emit("eval", {"step": 1, "loss": 2.25})
    logger.emit("train_step", {"step": 2, "loss": 2.0})
    logger.emit("train_end", {"step": 2, "final_loss": 2.0})
    events = events_in(tmp_path)  # what was written by the end of a run is on the disk, without `close`
    assert events.Tags()["scalars"] == ["train/loss", "eval/loss"]
    assert curve(events, "train/loss") == [(1, 2.5), (2, 2.0)]
    hook.close()
    hook.close()
    logger.emit("eval", {"step": 2, "loss": 1.5})
    hook.close()
    assert curve(events_in(tmp_path), "eval/loss") == [(1, 2.25), (2, 1.5)]
    logger.close()
