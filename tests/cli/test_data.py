from __future__ import annotations

import argparse
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from speedtronic.cli import data, main
from speedtronic.data.shards import ShardWriter
from speedtronic.data.tokenizers import IdArray
from speedtronic.errors import DataError


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


def test_prepare_says_what_it_made(tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("prepare", text, "--out", tmp_path / "out") == 0

    made = capsys.readouterr().out
    assert made == f"prepared: {tmp_path / 'out'}: 43 tokens, 1 document, 1 shard, vocabulary 256\n"


def test_prepare_says_when_there_is_nothing_to_do(
    text: Path, prepared: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("prepare", text, "--out", prepared) == 0

    assert capsys.readouterr().out.startswith("already prepared: ")


def test_prepare_takes_its_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.rst").write_text("abcab")
    (tmp_path / "b.txt").write_text("xyz")
    options = ["--tokenizer", "chars", "--pattern", "*.rst", "--shard-tokens", "4", "--seed", "3"]

    assert run("prepare", tmp_path, "--out", tmp_path / "out", *options) == 0
    assert "6 tokens, 1 document, 2 shards, vocabulary 4" in capsys.readouterr().out


def test_prepare_refuses_a_prepared_folder_without_force(tmp_path: Path, prepared: Path) -> None:
    (tmp_path / "other.txt").write_text("other")

    with pytest.raises(DataError, match="--force"):
        run("prepare", tmp_path / "other.txt", "--out", prepared)
    assert run("prepare", tmp_path / "other.txt", "--out", prepared, "--force") == 0


def test_prepare_says_what_a_source_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "good.py").write_text("x = 1")
    (tmp_path / "bad.py").write_bytes(b"\xff")
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))

    run("prepare", "--source", "python-stdlib", "--out", tmp_path / "out")

    assert "left out, not being UTF-8 text: 1 file" in capsys.readouterr().out


def test_inspect_shows_facts_and_the_head_in_plain_lines(prepared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("inspect", prepared, "--head", "20") == 0

    facts, head = capsys.readouterr().out.split("\n\n")
    assert facts.splitlines()[:7] == [
        f"folder: {prepared}",
        "tokens: 43",
        "documents: 1",
        "dtype: uint16",
        "tokenizer: bytes, vocabulary 256",
        "shards: 1",
        "origin: files",
    ]
    assert re.fullmatch(r"fingerprint: [0-9a-f]{64}", facts.splitlines()[7])
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


def test_an_error_is_one_line_and_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["data", "prepare", str(tmp_path / "gone.txt"), "--out", str(tmp_path / "out")])

    assert code == 2
    assert capsys.readouterr().err == f"error: {tmp_path / 'gone.txt'}: no such text file\n"


def test_reading_the_command_line_loads_no_torch() -> None:
    code = (
        "import argparse, sys\nfrom speedtronic.cli import data\n"
        "data.add_parser(argparse.ArgumentParser().add_subparsers())\n"
        "assert not {'torch', 'numpy', 'rich'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_prepare_that_is_terminated_leaves_nothing(tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGTERM)
    write = ShardWriter.write

    def terminated(writer: ShardWriter, ids: IdArray) -> None:
        write(writer, ids)
        assert list(tmp_path.glob(".out.partial-*/shard_00000.bin"))
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(ShardWriter, "write", terminated)

    assert main(["data", "prepare", str(text), "--out", str(tmp_path / "out")]) == 143
    assert list(tmp_path.iterdir()) == [text]
    assert signal.getsignal(signal.SIGTERM) is before


def test_prepare_runs_outside_the_main_thread(tmp_path: Path, text: Path) -> None:
    with ThreadPoolExecutor() as threads:
        assert threads.submit(run, "prepare", text, "--out", tmp_path / "out").result() == 0
