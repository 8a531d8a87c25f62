from __future__ import annotations

import argparse
import io
import itertools
import json
import os
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from speedtronic.cli import data, main
from speedtronic.cli.output import preparation_progress
from speedtronic.data.prepare.prepare import Progress
from speedtronic.data.prepare.staging import is_resumable
from speedtronic.data.shard_writer import ShardFiles
from speedtronic.data.shards import ShardSet
from speedtronic.data.tokenizers.base import IdArray
from speedtronic.data.tokenizers.from_file import load_tokenizer
from speedtronic.errors import DataError

ACTIONS = ("prepare", "inspect", "train-tokenizer")


@pytest.mark.parametrize("action", ACTIONS)
def test_each_action_explains_itself(action: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", action, "--help"]) == 0
    assert f"data {action}" in capsys.readouterr().out


def test_without_an_action_they_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data"]) == 2
    assert "ACTION" in capsys.readouterr().err


def test_reading_the_command_line_loads_no_torch() -> None:
    code = (
        "import argparse, sys\nfrom speedtronic.cli import data\n"
        "data.add_parser(argparse.ArgumentParser().add_subparsers())\n"
        "assert not {'torch', 'numpy', 'rich', 'tokenizers'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_no_action_loads_torch(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom speedtronic.cli import main\n"
        "main(['data', 'prepare', sys.argv[1], '--out', sys.argv[2], '--tokenizer', 'chars'])\n"
        "main(['data', 'inspect', sys.argv[2], '--verify'])\nassert 'torch' not in sys.modules"
    )
    (tmp_path / "a.txt").write_text("some text\n" * 100)
    command = [sys.executable, "-c", code, str(tmp_path / "a.txt"), str(tmp_path / "out")]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


# ---------------------------------------------------------------------- prepare


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


def test_prepare_says_what_it_made(tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("prepare", text, "--out", tmp_path / "out") == 0

    made = capsys.readouterr().out.splitlines()
    assert made[:6] == [
        f"prepared: {tmp_path / 'out'}",
        "tokens: 43",
        "documents: 1",
        "shards: 1",
        "bytes per token: 0.98",
        "vocabulary: 256",
    ]
    assert re.fullmatch(r"time: \d+\.\d s, \S+ [kM]?B/s", made[6])
    assert made[7:] == [f"in a configuration: data.shards: {tmp_path / 'out'}, model.vocab_size: 256 or more"]


def test_prepare_says_when_there_is_nothing_to_do(
    text: Path, prepared: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("prepare", text, "--out", prepared) == 0

    made = capsys.readouterr().out
    assert made.startswith("already prepared: ")
    assert "B/s" not in made


def test_prepare_takes_its_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.rst").write_text("abcab")
    (tmp_path / "b.txt").write_text("xyz")
    options = ["--tokenizer", "chars", "--pattern", "*.rst", "--shard-tokens", "4", "--seed", "3", "--processes", "2"]

    assert run("prepare", tmp_path, "--out", tmp_path / "out", *options) == 0
    made = capsys.readouterr().out
    assert "tokens: 6\ndocuments: 1\nshards: 2\nbytes per token: 0.83\nvocabulary: 4\n" in made


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


def test_an_error_is_one_line_and_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["data", "prepare", str(tmp_path / "gone.txt"), "--out", str(tmp_path / "out")])

    assert code == 2
    assert capsys.readouterr().err == f"error: {tmp_path / 'gone.txt'}: no such text file\n"


def test_prepare_reads_json_lines_by_the_field_that_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"body": "one"}\n{"body": "two"}\n')

    assert run("prepare", tmp_path / "a.jsonl", "--text-field", "body", "--out", tmp_path / "out") == 0
    assert ShardSet(tmp_path / "out").documents == 2


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
@pytest.mark.parametrize("noted", [True, False])
def test_prepare_that_is_stopped_keeps_what_it_can_go_on_with(
    tmp_path: Path,
    text: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    number: signal.Signals,
    code: int,
    noted: bool,
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    text.write_text("a b\n" * 2**19)
    append = ShardFiles.append
    calls = itertools.count()

    def stopped(files: ShardFiles, ids: IdArray, *rest: Any) -> None:
        if next(calls):
            signal.raise_signal(number)
        append(files, ids, *rest)

    monkeypatch.setattr("speedtronic.data.prepare.prepare._SECONDS_BETWEEN_JOURNALS", 0 if noted else 1e9)
    with monkeypatch.context() as patch:
        patch.setattr(ShardFiles, "append", stopped)
        assert main(["data", "prepare", str(text), "--out", str(tmp_path / "out")]) == code

    said = "interrupted: what is done is kept, and the same command continues from there\n"
    assert capsys.readouterr().err == (said if noted else "")
    assert is_resumable(tmp_path / "out") == noted
    assert signal.getsignal(signal.SIGTERM) is before
    assert run("prepare", text, "--out", tmp_path / "out") == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "text.txt"]


def test_prepare_runs_outside_the_main_thread(tmp_path: Path, text: Path) -> None:
    with ThreadPoolExecutor() as threads:
        assert threads.submit(run, "prepare", text, "--out", tmp_path / "out").result() == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a disk that is always full")
def test_an_output_that_cannot_be_written_is_no_traceback_and_the_data_is_whole(tmp_path: Path, text: Path) -> None:
    command = [sys.executable, "-m", "speedtronic", "data", "prepare", str(text), "--out"]
    with open("/dev/full", "w") as full:
        found = subprocess.run(
            [*command, tmp_path / "full"], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert (found.returncode, found.stderr) == (1, FULL)

    reading, writing = os.pipe()
    os.close(reading)
    found = subprocess.run([*command, tmp_path / "out"], stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    assert (found.returncode, found.stderr) == (0, "")
    assert ShardSet(tmp_path / "full").tokens == ShardSet(tmp_path / "out").tokens == 43


def standard_input(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))


def test_prepare_reads_the_standard_input_and_leaves_no_copy_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    standard_input(monkeypatch, b'{"text": "one"}\n{"text": "two"}\n')
    assert run("prepare", "--stdin", "jsonl", "--out", tmp_path / "lines", "--tokenizer", "chars") == 0
    assert ShardSet(tmp_path / "lines").documents == 2

    standard_input(monkeypatch, b'{"text": "one"}\n')
    assert run("prepare", "--stdin", "text", "--out", tmp_path / "text") == 0
    assert ShardSet(tmp_path / "text").tokens == 17
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lines", "text"]


def test_an_error_names_the_standard_input_and_not_the_file_that_keeps_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    standard_input(monkeypatch, b'{"text": "one"}\nnope\n')
    with pytest.raises(DataError, match=r"^the standard input: line 2: not valid JSON"):
        run("prepare", "--stdin", "jsonl", "--out", tmp_path / "out")


def test_the_standard_input_is_no_path_and_takes_the_place_of_paths(tmp_path: Path, text: Path) -> None:
    with pytest.raises(DataError, match="--stdin text or --stdin jsonl"):
        run("prepare", "-", "--out", tmp_path / "out")
    with pytest.raises(DataError, match="name one thing to read"):
        run("prepare", text, "--stdin", "text", "--out", tmp_path / "out")


def test_prepare_stops_at_a_bad_line_or_skips_and_counts_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one"}\n{"text": 2}\nnot JSON\n{"text": "four"}\n')

    with pytest.raises(DataError, match=r"a\.jsonl: line 2: not an object with a text 'text'"):
        run("prepare", path, "--out", tmp_path / "out")
    assert run("prepare", path, "--out", tmp_path / "out", "--bad-lines", "skip") == 0
    made = capsys.readouterr().out
    assert "documents: 2\n" in made
    assert re.search(r"left out, not being usable: 2 records; .*a\.jsonl: line 2: .*; .*a\.jsonl: line 3: not", made)


def test_prepare_needs_a_folder_unless_it_only_shows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "2+2=", "completion": "4"}\n{"prompt": "1+1=", "completion": "2"}\n')

    with pytest.raises(DataError, match="--out DIR, or look at N documents with --preview N"):
        run("prepare", tmp_path / "a.jsonl", "--records", "prompt")
    assert run("prepare", tmp_path / "a.jsonl", "--records", "prompt", "--preview", "1") == 0
    assert capsys.readouterr().out == "--- document 1\n2+2={+4\u2400+}\n"
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


def test_a_preview_dims_what_is_no_target_on_a_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "2+2=", "completion": "4"}\n')
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)

    run("prepare", tmp_path / "a.jsonl", "--records", "prompt", "--preview", "1")

    assert "\x1b[2m2+2=\x1b[0m4\u2400" in capsys.readouterr().out


