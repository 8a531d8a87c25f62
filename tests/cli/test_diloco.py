from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from speedtronic.checkpoint.initial_weights import load_initial_weights
from speedtronic.cli import main
from speedtronic.config import load_config
from speedtronic.distributed.status import store_status
from speedtronic.distributed.stores import Listing, MemoryStore, open_store
from speedtronic.errors import StoreUnavailableError
from speedtronic.model.transformer import build_reference_transformer
from tests.support.published import MARK, publish, publish_two_versions, weights_of

# ---------------------------------------------------------------------- master


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

    assert store_status(open_store(f"dir://{config.parent}/store")).version == 0
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


# ---------------------------------------------------------------------- status


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A store in a folder with version 2, the nodes `a` and `b`, and a delta of `b` that waits."""
    folder = tmp_path / "store"
    store = open_store(f"dir://{folder}")
    publish_two_versions(store)
    store.put_if_absent("in/b/s/00000004.safetensors", bytes(1500))
    return folder


def told(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    assert main(["diloco", "status", *map(str, words)]) == 0
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """One line on the standard error, and nothing else."""
    assert main(["diloco", "status", *map(str, words)]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    (line,) = said.err.splitlines()
    assert line.startswith("error: ")
    return line


def test_the_table_has_a_line_for_each_node(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    summary, headings, of_a, of_b = told(capsys, f"dir://{folder}").splitlines()

    assert "version 2" in summary
    assert "1 waiting (1.5 kB)" in summary
    assert headings.split("  ")[0] == "NODE"
    assert [word.strip() for word in of_a.split("  ") if word][2:] == [
        "75",
        "154k",
        "0.5",
        "3.0 kB",
        "0",
        "1: stale",
        "1",
    ]
    assert [word.strip() for word in of_b.split("  ") if word][2:] == ["75", "154k", "0", "4.5 kB", "1", "0", "1"]


def test_the_table_is_framed_on_a_terminal(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "160")

    assert "│ a    │" in told(capsys, f"dir://{folder}")


def test_ages_are_those_of_the_version_and_of_the_nodes_last_delta(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = datetime.now(UTC) - timedelta(hours=3, minutes=10)
    store = open_store(f"dir://{tmp_path}")
    publish(store, publish(store), marks={"a/s": MARK.model_copy(update={"time": seen.isoformat()})})

    assert told(capsys, tmp_path).splitlines()[2].split()[:3] == ["a", "3h", "ago"]


@pytest.mark.parametrize("time", ["yesterday", "\x1b[31m"])
def test_a_time_that_is_none_is_a_question_mark(tmp_path: Path, time: str, capsys: pytest.CaptureFixture[str]) -> None:
    store = open_store(f"dir://{tmp_path}")
    publish(store, publish(store), marks={"a/s": MARK.model_copy(update={"time": time})})

    assert "a     ? ago" in told(capsys, tmp_path)


def test_a_reason_cannot_steer_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = open_store(f"dir://{tmp_path}")
    publish(store, publish(store), marks={"a/s": MARK.model_copy(update={"reason": "bad\x1b[2J"})})

    assert "1: bad\ufffd[2J" in told(capsys, tmp_path)


def test_a_store_in_which_no_node_was_yet_has_no_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    publish(open_store(f"dir://{tmp_path}"))

    (line,) = told(capsys, tmp_path).splitlines()

    assert line.endswith("nothing waiting")


def test_json_is_one_object(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = json.loads(told(capsys, f"dir://{folder}", "--json"))

    assert (status["version"], status["rounds"], status["outstanding"], status["outstanding_bytes"]) == (
        2,
        1.5,
        1,
        1500,
    )
    of_a, of_b = status["nodes"]
    assert (of_a["name"], of_b["name"]) == ("a", "b")
    (session,) = of_a["sessions"]
    assert (session["seq"], session["rounds_behind"], session["reason"]) == (3, 0.5, "stale")
    assert of_b["sessions"][0]["outstanding"] == 1


def test_the_help_describes_every_field(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status: dict[str, Any] = json.loads(told(capsys, f"dir://{folder}", "--json"))
    text = told(capsys, "--help")

    assert not [field for field in (*status, *status["nodes"][0]["sessions"][0]) if field not in text]


def test_a_folder_and_the_yaml_of_a_run_name_the_store_too(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(f"distributed: {{enabled: true, repo_id: 'dir://{folder}'}}\n", encoding="utf-8")

    assert len({told(capsys, store, "--json") for store in (f"dir://{folder}", folder, config)}) == 1


def test_a_yaml_without_a_store_is_an_error_that_names_the_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("run: {max_steps: 1}\n", encoding="utf-8")

    assert "it names no store; set distributed.repo_id" in refused(capsys, config)


@pytest.mark.parametrize("word", ["org/name", "s3:/bucket"])
def test_a_word_that_is_neither_address_nor_folder_is_an_error(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "there is no such folder or file, and an address contains ://" in refused(capsys, word)


def test_a_folder_without_a_version_is_an_error_and_stays_as_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "there is no version in it" in refused(capsys, tmp_path)
    assert "there is no version in it" in refused(capsys, f"dir://{tmp_path / 'mistyped'}")
    assert list(tmp_path.iterdir()) == []


def test_an_option_that_is_none_is_an_error(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "--option endpoint: write KEY=VALUE" in refused(capsys, folder, "--option", "endpoint")


def test_an_option_that_the_store_does_not_know_is_an_error(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "colour" in refused(capsys, folder, "--option", "colour=red")


def test_options_reach_the_store(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    given: dict[str, Any] = {}

    def opened(url: str, **options: object) -> MemoryStore:
        given.update(options, url=url)
        store = MemoryStore("options")
        publish(store)
        return store

    monkeypatch.setattr("speedtronic.distributed.stores.open_store", opened)

    told(capsys, "s3://bucket/prefix", "--option", "endpoint=http://127.0.0.1:1", "--option", "anon=true")

    assert given == {"url": "s3://bucket/prefix", "endpoint": "http://127.0.0.1:1", "anon": True}


def test_a_store_that_does_not_answer_is_one_line_and_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Down(MemoryStore):
        asked = 0

        def list_after(self, *asked: object, **options: object) -> Listing:
            Down.asked += 1
            raise StoreUnavailableError("memory://down: it does not answer")

    monkeypatch.setattr("speedtronic.distributed.stores.open_store", lambda url: Down("down"))
    monkeypatch.setattr("speedtronic.cli.diloco._RETRIES", {"initial": 1e-4, "maximum": 1e-4, "attempts": 3})

    assert main(["diloco", "status", "memory://down"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "does not answer" in line
    assert Down.asked == 3


def test_neither_the_help_nor_the_table_loads_torch(folder: Path) -> None:
    code = (
        "import sys\nfrom speedtronic.cli import main\n"
        f"assert main(['diloco', 'master', '--help']) == main(['diloco', 'status', {str(folder)!r}]) == 0\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


# ---------------------------------------------------------------------- pull


@pytest.fixture
def working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder; beside others it has a store with version 2."""
    monkeypatch.chdir(tmp_path)
    publish_two_versions(open_store(f"dir://{tmp_path / 'store'}"))
    return tmp_path


