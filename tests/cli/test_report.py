"""`speedtronic report` writes a page, and `speedtronic runs` lists the runs of a folder."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from speedtronic.cli import main
from tests.support.logs import LogWriter


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    log = LogWriter(tmp_path / "runs/one")
    log.start(0, target=2)
    log.step(1, loss=3.0, tokens=2048)
    log.write("eval", step=1, loss=2.5)
    log.write("train_end", step=1)
    (tmp_path / "runs/one/run.json").write_text(json.dumps({"run_id": "a" * 32}), encoding="utf-8")
    return tmp_path / "runs"


def test_a_report_lies_in_the_folder_of_the_first_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(folder / "one"), str(folder / "one/metrics.jsonl")]) == 0
    page = folder / "one/report.html"
    assert page.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    assert capsys.readouterr().out.startswith(f"{page} (")


def test_a_report_is_written_where_it_is_wanted_and_says_what_it_left_out(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with (folder / "one/metrics.jsonl").open("a", encoding="ascii") as file:
        file.write("torn\n")
    assert main(["report", str(folder / "one"), "-o", str(tmp_path / "r.html")]) == 0
    assert (tmp_path / "r.html").is_file()
    assert "1 line of the log cannot be read" in capsys.readouterr().err


def test_what_cannot_be_reported_is_one_message_and_exit_code_2(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = str(folder / "one")
    (tmp_path / "empty").mkdir()
    for words, message in (
        ([str(tmp_path / "absent")], "there is no such run"),
        ([str(tmp_path / "empty")], "logging.json_file=metrics.jsonl"),
        ([one, "-o", str(tmp_path / "absent/r.html")], "name another file with -o"),
        ([one, "--port", "80"], "--port is of the server of --live"),
        ([one, "--live", "-o", "r.html"], "choose one"),
        ([one, "--live", "--port", "70000"], "from 0 to 65535"),
    ):
        assert main(["report", *words]) == 2, words
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1, error


def test_a_live_report_says_where_it_is_and_ends_with_ctrl_c(folder: Path) -> None:
    command = [sys.executable, "-m", "speedtronic", "report", str(folder / "one"), "--live"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = process.stdout.readline().split()[0]
        assert url.startswith("http://127.0.0.1:")
        with urllib.request.urlopen(url) as answer:
            assert b"<title>one</title>" in answer.read()
        process.send_signal(2)
        _, error = process.communicate(timeout=60)
    assert (process.returncode, error) == (130, "")


def test_runs_are_listed_with_how_far_and_how_good_they_are(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    unlogged = folder / "group/two"
    unlogged.mkdir(parents=True)
    (unlogged / "run.json").write_text("{}", encoding="utf-8")
    assert main(["runs", str(folder)]) == 0
    lines = [line.split()[:-1] for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        ["RUN", "STATUS", "STEP", "LOSS", "EVAL", "LOSS", "TOKENS"],
        ["group/two", "no", "log", "-", "-", "-", "-"],
        ["one", "finished", "1/2", "3.0000", "2.5000", "2.05k"],
    ]
    assert main(["runs", str(folder), "--json"]) == 0
    assert [(run["step"], run["eval_loss"]) for run in json.loads(capsys.readouterr().out)] == [(None, None), (1, 2.5)]


def test_a_folder_without_runs_and_one_that_is_not_there_are_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["runs", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"no runs in {tmp_path}\n"
    assert main(["runs", str(tmp_path / "absent")]) == 2
    assert "name a folder that holds runs" in capsys.readouterr().err
