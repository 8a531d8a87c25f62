from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from speedtronic.cli import data
from speedtronic.errors import DataError

FULL = "error: cannot write to the standard output: No space left on device\n"


def run(*arguments: str | Path) -> int:
    parser = argparse.ArgumentParser()
    data.add_parser(parser.add_subparsers())
    args = parser.parse_args(["data", *map(str, arguments)])
    code: int = args.run(args)
    return code


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("To be, or not to be:\n\x1b[31mred\x1b[0m\ttab\x7f end")
    return path


@pytest.fixture
def prepared(tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    run("prepare", text, "--out", tmp_path / "out")
    capsys.readouterr()
    return tmp_path / "out"


def test_inspect_shows_facts_and_the_head_in_plain_lines(prepared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("inspect", prepared, "--head", "20") == 0

    facts, head = capsys.readouterr().out.split("\n\n")
    assert facts.splitlines()[:8] == [
        f"folder: {prepared}",
        "tokens: 43",
        "documents: 1",
        "document length: 43 to 43 tokens, median 43",
        "dtype: uint16",
        "tokenizer: bytes, vocabulary 256",
        "shards: 1",
        "origin: files",
    ]
    assert re.fullmatch(r"fingerprint: [0-9a-f]{64}", facts.splitlines()[8])
    assert head == "To be, or not to be:\n"


def test_what_a_text_holds_does_not_steer_the_terminal(prepared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("inspect", prepared)

    head = capsys.readouterr().out.split("\n\n")[1]
    assert head == "To be, or not to be:\n\u241b[31mred\u241b[0m\ttab\ufffd end\u2400\n"


def test_inspect_shows_no_head_when_none_is_wanted(prepared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("inspect", prepared, "--head", "0")

    assert "To be" not in capsys.readouterr().out


def test_inspect_draws_a_table_on_a_terminal(
    prepared: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)

    run("inspect", prepared)

    assert re.search(r"│ tokens +│ 43 ", capsys.readouterr().out)


def test_inspect_verifies_checksums(prepared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("inspect", prepared, "--verify") == 0
    assert "checksums: all match" in capsys.readouterr().out

    shard = prepared / "shard_00000.bin"
    shard.write_bytes(shard.read_bytes()[:-1] + b"\x01")
    with pytest.raises(DataError, match=r"shard_00000\.bin does not match its checksum"):
        run("inspect", prepared, "--verify")


def test_inspect_tells_the_lengths_of_documents(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, length in (("a", 1), ("b", 4), ("c", 1999)):
        (tmp_path / f"{name}.txt").write_text("x" * length)
    run("prepare", tmp_path, "--out", tmp_path / "out", "--shard-tokens", "700")

    run("inspect", tmp_path / "out")

    assert "document length: 2 to 2,000 tokens, median 5\n" in capsys.readouterr().out


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a disk that is always full")
def test_an_output_that_cannot_be_written_is_no_traceback(prepared: Path) -> None:
    command = [sys.executable, "-m", "speedtronic", "data", "inspect", str(prepared)]
    with open("/dev/full", "w") as full:
        found = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (found.returncode, found.stderr) == (1, FULL)

    reading, writing = os.pipe()
    os.close(reading)
    found = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    assert (found.returncode, found.stderr) == (0, "")
