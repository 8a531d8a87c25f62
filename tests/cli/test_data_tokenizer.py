from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import pytest

from speedtronic.cli import data_tokenizer
from speedtronic.data.tokenizers.from_file import load_tokenizer


def run(*arguments: str | Path) -> int:
    parser = argparse.ArgumentParser()
    data_tokenizer.add_train_tokenizer(parser.add_subparsers())
    args = parser.parse_args(["train-tokenizer", *map(str, arguments)])
    code: int = args.run(args)
    return code


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("one two one two three\n" * 50)
    return path


def test_it_says_what_it_made(tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "tokenizer.json"

    assert run(text, "--out", out, "--vocab-size", "262") == 0

    captured = capsys.readouterr()
    assert captured.out.splitlines() == [
        "vocabulary: 262",
        "bytes per token: 2.00 (first MB of the text)",
        "text: 1.1 kB",
        f"file: {out}",
    ]
    assert captured.err == ""
    assert load_tokenizer(str(out)).vocab_size == 262


def test_it_says_when_the_text_gives_no_more_ids(
    tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(text, "--out", tmp_path / "tokenizer.json", "--vocab-size", "5000")

    assert "5,000 ids were asked for, but no more pairs repeat" in capsys.readouterr().out


def test_it_takes_its_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.jsonl").write_text('{"body": "xyz"}\n')
    (tmp_path / "b.txt").write_text("not read")
    out = tmp_path / "tokenizer.json"
    out.write_text("old")
    options = ["--vocab-size", "257", "--pattern", "*.jsonl", "--text-field", "body", "--force"]

    assert run(tmp_path, "--out", out, *options) == 0
    assert "text: 3 B" in capsys.readouterr().out


def test_a_command_line_without_a_vocabulary_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        run("text.txt", "--out", "tokenizer.json")
    assert "--vocab-size" in capsys.readouterr().err


def test_reading_the_command_line_loads_neither_torch_nor_numpy() -> None:
    code = (
        "import argparse, sys\nfrom speedtronic.cli import data_tokenizer\n"
        "data_tokenizer.add_train_tokenizer(argparse.ArgumentParser().add_subparsers())\n"
        "assert not {'torch', 'numpy', 'tokenizers'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
