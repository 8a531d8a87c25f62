from __future__ import annotations

import errno
import io
import json
import threading
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from speedtronic.errors import ConfigError
from speedtronic.metrics import MetricLogger, TrainingHook
from speedtronic.metrics.appendfile import AppendFile
from tests.support.cases import case


class Clock:
    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_an_event_reaches_console_text_file_json_lines_and_hooks(tmp_path: Path) -> None:
    stream = io.StringIO()
    heard: list[tuple[str, dict[str, Any]]] = []
    logger = MetricLogger(
        file=tmp_path / "log.txt",
        json_file=tmp_path / "log.jsonl",
        stream=stream,
        hooks=[lambda event, payload: heard.append((event, payload))],
    )
    logger.emit("train_step", {"step": 1, "loss": 2.5})
    logger.close()
    assert stream.getvalue() == "step 1  loss 2.5000\n"
    assert (tmp_path / "log.txt").read_text().endswith(" INFO step 1  loss 2.5000\n")
    assert lines_of(tmp_path / "log.jsonl")[0]["loss"] == 2.5
    assert heard == [("train_step", {"step": 1, "loss": 2.5})]


def test_train_steps_reach_sinks_by_cadence_and_hooks_always() -> None:
    stream = io.StringIO()
    steps_heard: list[int] = []
    logger = MetricLogger(
        every_steps=3, stream=stream, hooks=[lambda event, payload: steps_heard.append(payload["step"])]
    )
    for step in range(1, 8):
        logger.emit("train_step", {"step": step})
    assert stream.getvalue() == "step 3\nstep 6\n"
    assert steps_heard == [1, 2, 3, 4, 5, 6, 7]


def test_the_last_step_is_logged_however_the_run_ends(tmp_path: Path) -> None:
    for name, target, rest in (
        ("at the target", 5, [("train_end", {"step": 5})]),
        ("by a signal", 100, [("interrupted", {"step": 5}), ("train_end", {"step": 5})]),
        ("stopped", 100, [("train_end", {"step": 5})]),
        ("with an error", 100, []),
    ):
        with case(name):
            stream = io.StringIO()
            with MetricLogger(every_steps=3, stream=stream, json_file=tmp_path / f"{name}.jsonl") as logger:
                logger.emit("train_start", {"step": 0, "target_steps": target})
                for step in range(1, 6):
                    logger.emit("train_step", {"step": step})
                for event, payload in rest:
                    logger.emit(event, payload)
            shown = [line.split() for line in stream.getvalue().splitlines() if line.startswith("step")]
            assert shown == [["step", f"3/{target}"], ["step", f"5/{target}"]]
            events = [line["event"] for line in lines_of(tmp_path / f"{name}.jsonl")]
            assert events == ["train_start", "train_step", "train_step", *(event for event, _ in rest)]


def test_a_step_that_is_logged_late_has_the_time_when_it_happened(tmp_path: Path) -> None:
    clock = Clock()
    logger = MetricLogger(every_steps=10, json_file=tmp_path / "l.jsonl", stream=io.StringIO(), clock=clock)
    clock.seconds += 1.5
    logger.emit("train_step", {"step": 7})
    clock.seconds += 60.0
    logger.close()
    assert lines_of(tmp_path / "l.jsonl")[0]["elapsed_s"] == 1.5


def test_the_cadence_is_for_train_steps_only() -> None:
    stream = io.StringIO()
    MetricLogger(every_steps=100, stream=stream).emit("eval", {"step": 7, "loss": 1.0})
    assert stream.getvalue() == "eval  step 7  loss 1.0000\n"


def test_the_level_filters_console_and_text_file_but_not_json_lines(tmp_path: Path) -> None:
    stream = io.StringIO()
    logger = MetricLogger("warning", file=tmp_path / "l.txt", json_file=tmp_path / "l.jsonl", stream=stream)
    logger.info("quiet")
    logger.emit("train_start", {"step": 0})
    logger.warning("loud")
    logger.emit("nonfinite", {"step": 3})
    assert stream.getvalue() == "warning: loud\nwarning: nonfinite  step 3\n"
    assert len((tmp_path / "l.txt").read_text().splitlines()) == 2
    assert [line["event"] for line in lines_of(tmp_path / "l.jsonl")] == [
        "log",
        "train_start",
        "log",
        "nonfinite",
    ]


def test_messages_are_log_events_with_their_level(tmp_path: Path) -> None:
    logger = MetricLogger(json_file=tmp_path / "l.jsonl", stream=io.StringIO())
    logger.info("a")
    logger.warning("b")
    logger.error("c")
    found = [(line["level"], line["message"]) for line in lines_of(tmp_path / "l.jsonl")]
    assert found == [("INFO", "a"), ("WARNING", "b"), ("ERROR", "c")]


def test_elapsed_time_starts_with_the_logger_and_time_is_utc(tmp_path: Path) -> None:
    clock = Clock()
    logger = MetricLogger(
        json_file=tmp_path / "l.jsonl",
        stream=io.StringIO(),
        clock=clock,
        now=lambda: datetime(2030, 1, 2, 3, 4, 5, tzinfo=UTC),
    )
    clock.seconds += 2.5
    logger.info("x")
    line = lines_of(tmp_path / "l.jsonl")[0]
    assert line["elapsed_s"] == 2.5
    assert line["time"] == "2030-01-02T03:04:05.000+00:00"


class Recorder:
    def __init__(self) -> None:
        self.events: list[str] = []

    def on_event(self, event: str, payload: dict[str, Any]) -> None:
        self.events.append(event)


class Failing(Recorder):
    def on_event(self, event: str, payload: dict[str, Any]) -> None:
        super().on_event(event, payload)
        raise RuntimeError("no network")


