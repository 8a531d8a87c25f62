from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from speedtronic.cli import main
from speedtronic.config import load_config
from speedtronic.config.run_folder import save_run
from speedtronic.distributed.records import seconds_of
from speedtronic.distributed.stores import MemoryStore, open_store
from speedtronic.errors import StoreUnavailableError
from tests.support.published import MARK, STORE, TIME, publish, publish_two_versions, weights_of

# ---------------------------------------------------------------------- status


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A store in a folder with version 2, the nodes `a` and `b`, and a delta of `b` that waits."""
    folder = tmp_path / "store"
    store = open_store(f"dir://{folder}")
    publish_two_versions(store)
    store.put_if_absent("in/b/00000001-0000aaaa/00000004.safetensors", bytes(1500))
    return folder


@pytest.fixture(autouse=True)
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The clock of `status`: half a minute after the newest version of `folder`."""
    seconds = [seconds_of(TIME) + 30.0]
    monkeypatch.setattr("speedtronic.cli.diloco._now", lambda: seconds[0])
    return seconds


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
    summary, master, headings, of_a, of_b, *_ = told(capsys, f"dir://{folder}").splitlines()

    assert "version 2 (1.5 rounds), 30s old" in summary
    assert "1 delta waits (1.5 kB)" in master
    assert headings.split("  ")[0] == "NODE"
    cells = [[word.strip() for word in line.split("  ") if word] for line in (of_a, of_b)]
    assert cells[0] == ["a", "running", "1m ago", "75", "154k", "0.5", "3.0 kB", "0", "1: stale"]
    assert cells[1] == ["b", "running", "1m ago", "75", "154k", "0", "4.5 kB", "1", "0"]


@pytest.mark.parametrize(("silent", "state"), [(30, "running"), (400, "late"), (700, "gone")])
def test_who_has_been_silent_for_long_is_late_and_then_gone(
    folder: Path, now: list[float], silent: int, state: str, capsys: pytest.CaptureFixture[str]
) -> None:
    now[0] = seconds_of(TIME) + float(silent)

    _, master, _, of_a, *_ = told(capsys, folder).splitlines()

    if state == "gone":  # of a master nobody can know: it may also take none of the deltas
        assert master.startswith(
            "master: silent: no new version for 11m, and 1 delta waits (1.5 kB): no master runs, or "
        )
    else:
        assert master.startswith(f"master: {state}: 1 delta waits (1.5 kB), and the newest version is ")
    assert ("`speedtronic diloco master CONFIG` starts another" in master) == (state != "running")
    assert of_a.split()[1] == state


def test_a_master_for_whom_nothing_waits_is_unknown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    publish_two_versions(open_store(f"dir://{tmp_path}"))

    assert told(capsys, tmp_path).splitlines()[1].startswith("master: unknown: nothing waits for it")


def test_before_a_second_version_nobody_knows_how_long_one_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = open_store(f"dir://{tmp_path}")
    publish(store)
    store.put_if_absent("in/b/00000001-0000aaaa/00000001.safetensors", bytes(9))

    _, master, _, of_b, *_ = told(capsys, tmp_path).splitlines()
    assert master == "master: unknown: 1 delta waits (9 B), and how long a version takes is not known yet"
    assert of_b.split() == ["b", "unknown", "-", "0", "0", "-", "9", "B", "1", "0"]


def test_the_words_of_the_screen_are_explained_below_the_table(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    below = told(capsys, folder).split("\n\n", 1)[1]

    for word in ("STATE", "SEEN", "STEP, TOKENS", "ROUNDS BEHIND", "WAITING", "fraction", "staleness", "late", "gone"):
        assert word in below


def test_the_table_is_framed_on_a_terminal(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "160")

    assert "│ a    │" in told(capsys, f"dir://{folder}")


def test_ages_are_those_of_the_version_and_of_the_nodes_last_delta(
    tmp_path: Path, now: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    store = open_store(f"dir://{tmp_path}")
    publish(store, publish(store), nodes={"a": MARK.model_copy(update={"time": int(now[0]) - 3 * 3600 - 600})})

    summary, _, _, of_a, *_ = told(capsys, tmp_path).splitlines()
    assert "30s old" in summary
    assert of_a.split()[:4] == ["a", "gone", "3h", "ago"]


def test_a_reason_cannot_steer_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = open_store(f"dir://{tmp_path}")
    publish(store, publish(store), nodes={"a": MARK.model_copy(update={"reason": "bad\x1b[2J"})})

    assert "1: bad\ufffd[2J" in told(capsys, tmp_path)


def test_a_store_in_which_no_node_was_yet_has_no_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    publish(open_store(f"dir://{tmp_path}"))

    summary, master = told(capsys, tmp_path).splitlines()

    assert "version 0" in summary
    assert master.startswith("master: unknown")


def test_json_is_one_object(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = json.loads(told(capsys, f"dir://{folder}", "--json"))

    assert (status["version"], status["rounds"], status["outstanding"], status["outstanding_bytes"]) == (
        2,
        1.5,
        1,
        1500,
    )
    assert (status["master"], status["age"], status["id"]) == ("running", 30.0, STORE)
    of_a, of_b = status["nodes"]
    assert (of_a["name"], of_b["name"]) == ("a", "b")
    assert (of_a["health"], of_a["rounds_behind"], of_a["reason"]) == ("running", 0.5, "stale")
    (session,) = of_b["sessions"]
    assert (session["seq"], session["outstanding"]) == (3, 1)


def test_the_help_describes_every_field(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status: dict[str, Any] = json.loads(told(capsys, f"dir://{folder}", "--json"))
    text = told(capsys, "--help")

    fields = (*status, *status["nodes"][0], *status["nodes"][0]["sessions"][0])
    assert not [field for field in fields if field not in text]


def test_a_folder_and_the_yaml_of_a_run_name_the_store_too(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(f"distributed: {{enabled: true, repo_id: 'dir://{folder}'}}\n", encoding="utf-8")

    assert len({told(capsys, store, "--json") for store in (f"dir://{folder}", folder, config)}) == 1


def test_the_folder_of_a_run_stands_for_its_yaml(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    save_run(run, load_config({"distributed": {"enabled": True, "repo_id": f"dir://{folder}"}}), "id", [])

    assert told(capsys, run, "--json") == told(capsys, folder, "--json")
    assert main(["diloco", "pull", str(run), "--out", str(tmp_path / "pulled.safetensors")]) == 0
    assert (tmp_path / "pulled.safetensors").read_bytes() == weights_of(2)


def test_values_on_the_command_line_go_before_those_of_the_run(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("distributed: {repo_id: 'dir:///nowhere'}\n", encoding="utf-8")
    here = f"distributed.repo_id=dir://{folder}"

    assert told(capsys, config, here, "--json") == told(capsys, folder, "--json")
    assert main(["diloco", "pull", str(config), "--out", str(tmp_path / "pulled.safetensors"), here]) == 0
    capsys.readouterr()
    assert f"{here}: goes with the YAML or the folder of a run" in refused(capsys, folder, here)
    assert f"{here}: goes with the YAML or the folder of a run" in refused(capsys, f"dir://{folder}", here)
    assert "no store is named" in refused(capsys, here)


def test_the_folder_of_a_run_asks_for_the_secrets_that_it_lacks(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    options = {"key": "who", "secret": "hush"}
    section = {"enabled": True, "repo_id": "s3://bucket/prefix", "store_options": options}
    save_run(run, load_config({"distributed": section}), "id", [])

    assert "the folder of a run keeps no secrets" in refused(capsys, run)


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

        def get(self, *asked: object, **options: object) -> bytes:
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
