"""Weights & Biases in its offline mode, read from the files that `wandb sync` would send."""

from __future__ import annotations

import json
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from speedtronic.metrics import MetricLogger, WandbHook
from speedtronic.metrics.tracker_feed import opener_of
from tests.support.models import Silence
from tests.support.tracking import EVAL_LOSS, RUN_ID, TRAIN_LOSS, Tracked, track_and_resume

pytest.importorskip("wandb", reason="speedtronic[wandb] is not installed")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]  # its imports take seconds, and warn


@pytest.fixture(autouse=True)
def _offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    for name in ("WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR", "HOME"):
        monkeypatch.setenv(name, str(tmp_path / "home"))


def records(file: Path) -> Iterator[Any]:
    """The records of a `.wandb` file: seven bytes, then blocks as in LevelDB's log format."""
    record = import_module("wandb.proto.wandb_internal_pb2").Record
    data, begin, block, whole = file.read_bytes(), 7, 2**15, b""
    while begin + 7 <= len(data):
        if block - begin % block < 7:  # no room for a header: the block is padded
            begin += block - begin % block
            continue
        length, kind = struct.unpack("<4xHB", data[begin : begin + 7])
        whole += data[begin + 7 : begin + 7 + length]
        begin += 7 + length
        if kind in (1, 4):  # a full record, or the last part of one
            yield record.FromString(whole)
            whole = b""


def curve(files: list[Path], tag: str) -> list[tuple[int, float]]:
    import_module("wandb").teardown()  # its own process writes the files, and has written them when it has ended
    points = []
    for record in (record for file in files for record in records(file)):
        items = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        if tag in items:
            points.append((items["_step"], items[tag]))
    return points


def test_a_resumed_run_continues_its_curve_under_the_same_id(tmp_path: Path) -> None:
    track_and_resume(tmp_path, "wandb")
    files = sorted(tmp_path.glob(f"trackers/wandb/offline-run-*-{RUN_ID}/run-{RUN_ID}.wandb"))
    assert curve(files, "train/loss") == TRAIN_LOSS
    assert curve(files, "eval/loss") == EVAL_LOSS
    (run, *_) = [record.run for record in records(files[0]) if record.HasField("run")]
    assert (run.run_id, run.project, run.display_name) == (RUN_ID, "speedtronic", "my run")
    config = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert config["distributed"] == {"token": "<redacted>"}


def test_the_hook_takes_the_arguments_of_wandb(tmp_path: Path) -> None:
    hook = WandbHook("mine", name="a name", mode="offline", dir=str(tmp_path / "here"), config={"lr": 0.5})
    with MetricLogger(stream=Silence(), hooks=[hook], hook_patience=300.0) as logger:
        logger.emit("train_step", {"step": 1, "loss": 2.5})
        logger.emit("train_end", {"step": 1, "final_loss": 2.5})
    hook.close()
    (file,) = tmp_path.glob("here/wandb/offline-run-*/run-*.wandb")
    assert curve([file], "train/loss") == [(1, 2.5)]
    (run, *_) = [record.run for record in records(file) if record.HasField("run")]
    assert (run.project, run.display_name) == ("mine", "a name")


def test_without_a_key_it_says_how_to_log_in_and_asks_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    import_module("wandb").teardown()  # what it knows of the environment
    tracked = Tracked(tmp_path, opener_of("wandb"), patience=120.0)
    tracked.start()
    tracked.close()
    assert "run `wandb login`, set WANDB_API_KEY, or set WANDB_MODE=offline" in tracked.messages[0]
    import_module("wandb").teardown()


def test_a_server_that_hangs_ends_neither_the_run_nor_keeps_its_process(tmp_path: Path) -> None:
    code = """
import sys
from pathlib import Path
from speedtronic.metrics.tracker_feed import opener_of
from tests.support.tracking import Tracked
tracked = Tracked(Path(sys.argv[1]), opener_of("wandb"), patience=5.0)
tracked.start()
tracked.steps(1, 8)
tracked.close()
print(tracked.messages)
"""
    with socket.create_server(("127.0.0.1", 0)) as server:  # takes connections, and never answers
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        ended = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path)],
            env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "WANDB_BASE_URL": address, "WANDB_API_KEY": "a" * 40},
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
            timeout=200,
        )
    assert ended.returncode == 0, ended.stderr
    assert "did not take all of this run" in ended.stdout