def test_a_hook_may_be_an_object_with_on_event_and_may_be_added_later() -> None:
    recorder = Recorder()
    assert isinstance(recorder, TrainingHook)
    logger = MetricLogger(stream=io.StringIO())
    logger.emit("train_start", {})
    logger.add_hook(recorder)
    logger.emit("train_end", {})
    assert recorder.events == ["train_end"]


def test_a_failing_hook_is_logged_with_its_name_and_called_again_on_the_next_event() -> None:
    stream = io.StringIO()
    failing, recorder = Failing(), Recorder()
    logger = MetricLogger(stream=stream, hooks=[failing, recorder])
    logger.emit("train_start", {})
    logger.emit("train_end", {})
    assert failing.events == recorder.events == ["train_start", "train_end"]
    text = stream.getvalue()
    assert "warning: hook Failing failed on train_start: RuntimeError: no network" in text
    assert "warning: hook Failing failed on train_end: RuntimeError: no network" in text
    assert text.count("Traceback") == 1


def test_a_hook_that_changes_its_payload_does_not_change_the_others() -> None:
    seen: list[dict[str, Any]] = []
    payload = {"step": 1}
    logger = MetricLogger(
        stream=io.StringIO(),
        hooks=[lambda event, payload: payload.clear(), lambda event, payload: seen.append(payload)],
    )
    logger.emit("eval", payload)
    assert seen == [{"step": 1}]
    assert payload == {"step": 1}


def test_a_hook_may_log_while_it_handles_an_event() -> None:
    stream = io.StringIO()
    logger = MetricLogger(stream=stream)
    logger.add_hook(lambda event, payload: logger.info("heard"))
    logger.emit("eval", {})
    assert stream.getvalue() == "eval\nheard\n"


def test_an_object_that_cannot_be_a_hook_is_refused() -> None:
    with pytest.raises(TypeError, match="on_event"):
        MetricLogger(hooks=[object()])  # type: ignore[list-item]


def test_wrong_arguments_are_config_errors_that_name_the_key() -> None:
    for arguments, key in (
        ({"level": "LOUD"}, "logging.level"),
        ({"every_steps": 0}, "logging.every_steps"),
        ({"progress": "maybe"}, "logging.progress"),
    ):
        with case(arguments, key), pytest.raises(ConfigError, match=key):
            MetricLogger(**arguments)


def test_a_file_that_cannot_be_opened_is_one_error_before_training(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"logging\.json_file: cannot write to .*: Is a directory"):
        MetricLogger(json_file=tmp_path)


def test_a_full_disk_is_reported_once_and_each_line_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = io.StringIO()
    logger = MetricLogger(json_file=tmp_path / "l.jsonl", stream=stream)
    write_line = AppendFile.write_line
    full = True

    def write_line_or_fail(self: AppendFile, line: bytes) -> None:
        if full:
            raise OSError(errno.ENOSPC, "No space left on device")
        write_line(self, line)

    monkeypatch.setattr(AppendFile, "write_line", write_line_or_fail)
    for step in range(3):
        logger.emit("eval", {"step": step})
    assert stream.getvalue().count("No space left on device; training goes on") == 1
    full = False
    logger.emit("eval", {"step": 3})
    assert [line["step"] for line in lines_of(tmp_path / "l.jsonl")] == [3]
    full = True
    logger.emit("eval", {"step": 4})
    assert stream.getvalue().count("No space left on device; training goes on") == 2


def test_closing_twice_is_harmless_and_a_later_event_appends(tmp_path: Path) -> None:
    with MetricLogger(json_file=tmp_path / "l.jsonl", stream=io.StringIO()) as logger:
        logger.info("a")
        logger.close()
    logger.close()
    logger.info("b")
    logger.close()
    assert [line["message"] for line in lines_of(tmp_path / "l.jsonl")] == ["a", "b"]


def test_threads_do_not_mix_their_lines(tmp_path: Path) -> None:
    logger = MetricLogger(json_file=tmp_path / "l.jsonl", stream=io.StringIO())

    def emit_many() -> None:
        for _ in range(200):
            logger.emit("eval", {"text": "x" * 100})

    threads = [threading.Thread(target=emit_many) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(lines_of(tmp_path / "l.jsonl")) == 800


def test_an_impossible_path_is_named_as_it_was_given() -> None:
    with pytest.raises(ConfigError, match=r"logging\.file: cannot write to 'a\\x00b'"):
        MetricLogger(file="a\0b")


@pytest.mark.parametrize("step", ["three", None, [], 10**5000, float("nan")], ids=type)
def test_any_step_and_any_message_can_be_emitted(tmp_path: Path, step: object) -> None:
    with MetricLogger(
        every_steps=2, file=tmp_path / "l.txt", json_file=tmp_path / "l.jsonl", stream=io.StringIO()
    ) as logger:
        logger.emit("train_step", {"step": step, "tokens_per_sec": 10**400})
        logger.emit("log", {"anything": step})
    assert {line["event"] for line in lines_of(tmp_path / "l.jsonl")} == {"train_step", "log"}


def test_every_line_has_the_id_of_the_run(tmp_path: Path) -> None:
    with MetricLogger(json_file=tmp_path / "l.jsonl", stream=io.StringIO(), run_id="ab" * 16) as logger:
        logger.info("a")
        logger.emit("train_step", {"step": 1, "run_id": "of a payload"})
    assert [line["run_id"] for line in lines_of(tmp_path / "l.jsonl")] == ["ab" * 16] * 2
    first, second = (MetricLogger(stream=io.StringIO()).run_id for _ in range(2))
    assert first != second