def test_the_newest_weights_are_pulled_into_the_working_folder(
    working_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["diloco", "pull", "store"]) == 0
    assert capsys.readouterr().out == f"pulled: model.safetensors: version 2 of dir://{working_folder}/store, 76 B\n"
    assert (working_folder / "model.safetensors").read_bytes() == weights_of(2)


def test_an_older_version_goes_where_it_is_told(working_folder: Path) -> None:
    assert main(["diloco", "pull", "store", "--version", "1", "--out", "new/w.safetensors"]) == 0
    assert (working_folder / "new/w.safetensors").read_bytes() == weights_of(1)


def test_what_is_there_is_replaced_by_force_alone(working_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (working_folder / "model.safetensors").write_bytes(b"mine")

    assert main(["diloco", "pull", "store"]) == 2
    assert capsys.readouterr().err == "error: model.safetensors is there already; --force replaces it\n"
    assert (working_folder / "model.safetensors").read_bytes() == b"mine"

    assert main(["diloco", "pull", "store", "--force"]) == 0
    assert (working_folder / "model.safetensors").read_bytes() == weights_of(2)


def test_a_version_that_is_not_there_is_one_line_and_bad_use(
    working_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["diloco", "pull", "store", "--version", "9"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("there is no version 9; the newest is 2")
    assert not (working_folder / "model.safetensors").exists()
