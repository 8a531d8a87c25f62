from __future__ import annotations

import json
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from speedtronic.cli import main
from speedtronic.distributed.stores import Listing, MemoryStore, open_store
from speedtronic.errors import StoreUnavailableError
from tests.support.published import MARK, publish, publish_two_versions


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
    assert "no folder and no file is there, and an address has :// in it" in refused(capsys, word)


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
    monkeypatch.setattr("speedtronic.cli.diloco_store._RETRIES", {"initial": 1e-4, "maximum": 1e-4, "attempts": 3})

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
