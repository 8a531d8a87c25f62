"""The train command: exit codes, overrides, signals, pipes."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from speedtronic.checkpoint import CheckpointManager
from speedtronic.cli import main
from speedtronic.trainer import Trainer, TrainResult
from tests.support.configs import tiny

COMMAND = [sys.executable, "-m", "speedtronic", "train"]


def write_config(folder: Path, **sections: Any) -> Path:
    path = folder / "config.yaml"
    path.write_text(json.dumps(tiny(folder / "run", **sections)), encoding="utf-8")
    return path


def test_training_ends_with_exit_code_0_and_a_checkpoint(tmp_path: Path) -> None:
    assert main(["train", str(write_config(tmp_path))]) == 0
    assert (tmp_path / "run/checkpoints/step_000000000004/manifest.json").is_file()


def test_config_may_be_named_by_option_with_overrides(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = write_config(tmp_path)
    assert main(["train", "--config", str(config), "run.max_steps=2", "optimizer.lr=1e-2"]) == 0
    assert "step 2" in capsys.readouterr().out
    assert not (tmp_path / "run/checkpoints/step_000000000004").exists()


def test_options_are_overrides_of_the_run_section(tmp_path: Path) -> None:
    output = tmp_path / "elsewhere"
    options = ["--max-steps", "3", "--device", "cpu", "--output-dir", str(output)]
    assert main(["train", str(write_config(tmp_path)), *options]) == 0
    state = CheckpointManager(output / "checkpoints").load_latest()
    assert state is not None
    assert (state["step"], state["config"]["scheduler"]["max_steps"]) == (3, 3)


def test_a_profile_leaves_a_trace_in_the_runs_folder_and_a_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_config(tmp_path)
    assert main(["train", str(config), "--max-steps", "6", "--profile", "2"]) == 0
    assert json.loads((tmp_path / "run/trace.json").read_text(encoding="utf-8"))["traceEvents"]
    out = capsys.readouterr().out
    assert "profile of the steps 4 to 5" in out
    assert "backward" in out


def test_a_profile_of_no_steps_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(write_config(tmp_path)), "--profile", "0"]) == 2
    assert "--profile is a number of steps, at least 1, not 0" in capsys.readouterr().err


def test_resume_goes_on_from_the_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = write_config(tmp_path)
    assert main(["train", str(config), "data.max_steps=2"]) == 0
    capsys.readouterr()
    assert main(["train", str(config), "--resume"]) == 0
    out = capsys.readouterr().out
    assert "step 3" in out
    assert "step 1/" not in out


def test_a_text_that_another_working_folder_does_not_have_is_said_where_it_was_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    for folder in (here, elsewhere):
        folder.mkdir()
    (here / "text.txt").write_text("to be or not to be\n" * 20)
    sections = {"data": {"text_path": "text.txt"}, "model": {"vocab_size": 256}}
    config = write_config(here, **sections)
    monkeypatch.chdir(here)
    assert main(["train", str(config)]) == 0
    monkeypatch.chdir(elsewhere)
    for named in (config, here / "run"):
        assert main(["train", str(named), "--resume", "--max-steps", "6"]) == 2
        error = capsys.readouterr().err
        assert f"text.txt: no such text file; looked for {elsewhere / 'text.txt'}, since a" in error
        assert "run it in the right folder, or give the whole path" in error


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["train"], "configuration file"),
        (["train", "missing.yaml"], "missing.yaml"),
        (["train", "CONFIG", "--device", "cuda:77"], "cuda"),
        (["train", "CONFIG", "data.micro_batchsize=2"], "data.micro_batch_size"),
        (["train", "CONFIG", "data.text_path=no/such/text.txt"], "no/such/text.txt"),
        (["train", "CONFIG", "precision.mode=fp8"], "fp8"),
        (["train", "CONFIG", "--max-steps", "0"], "run.max_steps"),
        (["train", "CONFIG", "plugins=[no_such_module]"], "no_such_module"),
    ],
)
def test_bad_use_is_one_clear_message_and_exit_code_2(
    arguments: list[str], word: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = str(write_config(tmp_path))
    assert main([config if argument == "CONFIG" else argument for argument in arguments]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert word in captured.err
    assert "Traceback" not in captured.err


def test_a_nan_ends_with_exit_code_1_and_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = write_config(tmp_path, optimizer={"lr": 1e30}, scheduler={"warmup_steps": 0})
    assert main(["train", str(config)]) == 1
    assert "error: step 2: the loss is" in capsys.readouterr().err


def test_a_models_own_error_shows_where_it_is_and_exits_with_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "failing_model_of_a_test.py").write_text(
        "import torch\nfrom speedtronic import register_model\n"
        "@register_model('failing')\n"
        "class Failing(torch.nn.Linear):\n"
        "    def __init__(self, config):\n        super().__init__(1, 1)\n"
        "    def forward(self, input_ids, labels):\n        raise RuntimeError('a mistake of the model')\n",
        encoding="utf-8",
    )
    config = write_config(tmp_path, plugins=["failing_model_of_a_test"], model={"name": "failing"})
    assert main(["train", str(config)]) == 1
    assert "a mistake of the model" in capsys.readouterr().err


def test_an_output_directory_that_is_a_file_is_a_clear_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_config(tmp_path)
    (tmp_path / "run").write_text("in the way", encoding="utf-8")
    assert main(["train", str(config)]) == 2
    assert str(tmp_path / "run") in capsys.readouterr().err


@contextmanager
def long_run(folder: Path, **sections: Any) -> Iterator[subprocess.Popen[str]]:
    """A run that would take minutes, past its first steps, in a process group of its own; killed at the end."""
    config = write_config(folder, run={"max_steps": 1_000_000}, logging={"json_file": "metrics.jsonl"}, **sections)
    process = subprocess.Popen(
        [*COMMAND, str(config)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if line.startswith("step ") and " 5/" in line:
                break
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    "number", [signal.SIGINT, *(pytest.param(n, marks=pytest.mark.slow) for n in (signal.SIGTERM, signal.SIGHUP))]
)
def test_a_signal_to_the_whole_group_leaves_the_data_workers_alone(number: signal.Signals, tmp_path: Path) -> None:
    with long_run(tmp_path, data={"num_workers": 2}) as process:
        os.killpg(process.pid, number)
        out, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert "Traceback" not in out


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGTERM, 143),
        pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow),
        pytest.param(signal.SIGHUP, 129, marks=pytest.mark.slow),
    ],
)
def test_a_signal_saves_a_checkpoint_and_exits_with_its_code(number: signal.Signals, code: int, tmp_path: Path) -> None:
    with long_run(tmp_path) as process:
        process.send_signal(number)
        out, _ = process.communicate(timeout=60)
    assert process.returncode == code
    assert "Traceback" not in out
    how = f"{sys.executable} -m speedtronic train {tmp_path / 'config.yaml'} --resume"
    assert out.splitlines()[-1] == f"to continue: {how}"
    lines = (tmp_path / "run/metrics.jsonl").read_text(encoding="utf-8").splitlines()
    last_step = [json.loads(line)["step"] for line in lines if '"train_step"' in line][-1]
    state = CheckpointManager(tmp_path / "run/checkpoints").load_latest()
    assert state is not None
    assert state["step"] == last_step


ON_ITS_TERMINAL = """
import fcntl, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
from speedtronic.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_a_run_whose_terminal_is_closed_saves(tmp_path: Path) -> None:
    config = write_config(tmp_path, run={"max_steps": 1_000_000})
    ours, theirs = os.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", ON_ITS_TERMINAL, "train", str(config)],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    shown = b""
    while b"step 5" not in shown:  # a line, or the bar that stands in its place
        shown += os.read(ours, 4096)
    os.close(ours)
    try:
        assert process.wait(60) == 128 + signal.SIGHUP
    finally:
        process.kill()
    assert CheckpointManager(tmp_path / "run/checkpoints").load_latest() is not None


