from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from speedtronic.metrics.records import INFO, LOG, WARNING, Record
from speedtronic.metrics.textfile import TextFileSink

TIME = datetime(2030, 1, 2, 3, 4, 5, tzinfo=UTC)


def test_lines_have_time_level_and_the_consoles_text(tmp_path: Path) -> None:
    sink = TextFileSink(tmp_path / "log.txt", INFO)
    sink.write(Record("train_step", INFO, {"step": 1, "loss": 5.5452}, 0.0, TIME))
    sink.write(Record(LOG, WARNING, {"message": "naïve"}, 0.0, TIME))
    sink.close()
    assert (tmp_path / "log.txt").read_text(encoding="utf-8").splitlines() == [
        "2030-01-02T03:04:05+00:00 INFO step 1  loss 5.5452",
        "2030-01-02T03:04:05+00:00 WARNING warning: naïve",
    ]


def test_records_below_the_level_are_left_out(tmp_path: Path) -> None:
    sink = TextFileSink(tmp_path / "log.txt", WARNING)
    sink.write(Record("train_step", INFO, {"step": 1}, 0.0, TIME))
    sink.close()
    assert (tmp_path / "log.txt").read_text() == ""
