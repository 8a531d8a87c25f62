from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from speedtronic.checkpoint.initial_weights import load_initial_weights
from speedtronic.cli import main
from speedtronic.config import load_config
from speedtronic.distributed.status import store_status
from speedtronic.distributed.stores import open_store
from speedtronic.model.transformer import build_reference_transformer

MODEL = "{vocab_size: 16, max_seq_len: 8, n_layer: 1, n_head: 2, d_model: 8}"


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A configuration whose store is the folder `store` beside it."""
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "config.yaml"
    distributed = f"{{enabled: true, role: worker, repo_id: 'dir://{tmp_path}/store', poll_interval: 0.05}}"
    file.write_text(f"model: {MODEL}\ndistributed: {distributed}\n", encoding="utf-8")
    return file


@contextmanager
def signalled_once(log: Path, word: str, number: signal.Signals) -> Iterator[None]:
    """Send this process a signal as soon as a word is in a log, or much later."""

    def watch() -> None:
        until = time.monotonic() + 30
        while not (log.exists() and word in log.read_text(encoding="utf-8")) and time.monotonic() < until:
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        thread.join()


def run(config: Path, *words: str, number: signal.Signals = signal.SIGTERM) -> int:
    """Let a master run until it has said that it is ready, and end it."""
    log = config.parent / "metrics.jsonl"
    log.unlink(missing_ok=True)
    with signalled_once(log, "averaging", number):
        return main(["diloco", "master", str(config), "run.output_dir=.", "logging.json_file=metrics.jsonl", *words])


def model_of(config: Path) -> torch.nn.Module:
    return build_reference_transformer(load_config(config).model)


def test_a_master_makes_the_initial_weights_version_0(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(config, "run.seed=7") == 128 + signal.SIGTERM

    assert store_status(open_store(f"dir://{config.parent}/store"), now=0.0).version == 0
    assert main(["diloco", "pull", "store"]) == 0
    pulled = model_of(config)
    load_initial_weights(pulled, "model.safetensors")
    torch.manual_seed(7)
    expected = model_of(config).state_dict()
    for name, value in pulled.state_dict().items():
        assert torch.equal(value, expected[name]), name


def test_it_says_which_store_and_which_version(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(config)

    said = capsys.readouterr().out
    assert f"at version 0, averaging what the nodes put into dir://{config.parent}/store" in said
    assert "ended by SIGTERM at version 0" in said


def test_ctrl_c_ends_it_too(config: Path) -> None:
    assert run(config, number=signal.SIGINT) == 128 + signal.SIGINT


def test_a_master_goes_on_with_what_is_in_the_store(config: Path) -> None:
    run(config, "run.seed=1")
    first = (config.parent / "store/head/00000000.json").read_bytes()

    run(config, "run.seed=2")

    assert (config.parent / "store/head/00000000.json").read_bytes() == first
    assert [path.name for path in (config.parent / "store/head").iterdir()] == ["00000000.json"]


def refused_master(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    assert main(["diloco", "master", *map(str, words)]) == 2
    said = capsys.readouterr()
    assert said.err.startswith("error: ")
    return said.err


def test_a_store_of_another_model_is_refused_at_the_start(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(config)
    capsys.readouterr()

    assert "another model" in refused_master(capsys, config, "model.d_model=16")


def test_a_configuration_without_a_store_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(f"model: {MODEL}\n", encoding="utf-8")

    assert "distributed.repo_id: needed" in refused_master(capsys, file)


@pytest.mark.parametrize("enabled", ["true", "false"])
def test_what_this_version_cannot_do_is_refused(config: Path, enabled: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = [f"distributed.enabled={enabled}", "distributed.codec=int4"]
    assert "distributed.codec" in refused_master(capsys, config, *words)
    assert not (config.parent / "store").exists()


def test_a_folder_in_which_another_run_logs_is_refused(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["logging.json_file=metrics.jsonl", "run.output_dir=out"]
    (config.parent / "out").mkdir()
    code = (
        "import fcntl, sys\nfile = open('out/.lock', 'w')\nfcntl.lockf(file, fcntl.LOCK_EX)\n"
        "print('held', flush=True)\nsys.stdin.read()"
    )
    holder = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        assert "out is in use by another process" in refused_master(capsys, config, *words)
        holder.kill()


def test_its_words_are_in_its_log_and_the_folder_is_free_afterwards(config: Path) -> None:
    run(config)

    assert "ended by SIGTERM" in (config.parent / "metrics.jsonl").read_text(encoding="utf-8")
    assert (config.parent / ".lock").read_bytes() == b""