def test_the_command_that_continues_is_the_one_that_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With its words and options, without `--overwrite` and secrets; and it works."""
    folder = tmp_path / "a folder"
    folder.mkdir()
    config = str(write_config(folder))
    step = Trainer._train_step

    def interrupted(trainer: Trainer, fit: Any) -> bool:
        if trainer.step == 2:
            signal.raise_signal(signal.SIGTERM)
        return step(trainer, fit)

    words = ["optimizer.lr=1e-2", "model.extra={}", "--overwrite", "--max-steps", "6"]
    with monkeypatch.context() as context:
        context.setattr(Trainer, "_train_step", interrupted)
        assert main(["train", config, *words, "distributed.token=hf_verysecret123"]) == 143
    said = capsys.readouterr().out.splitlines()[-1]
    assert "hf_verysecret123" not in said
    again = shlex.split(said.removeprefix("to continue: "))
    given = ["optimizer.lr=1e-2", "model.extra={}", "distributed.token=<redacted>"]
    assert again == ["speedtronic", "train", config, *given, "--max-steps", "6", "--resume"]
    assert main(again[1:]) == 0
    state = CheckpointManager(folder / "run/checkpoints").load_latest()
    assert state is not None
    assert state["step"] == 6

    with monkeypatch.context() as context:
        context.setattr(Trainer, "_train_step", interrupted)
        assert main(["train", config, "checkpoint.enabled=false"]) == 143
    said = capsys.readouterr().out.splitlines()[-1]
    assert said == "nothing was saved to continue from, because checkpoint.enabled is false"


@pytest.mark.slow
def test_a_second_run_in_the_same_folder_is_refused_naming_the_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with long_run(tmp_path) as process:
        assert main(["train", str(tmp_path / "config.yaml")]) == 2
        assert str(process.pid) in capsys.readouterr().err
    # The holder is dead, so its folder is free again.
    assert main(["train", str(tmp_path / "config.yaml"), "--max-steps", "2", "--overwrite"]) == 0


@pytest.mark.slow
def test_a_closed_pipe_does_not_crash_the_run(tmp_path: Path) -> None:
    config = write_config(tmp_path, run={"max_steps": 30})
    reader, writer = os.pipe()
    process = subprocess.Popen([*COMMAND, str(config)], stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    os.read(reader, 10)
    os.close(reader)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0
    assert errors == ""
    assert (tmp_path / "run/checkpoints/step_000000000030").is_dir()


@pytest.mark.slow
def test_piped_output_has_no_control_characters(tmp_path: Path) -> None:
    done = subprocess.run([*COMMAND, str(write_config(tmp_path))], capture_output=True, text=True, check=True)
    assert all(character.isprintable() or character == "\n" for character in done.stdout)


@pytest.mark.parametrize(("rank", "local_rank", "speaks"), [("0", "0", True), ("1", "1", False), ("2", "0", True)])
def test_one_rank_of_each_machine_says_what_is_wrong_with_its_configuration(
    rank: str,
    local_rank: str,
    speaks: bool,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A file may be missing on one machine alone."""
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    assert main(["train", str(tmp_path / "missing.yaml")]) == 2
    assert ("missing.yaml" in capsys.readouterr().err) == speaks


@pytest.mark.parametrize(("local_size", "started"), [("4", "torchrun --nproc-per-node 4"), ("2", "torchrun ...")])
def test_ranks_that_were_interrupted_go_on_as_ranks(
    local_size: str,
    started: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = write_config(tmp_path)
    variables = {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": local_size}
    for name, value in {**variables, "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    interrupted = TrainResult(1, 1, 1, None, 0.0, interrupted_by=signal.SIGTERM)
    monkeypatch.setattr("speedtronic.runtime.train_from_config", lambda *_, **__: interrupted)
    assert main(["train", str(config)]) == 143
    assert capsys.readouterr().out == f"to continue: {started} -m speedtronic train {config} --resume\n"
