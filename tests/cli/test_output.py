from __future__ import annotations

import argparse
import io
import logging
import os
import signal
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import pytest

from speedtronic.cli import configuration, main
from speedtronic.cli.output import (
    CountingFileSystem,
    age,
    counted,
    prepare,
    termination_unwinds,
    write_facts,
    write_table,
)
from speedtronic.durable.files import DamagedFileError
from speedtronic.errors import SpeedtronicWarning

# ---------------------------------------------------------------------- the standard output


COMMAND = f"{sys.executable} -m speedtronic"


def shell(line: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sh", "-c", line], capture_output=True, text=True, env={**os.environ, **environment}, check=False
    )


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "c.yaml"
    path.write_text("max_steps: 3\n", encoding="utf-8")
    return path


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("arguments", ["validate {file}", "schema", "--help"])
def test_a_full_disk_behind_the_output_is_one_message(arguments: str, file: Path) -> None:
    result = shell(f"{COMMAND} {arguments.format(file=file)} > /dev/full")
    message = "error: cannot write to the standard output: No space left on device\n"
    assert (result.returncode, result.stderr) == (1, message)


@pytest.mark.parametrize("arguments", ["validate {file}", "schema", "--help"])
def test_a_closed_output_is_no_fault(arguments: str, file: Path) -> None:
    result = shell(f"{COMMAND} {arguments.format(file=file)} >&-")
    assert (result.returncode, result.stderr) == (0, "")


def test_what_the_encoding_lacks_is_escaped(file: Path) -> None:
    result = shell(f"{COMMAND} validate {file} run.name=ü", PYTHONIOENCODING="ascii")
    assert (result.returncode, result.stderr) == (0, "")
    assert "name: \\xfc\n" in result.stdout


def test_a_reader_that_has_gone_ends_it_quietly() -> None:
    result = shell(f"({COMMAND} schema; echo $? >&2) | true")
    assert result.stderr == "0\n"


class Broken(io.StringIO):
    def flush(self) -> None:
        raise OSError(5, "Input/output error")


def test_a_fault_of_the_output_is_told_from_one_of_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(args: argparse.Namespace) -> int:
        raise OSError(28, "No space left on device", "a/file/of/the/run")

    with monkeypatch.context() as patch:
        patch.setattr(configuration, "run_schema", fail)
        assert main(["schema"]) == 1
    text = capsys.readouterr().err
    assert "Traceback" in text
    assert "a/file/of/the/run" in text

    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", Broken())
        assert main(["schema"]) == 1
    assert capsys.readouterr().err == "error: cannot write to the standard output: Input/output error\n"


@pytest.mark.parametrize("place", ["speedtronic.cli.build_parser", "speedtronic.cli.output.prepare"])
def test_an_interrupt_anywhere_is_130_without_a_traceback(
    place: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(place, interrupt)
    assert main(["schema"]) == 130
    assert capsys.readouterr() == ("", "")


def test_user_code_that_exits_with_a_reason_is_an_error_that_says_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def give_up() -> None:
        sys.exit("no data today")

    monkeypatch.setattr("speedtronic.cli.build_parser", give_up)
    assert main(["schema"]) == 1
    assert capsys.readouterr().err == "no data today\n"


# ---------------------------------------------------------------------- facts and tables


FACTS = [("folder", "data/[bold]corpus"), ("tokens", "1,234")]


def test_facts_are_plain_lines_where_no_terminal_is(capsys: pytest.CaptureFixture[str]) -> None:
    write_facts(FACTS)

    assert capsys.readouterr().out == "folder: data/[bold]corpus\ntokens: 1,234\n"


def test_facts_are_a_table_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)

    write_facts(FACTS)

    table = capsys.readouterr().out
    assert "│ folder │ data/[bold]corpus │" in table
    assert "│ tokens │ 1,234             │" in table


def test_a_number_of_things_is_told_in_words() -> None:
    assert [counted(number, "file") for number in (0, 1, 1200)] == ["0 files", "1 file", "1,200 files"]


HEADINGS = ("NODE", "STEP")
ROWS = [("[bold]anna", "7"), ("b", "1200")]


def test_a_table_is_plain_columns_where_no_terminal_is(capsys: pytest.CaptureFixture[str]) -> None:
    write_table(HEADINGS, ROWS)

    assert capsys.readouterr().out == "NODE        STEP\n[bold]anna  7\nb           1200\n"


def test_a_table_has_a_frame_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)

    write_table(HEADINGS, ROWS)

    table = capsys.readouterr().out
    assert "NODE" in table.splitlines()[1]
    assert "│ [bold]anna │ 7    │" in table


@pytest.mark.parametrize(
    ("seconds", "text"), [(-3, "0s"), (0, "0s"), (59.9, "59s"), (60, "1m"), (7199, "1h"), (86400 * 2, "2d")]
)
def test_an_age_is_told_in_its_largest_unit(seconds: float, text: str) -> None:
    assert age(seconds) == text


# ---------------------------------------------------------------------- progress


def test_every_byte_that_is_read_is_counted(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(1000))
    counts: list[int] = []
    with CountingFileSystem(counts.append).open(tmp_path / "file") as file:
        assert file.readinto(bytearray(600)) == 600
        assert file.readinto(bytearray(600)) == 400
        assert file.readinto(bytearray(600)) == 0
    assert counts == [600, 400, 0]


def test_what_is_no_plain_file_is_refused_as_ever(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "file")
    with pytest.raises(DamagedFileError, match="not a plain file"):
        CountingFileSystem(lambda count: None).open(tmp_path / "link")


# ---------------------------------------------------------------------- interrupts


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_by_an_exception_and_the_former_handlers_are_back(number: signal.Signals) -> None:
    def work() -> None:
        with termination_unwinds():
            try:
                signal.raise_signal(number)
            finally:
                signal.raise_signal(signal.SIGTERM)  # does not interrupt the removal
                signal.raise_signal(signal.SIGHUP)

    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)]
    with pytest.raises(SystemExit) as stop:
        work()
    assert stop.value.code == 128 + number
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)] == before


def test_a_hangup_that_is_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with termination_unwinds():
            signal.raise_signal(signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_in_another_thread_nothing_is_changed() -> None:
    before = signal.getsignal(signal.SIGTERM)
    seen = []

    def look() -> None:
        with termination_unwinds():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert seen == [before]


def test_what_modules_warn_of_or_log_is_printed_like_any_warning() -> None:
    prepare()
    for category, right in ((SpeedtronicWarning, "warning: reading again\n"), (UserWarning, "a.py:3: UserWarning: ")):
        assert warnings.formatwarning("reading again", category, "a.py", 3).startswith(right)
    assert logging.lastResort is not None
    record = logging.LogRecord("speedtronic.data", logging.WARNING, "", 0, "reading %d batches again", (3,), None)
    assert logging.lastResort.format(record) == "warning: reading 3 batches again"
