from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, get_args

from speedtronic.config.sections import StepField
from speedtronic.metrics.events import EVENTS, event_level
from speedtronic.metrics.lines import LineFormat, duration, short_bytes, short_number
from speedtronic.metrics.records import Record
from tests.support.cases import case

STEP: dict[str, Any] = {
    "step": 120, "loss": 9.0, "lr": 3e-4, "steps_per_sec": 99.0, "samples_per_sec": 999.0, "tokens_per_sec": 99999.0,
    "samples": 960, "tokens": 122880, "micro_batches": 2, "grad_norm": 0.52345, "lr_applied": 2.9e-4,
    "interval_loss": 2.31451, "interval_steps_per_sec": 24.123, "interval_samples_per_sec": 193.0,
    "interval_tokens_per_sec": 12345.6, "peak_memory_bytes": 1_234_000_000, "eta_s": 70.4,
}  # fmt: skip


def line(event: str, payload: dict[str, Any], lines: LineFormat | None = None) -> str:
    return (lines or LineFormat()).line(Record(event, event_level(event), payload, 0.0, datetime.now(UTC)))


def test_a_step_shows_what_changes_with_the_figures_of_its_interval() -> None:
    lines = LineFormat()
    start = {"step": 100, "target_steps": 1000, "device": "cpu", "precision": "fp32", "parameters": 1_234_567}
    assert line("train_start", start, lines) == (
        "train_start  step 100/1000  device cpu  precision fp32  parameters 1.23M"
    )
    shown = line("train_step", STEP, lines)
    assert shown == "step  120/1000  loss 2.3145  lr 3.00e-04  12.3k tok/s  grad_norm 0.523"
    assert len(shown) < 80


def test_the_numbers_of_steps_stand_below_each_other() -> None:
    lines = LineFormat()
    line("train_start", {"step": 0, "target_steps": 100}, lines)
    first = line("train_step", {**STEP, "step": 9, "interval_loss": 10.25, "grad_norm": 12.5}, lines)
    second = line("train_step", {**STEP, "step": 10, "interval_tokens_per_sec": 950.0}, lines)
    last = line("train_step", {**STEP, "step": 100}, lines)
    assert first == "step   9/100  loss 10.2500  lr 3.00e-04  12.3k tok/s  grad_norm 12.500"
    assert second == "step  10/100  loss  2.3145  lr 3.00e-04    950 tok/s  grad_norm  0.523"
    assert last == "step 100/100  loss  2.3145  lr 3.00e-04  12.3k tok/s  grad_norm  0.523"


def test_fields_choose_what_a_step_shows_and_in_which_order() -> None:
    fields = ["step", "tokens", "steps_per_sec", "loss", "peak_memory_bytes", "eta_s", "mfu"]
    shown = line("train_step", STEP, LineFormat(fields))
    assert shown == "step 120  tokens 122880  24.1 steps/s  loss 2.3145  1.2 GB  eta 0:01:10"
    assert line("eval", {"step": 1, "targets": 2}, LineFormat(fields)) == "eval  step 1  targets 2"


def test_the_fields_of_the_configuration_are_those_that_steps_have() -> None:
    kind = EVENTS["train_step"]
    names = {name for name in (*kind.keys, *kind.sometimes) if not name.startswith("interval_")}
    assert set(get_args(StepField)) == names


def test_the_losses_of_several_optimizers_are_shown_by_their_names() -> None:
    payload = {**STEP, "losses": {"one": 1.25, "two": 0.5}}
    assert line("train_step", payload, LineFormat(["step", "losses"])) == "step 120  one 1.2500, two 0.5000"
    assert line("train_step", payload).endswith("grad_norm 0.523  one 1.2500, two 0.5000")


def test_a_step_of_batches_without_tokens_shows_samples_per_second() -> None:
    assert "193 samples/s" in line("train_step", {**STEP, "interval_tokens_per_sec": 0.0})
    assert "tok/s" not in line("train_step", {**STEP, "interval_tokens_per_sec": 0.0})


def test_more_values_of_a_step_and_steps_of_others_are_shown_whole() -> None:
    assert "temperature 0.5" in line("train_step", {**STEP, "temperature": 0.5})
    assert line("train_step", {"step": 7, "samples": 3, "tokens_per_sec": 5.0}) == "step 7  samples 3  5 tok/s"


def test_a_duration_is_a_clock_and_never_an_error() -> None:
    for seconds, text in ((0.4, "0:00:00"), (3661, "1:01:01"), (1e9, "11574 days, 1:46:40"), (1e300, "?")):
        with case(seconds):
            assert duration(seconds) == text
    assert duration(float("nan")) == "?"


def test_other_events_start_with_their_name() -> None:
    assert line("checkpoint", {"step": 5, "path": "runs/x", "save_s": 0.123}) == (
        "checkpoint  step 5  path runs/x  save_s 0.1"
    )


def test_values_that_are_none_are_left_out() -> None:
    assert line("train_step", {"step": 1, "grad_norm": None, "lr": 0.5}) == "step 1  lr 5.00e-01"


def test_events_that_should_not_be_missed_are_warnings() -> None:
    for event in ("nonfinite", "optimizer_step_skipped", "interrupted", "shape_warning"):
        assert line(event, {"step": 1}) == f"warning: {event}  step 1"


def test_a_tiny_or_nonfinite_loss_is_not_shown_as_zero() -> None:
    assert line("train_step", {"loss": 1.5e-7}) == "loss 1.5e-07"
    assert line("train_step", {"loss": float("nan")}) == "loss nan"
    assert line("train_step", {"loss": float("inf")}) == "loss inf"


def test_control_characters_are_escaped() -> None:
    assert line("eval", {"sample": "a\x1b[2Jb\nc\r"}) == "eval  sample a\\x1b[2Jb\\nc\\x0d"
    assert line("log", {"message": "one\ntwo\x1b"}) == "one\ntwo\\x1b"


def test_long_text_is_cut() -> None:
    assert len(line("eval", {"sample": "x" * 5000})) < 250


def test_short_number() -> None:
    for value, text in ((0.0, "0"), (7, "7"), (950.4, "950"), (12345.6, "12.3k"), (4.56e6, "4.56M"), (2e9, "2G")):
        with case(value, text):
            assert short_number(value) == text


def test_short_bytes() -> None:
    for count, text in ((0, "0 B"), (950, "950 B"), (1500, "1.5 kB"), (3.2e12, "3.2 TB")):
        with case(count, text):
            assert short_bytes(count) == text