def test_prepare_turns_chats_into_targets_by_a_template(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    (tmp_path / "a.jsonl").write_text(json.dumps({"talk": messages}) + "\n")
    template = tmp_path / "turns.jinja"
    template.write_text(
        "{% for m in messages %}{{ m.role }}: {% if m.role == 'assistant' %}"
        "{% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %};{% endfor %}"
    )
    options = ["--records", "chat", "--messages-field", "talk", "--chat-template", template]

    assert run("prepare", tmp_path / "a.jsonl", *options, "--out", tmp_path / "out") == 0
    assert "tokens: 27\nof them targets: 5 (19%)\ndocuments: 1\n" in capsys.readouterr().out
    assert run("prepare", tmp_path / "a.jsonl", *options, "--preview", "3") == 0
    assert capsys.readouterr().out == "--- document 1\nuser: Hi;assistant: {+Hello+};\u2400\n"
    run("inspect", tmp_path / "out", "--verify")
    assert "of them targets: 5\n" in capsys.readouterr().out
    with pytest.raises(DataError, match="--chat-template is for chats: add --records chat"):
        run("prepare", tmp_path / "a.jsonl", "--chat-template", template, "--out", tmp_path / "out")


# ---------------------------------------------------------------------- progress


class Terminal(StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def show(monkeypatch: pytest.MonkeyPatch, stream: StringIO, told: list[tuple[float, str, int]]) -> str:
    now = 0.0
    monkeypatch.setattr("sys.stdout", stream)
    report = preparation_progress(lambda: now)
    for now, stage, done in told:  # noqa: B007 - the clock reads it
        report.show(Progress(stage, done * 10**6, 100 * 10**6))
    report.close()
    return stream.getvalue()


TOLD = [(0.0, "characters", 1), (4.0, "characters", 100), (5.0, "encoding", 20), (10.0, "encoding", 30)]


def test_progress_is_a_line_every_ten_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    told = [*TOLD, (15.0, "encoding", 40), (19.0, "encoding", 45), (20.0, "encoding", 50), (40.0, "encoding", 90)]

    assert show(monkeypatch, StringIO(), told).splitlines() == [
        "encoding: 30.0 MB of 100.0 MB, 2.0 MB/s, 0:00:35 left",
        "encoding: 50.0 MB of 100.0 MB, 2.0 MB/s, 0:00:25 left",
        "encoding: 90.0 MB of 100.0 MB, 2.0 MB/s, 0:00:05 left",
    ]


def test_the_first_line_of_a_slow_stage_has_no_rate_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    assert show(monkeypatch, StringIO(), [(30.0, "encoding", 20)]) == "encoding: 20.0 MB of 100.0 MB\n"


def test_progress_is_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("TERM", "xterm")

    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", show(monkeypatch, Terminal(), [*TOLD, (15.0, "encoding", 40)]))

    assert re.search(r"characters .*100\.0/100\.0 MB", shown)
    assert re.search(r"encoding .*40\.0/100\.0 MB 2\.0 MB/s 0:00:30", shown)


class Gone(StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError


def test_progress_that_nobody_can_see_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    show(monkeypatch, Gone(), [(0.0, "encoding", 1), (20.0, "encoding", 2), (40.0, "encoding", 3)])


# ---------------------------------------------------------------------- inspect


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


# ---------------------------------------------------------------------- train-tokenizer


@pytest.fixture
def repeats(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("one two one two three\n" * 50)
    return path


def test_train_tokenizer_says_what_it_made(tmp_path: Path, repeats: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "tokenizer.json"

    assert run("train-tokenizer", repeats, "--out", out, "--vocab-size", "262") == 0

    captured = capsys.readouterr()
    assert captured.out.splitlines() == [
        "vocabulary: 262",
        "bytes per token: 2.00 (first MB of the text)",
        "text: 1.1 kB",
        f"file: {out}",
    ]
    assert captured.err == ""
    assert load_tokenizer(str(out)).vocab_size == 262


def test_train_tokenizer_says_when_the_text_gives_no_more_ids(
    tmp_path: Path, repeats: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run("train-tokenizer", repeats, "--out", tmp_path / "tokenizer.json", "--vocab-size", "5000")

    assert "5,000 ids were asked for, but no more pairs repeat" in capsys.readouterr().out


def test_train_tokenizer_takes_its_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.jsonl").write_text('{"body": "xyz"}\n')
    (tmp_path / "b.txt").write_text("not read")
    out = tmp_path / "tokenizer.json"
    out.write_text("old")
    options = ["--vocab-size", "257", "--pattern", "*.jsonl", "--text-field", "body", "--force"]

    assert run("train-tokenizer", tmp_path, "--out", out, *options) == 0
    assert "text: 3 B" in capsys.readouterr().out


def test_a_command_line_without_a_vocabulary_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        run("train-tokenizer", "text.txt", "--out", "tokenizer.json")
    assert "--vocab-size" in capsys.readouterr().err
