from __future__ import annotations

import argparse
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from speedtronic.cli import main, schema

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
        patch.setattr(schema, "run", fail)
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
