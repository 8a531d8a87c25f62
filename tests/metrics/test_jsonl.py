from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

from hypothesis import given
from hypothesis import strategies as st

from speedtronic.metrics.jsonl import JsonlSink, encode_line
from speedtronic.metrics.records import INFO, Record

TIME = datetime(2030, 1, 2, 3, 4, 5, tzinfo=UTC)


def record(event: str, payload: dict[str, Any]) -> Record:
    return Record(event, INFO, payload, 1.25, TIME)


def refuse(constant: str) -> NoReturn:
    raise AssertionError(f"{constant} is not JSON")


def parse(line: str) -> dict[str, Any]:
    fields = json.loads(line, parse_constant=refuse)
    assert isinstance(fields, dict)
    return fields


def test_a_line_holds_event_payload_elapsed_and_time(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "new" / "folder" / "log.jsonl")
    sink.write(record("train_step", {"step": 1, "loss": 2.5}))
    assert parse((tmp_path / "new/folder/log.jsonl").read_text()) == {
        "event": "train_step",
        "step": 1,
        "loss": 2.5,
        "elapsed_s": 1.25,
        "time": "2030-01-02T03:04:05.000+00:00",
    }


def test_a_nonfinite_number_is_null_and_its_key_listed() -> None:
    payload = {"loss": math.nan, "lr": 0.1, "nested": {"a": [1.0, -math.inf]}}
    line = parse(encode_line(record("nonfinite", payload)))
    assert line["loss"] is None
    assert line["lr"] == 0.1
    assert line["nested"] == {"a": [1.0, None]}
    assert line["nonfinite"] == ["loss", "nested.a.1"]


def test_event_elapsed_and_time_mean_the_same_on_every_line() -> None:
    line = parse(encode_line(record("train_end", {"event": "x", "time": "y", "elapsed_s": 9.0})))
    assert (line["event"], line["elapsed_s"]) == ("train_end", 1.25)
    assert line["time"].startswith("2030")


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(), values, max_size=5))
def test_with_any_payload_a_line_is_one_strict_json_object(payload: dict[str, Any]) -> None:
    line = encode_line(record("eval", payload))
    assert "\n" not in line
    assert line.isascii()
    assert parse(line)["event"] == "eval"


def test_a_resumed_run_appends_on_a_new_line_after_a_line_that_was_cut(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text('{"event":"a"}\n{"event":"b","st')
    JsonlSink(path).write(record("c", {}))
    lines = path.read_text().splitlines()
    assert lines[:2] == ['{"event":"a"}', '{"event":"b","st']
    assert parse(lines[2])["event"] == "c"


def test_every_line_survives_kill_nine(tmp_path: Path) -> None:
    program = (
        "import sys, os, signal\n"
        "from speedtronic.metrics import MetricLogger\n"
        "logger = MetricLogger(json_file=sys.argv[1])\n"
        "for step in range(1, 51): logger.emit('train_step', {'step': step})\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    path = tmp_path / "log.jsonl"
    result = subprocess.run([sys.executable, "-c", program, os.fspath(path)], stdout=subprocess.DEVNULL, check=False)
    assert result.returncode == -signal.SIGKILL
    assert [parse(line)["step"] for line in path.read_text().splitlines()] == list(range(1, 51))
